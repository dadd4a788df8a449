//! The requests of other nodes about moving processes, with the checks.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use godwit_verbs::control::{self, Answer as LibraryAnswer, Request, Status};
use godwit_verbs::mover::ends_of;
use godwit_verbs::offer;
use godwit_verbs::preflight::Offer;
use godwit_verbs::shim::{Connection, Plan, QueuePairState, Redirect};

use super::arrivals;
use super::holder::Holder;
use super::partners::{Mover, NotHeld};
use super::rounds;
use crate::Processes;
use crate::host::threads::{MOST_THREADS, thread_in_image};
use crate::host::{criu, files};
use crate::messages::{self, Answer, Ask, FoundProcess};
use crate::{NotDone, ask_all, check_enabled, hear, statuses};
use godwit_context::blocking;
use godwit_context::failpoint;
use godwit_peers::PeerConnection;

/// Longest silence of a connection: a dump or a transfer may take as long.
const IDLE: Duration = Duration::from_secs(900);

/// The state of one node's requests about one move.
#[derive(Debug)]
pub(crate) struct Session {
    /// The asking node.
    peer: String,
    /// The id of the move.
    id: String,
    /// Processes found on this connection, with their concerned queue pairs.
    found: BTreeMap<u32, Vec<u32>>,
    /// The holder of objects made ahead of the arriving process.
    holder: Option<Holder>,
    /// Memory rounds received so far.
    rounds: u32,
}

impl Session {
    pub(crate) fn new(peer: String, id: String) -> Self {
        Self {
            peer,
            id,
            found: BTreeMap::new(),
            holder: None,
            rounds: 0,
        }
    }

    /// Answers a request, except for [`Ask::Image`] and [`Ask::Memory`], whose bytes follow on the connection.
    pub(crate) async fn answer(&mut self, processes: &Processes, asked: Ask) -> Answer {
        if let Err(error) = check_enabled(processes) {
            return Answer::Refused(error.message);
        }
        let (id, peer) = (self.id.as_str(), self.peer.as_str());
        match asked {
            Ask::Find { ours } => self.find(&ours).await,
            Ask::Look {
                pid,
                container,
                address,
                files: wanted,
                needs,
            } => {
                let mut reasons = match &address {
                    Some(own) => own.reasons().await,
                    None => Vec::new(),
                };
                let roots = processes.context.config.process_files();
                reasons.extend(wanted.iter().filter_map(|path| files::refusal(roots, path)));
                reasons.extend(files::absent(&needs));
                let pids = match &container {
                    // The process gets another number.
                    Some(container) => {
                        reasons.extend(container.reasons_here().await);
                        Vec::new()
                    }
                    None => vec![pid],
                };
                match look(pids).await {
                    Ok(offer) => Answer::Looked { offer, reasons },
                    Err(error) => Answer::Refused(error),
                }
            }
            Ask::Claim { pid, moving } => self.claim(processes, pid, moving),
            Ask::Partner { pid, request } => self.partner(processes, pid, request).await,
            Ask::Hold { pid, threads, plan } => self.hold(pid, threads, plan).await,
            Ask::ConnectHeld { connections } => self.connect_held(connections).await,
            Ask::GiveUpHeld => {
                self.give_up_held().await;
                Answer::Done
            }
            Ask::Image(_) | Ask::Memory(_) => {
                Answer::Refused("an image cannot come this way".to_owned())
            }
            Ask::Restore => arrivals::restore(processes, id, peer).await,
            Ask::Settle => arrivals::settle(processes, id, peer).await,
            Ask::Recreate => {
                let holder = self.holder.take();
                arrivals::recreate(processes, id, peer, holder).await
            }
            Ask::Redirect { redirects } => redirect(processes, redirects).await,
            Ask::Moved { request } => arrivals::moved(processes, id, peer, request).await,
            Ask::Over => {
                arrivals::over(processes, id, peer).await;
                Answer::Done
            }
        }
    }

    /// Finds partners of a process. Discloses only queue pairs of which the asker knows both ends.
    async fn find(&mut self, ours: &[QueuePairState]) -> Answer {
        let pids = match blocking(control::processes).await {
            Ok(Ok(pids)) => pids,
            Ok(Err(error)) => return Answer::Refused(format!("cannot list sockets: {error}")),
            Err(error) => return Answer::Refused(error.message),
        };
        let mut found = Vec::new();
        for (pid, status) in statuses(pids).await {
            if let Some(party) = ends_of(ours, pid, &status.queue_pairs) {
                let numbers = party.numbers();
                found.push(FoundProcess {
                    pid,
                    status: only(status, &numbers),
                });
                self.found.insert(pid, numbers);
            }
        }
        Answer::Found(found)
    }

    async fn hold(&mut self, pid: u32, mut threads: Vec<u32>, plan: Plan) -> Answer {
        if threads.len() > MOST_THREADS {
            let text = format!("more than {MOST_THREADS} threads are named");
            return Answer::Refused(text);
        }
        threads.push(pid);
        // Only one holder at a time: the objects of an earlier holder may fill the device.
        self.give_up_held().await;
        let holder = match Holder::start(&threads).await {
            Ok(holder) => holder,
            Err(error) => return Answer::Refused(error),
        };
        match holder.hold(plan).await {
            Ok(answer) => {
                self.holder = Some(holder);
                Answer::Library(answer)
            }
            Err(error) => {
                holder.end().await;
                Answer::Refused(error)
            }
        }
    }

    async fn give_up_held(&mut self) {
        if let Some(holder) = self.holder.take() {
            holder.end().await;
        }
    }

    /// Ends the holder if the image has a thread with one of its numbers: a thread may have started after the holder,
    /// or belong to another process that comes along. The process has precedence.
    async fn make_way(&mut self, offer: &messages::ImageOffer) {
        let files = offer.image.iter();
        let coming: Vec<u32> = files
            .filter_map(|file| thread_in_image(&file.name))
            .collect();
        let meets = |holder: &Holder| !matches!(holder.meets(&coming), Ok(false));
        if self.holder.as_ref().is_some_and(meets) {
            self.give_up_held().await;
        }
    }

    async fn connect_held(&self, connections: Vec<Connection>) -> Answer {
        let Some(holder) = &self.holder else {
            return Answer::Refused("nothing was made ahead of the process".to_owned());
        };
        let connected = holder.connect(connections).await;
        connected.map_or_else(Answer::Refused, Answer::Library)
    }

    /// Claims a process found on this connection for this move. Does not change the work of the process.
    fn claim(&self, processes: &Processes, pid: u32, moving: u32) -> Answer {
        let held = &processes.held;
        if held.of(&self.id, &self.peer, pid).is_some() {
            return Answer::Done;
        }
        let Some(numbers) = self.found.get(&pid) else {
            return Answer::Refused(format!("process {pid} is no partner"));
        };
        match held.hold(processes, self.mover(moving), pid, numbers) {
            Ok(()) => Answer::Done,
            Err(NotHeld::Waits(who)) => Answer::Waits(who),
            Err(NotHeld::Failed(why)) => Answer::Refused(why),
        }
    }

    fn mover(&self, pid: u32) -> Mover<'_> {
        Mover {
            id: &self.id,
            peer: &self.peer,
            pid,
        }
    }

    async fn partner(&self, processes: &Processes, pid: u32, request: Request) -> Answer {
        let (id, peer, held) = (&self.id, &self.peer, &processes.held);
        let suspends = matches!(request, Request::Suspend { .. });
        let prepares = matches!(request, Request::Prepare { .. });
        let numbers = match held.of(id, peer, pid) {
            Some(numbers) => numbers,
            // The process was let go, or never held: the process works already.
            None if matches!(request, Request::Resume { .. }) => {
                return Answer::Library(LibraryAnswer::Done);
            }
            None => {
                return Answer::Refused(format!(
                    "process {pid} is not held for this move: it was not claimed, or not heard of for too long"
                ));
            }
        };
        if let Some(why) = beyond(&request, &numbers) {
            return Answer::Refused(format!("process {pid}: {why}"));
        }
        if prepares && let Err(error) = held.prepares(processes, id, pid) {
            return Answer::Refused(error);
        }
        failpoint::reach(format!("process-partner-{}", name(&request))).await;
        let resumes = matches!(request, Request::Resume { .. });
        let mut answer = hear(pid, request).await;
        if matches!(answer, Err(NotDone::Silent(_))) && matches!(criu::layout(pid), Ok(None)) {
            // An ended process has no connections any more, so nothing waits for the process.
            answer = if resumes {
                Ok(LibraryAnswer::Done)
            } else {
                Err(NotDone::Silent(format!("process {pid} has ended")))
            };
        }
        let works = match &answer {
            Ok(_) => resumes,
            // A process that was not suspended is not held. A refusing process may be held for another move, and is not
            // resumed here.
            Err(NotDone::Refused(_)) => suspends,
            Err(NotDone::Silent(_)) if suspends => {
                // The silent process may have heard the request. If the process does not hear this one either, the
                // watch repeats it once the hold is late.
                let only = Some(numbers.clone());
                !matches!(
                    hear(pid, Request::Resume { only }).await,
                    Err(NotDone::Silent(_))
                )
            }
            // Queue pairs that the process may have made all the same are destroyed when the hold ends.
            Err(NotDone::Silent(_)) => false,
        };
        if works {
            held.let_go(processes, id, pid);
        }
        match answer {
            Ok(LibraryAnswer::Status(status)) => {
                Answer::Library(LibraryAnswer::Status(only(status, &numbers)))
            }
            Ok(answer) => Answer::Library(answer),
            Err(error) => Answer::Refused(error.into_text()),
        }
    }
}

/// Tells all processes of this host about redirects, since the senders to a datagram queue pair are unknown. A process
/// stopped in a move from here hears the redirects at the end of its move: a request to a process during its dump may
/// disturb the dump.
async fn redirect(processes: &Processes, redirects: Vec<Redirect>) -> Answer {
    let moves = &processes.moves;
    // A process that goes on before the listing hears the redirects twice rather than never.
    let mut still = moves.note_missed(&redirects);
    let pids = match blocking(control::processes).await {
        Ok(Ok(pids)) => pids,
        Ok(Err(error)) => return Answer::Refused(format!("cannot list sockets: {error}")),
        Err(error) => return Answer::Refused(error.message),
    };
    still.extend(moves.note_missed(&redirects));
    let asked = pids.into_iter().filter(|pid| !still.contains(pid));
    let request = Request::Redirect {
        redirects: redirects.clone(),
    };
    let answers = ask_all(asked.collect(), request).await.into_iter();
    let mut failed = answers
        .filter_map(|(pid, answer)| Some((pid, answer.err()?)))
        .peekable();
    if failed.peek().is_some() {
        // A process that stopped after the first note may not have heard the redirects.
        still = moves.note_missed(&redirects);
    }
    let failed = failed.find(|(pid, _)| !still.contains(pid));
    failed.map_or(Answer::Done, |(_, error)| Answer::Refused(error))
}

/// Returns the name of a partner's request for fail points.
fn name(request: &Request) -> &'static str {
    match request {
        Request::Suspend { .. } => "suspend",
        Request::Drain { .. } => "drain",
        Request::Connect { .. } => "connect",
        Request::Resume { .. } => "resume",
        Request::Prepare { .. } => "prepare",
        Request::Switch { .. } => "switch",
        _ => "other",
    }
}

/// Reduces a status to these queue pairs.
fn only(status: Status, numbers: &[u32]) -> Status {
    let concerned = status.queue_pairs.into_iter();
    Status {
        queue_pairs: concerned
            .filter(|pair| numbers.contains(&pair.number))
            .collect(),
        obstacles: Vec::new(),
        needs: Vec::new(),
    }
}

/// Returns the reason if a request reaches beyond these queue pairs.
fn beyond(request: &Request, numbers: &[u32]) -> Option<String> {
    let named: Vec<u32> = match request {
        Request::Status => return None,
        Request::Suspend { only: Some(only) }
        | Request::Resume { only: Some(only) }
        | Request::Abandon { only: Some(only) } => only.clone(),
        Request::Switch { numbers, .. } => numbers.clone(),
        Request::Drain { peer_sent, .. } => peer_sent.iter().map(|(number, _)| *number).collect(),
        Request::Connect { connections } | Request::Prepare { connections } => {
            connections.iter().map(|one| one.number).collect()
        }
        Request::Suspend { only: None }
        | Request::Resume { only: None }
        | Request::Abandon { only: None }
        | Request::Release
        | Request::TrackWritten
        | Request::MarkWritten
        | Request::Recreate { .. }
        | Request::Plan
        | Request::Redirects
        | Request::Hold { .. }
        | Request::ConnectHeld { .. }
        | Request::HandOver
        | Request::Attach { .. }
        | Request::Redirect { .. }
        | Request::Tidy => {
            return Some("this is not asked of a partner".to_owned());
        }
    };
    let other = named.iter().find(|number| !numbers.contains(number));
    other.map(|other| format!("queue pair {other} is not connected to the process that moves"))
}

/// Returns the offer of this host.
///
/// # Errors
/// One sentence.
pub(crate) async fn look(pids: Vec<u32>) -> Result<Offer, String> {
    match blocking(move || offer::offer(&pids)).await {
        Ok(Ok(offer)) => Ok(offer),
        Ok(Err(error)) => Err(format!("cannot list RDMA devices: {error}")),
        Err(error) => Err(error.message),
    }
}

/// Answers requests on a connection until the connection ends.
pub async fn serve(
    processes: Arc<Processes>,
    mut connection: PeerConnection,
    peer: String,
    id: String,
) {
    let Ok(_place) = processes.sessions.clone().try_acquire_owned() else {
        let busy = Answer::Busy("the node has too many moves of processes under way".to_owned());
        // A node without this answer sees the connection end.
        let _ = messages::write(&mut connection, &busy).await;
        return;
    };
    let mut session = Session::new(peer.clone(), id.clone());
    loop {
        let asked = tokio::select! {
            asked = messages::read(&mut connection, IDLE) => asked,
            () = processes.context.closed() => break,
        };
        let answer = match asked {
            Ok(Ask::Image(offer)) => {
                session.make_way(&offer).await;
                match image(&processes, &mut connection, &session, *offer).await {
                    Some(answer) => {
                        if matches!(answer, Answer::Done) {
                            // The rounds belong to the image now.
                            session.rounds = 0;
                        }
                        answer
                    }
                    None => break,
                }
            }
            Ok(Ask::Memory(offer)) => {
                match memory(&processes, &mut connection, &session, offer).await {
                    Some(answer) => {
                        session.rounds += u32::from(matches!(answer, Answer::Done));
                        answer
                    }
                    None => break,
                }
            }
            Ok(asked) => session.answer(&processes, asked).await,
            Err(error) => {
                tracing::debug!(peer, id, %error, "a connection about a process ended");
                break;
            }
        };
        if messages::write(&mut connection, &answer).await.is_err() {
            break;
        }
    }
    if session.rounds > 0 {
        rounds::forget(&processes.context.config.processes_dir(), &id);
    }
    processes.held.left_alone(&id, &peer);
}

async fn image(
    processes: &Processes,
    connection: &mut PeerConnection,
    session: &Session,
    offer: messages::ImageOffer,
) -> Option<Answer> {
    let Session { peer, id, .. } = session;
    let admitted = check_enabled(processes)
        .map_err(|error| error.message)
        .and_then(|()| arrivals::admit(processes, id, &offer, session.rounds));
    if let Err(error) = admitted {
        return Some(Answer::Refused(error));
    }
    messages::write(connection, &Answer::Ready).await.ok()?;
    let taken = arrivals::take(processes, id, peer, offer, connection).await;
    came(connection, session, taken).await
}

async fn memory(
    processes: &Processes,
    connection: &mut PeerConnection,
    session: &Session,
    offer: messages::MemoryOffer,
) -> Option<Answer> {
    let admitted = check_enabled(processes)
        .map_err(|error| error.message)
        .and_then(|()| rounds::admit(processes, &session.id, &offer, session.rounds));
    if let Err(error) = admitted {
        return Some(Answer::Refused(error));
    }
    messages::write(connection, &Answer::Ready).await.ok()?;
    let taken = rounds::take(
        &processes.context.config.processes_dir(),
        &session.id,
        &offer,
        connection,
    )
    .await;
    came(connection, session, taken).await
}

/// Returns the answer to received bytes, or `None` if the connection is useless.
async fn came(
    connection: &mut PeerConnection,
    session: &Session,
    taken: Result<(), String>,
) -> Option<Answer> {
    let Session { peer, id, .. } = session;
    match taken {
        Ok(()) => Some(Answer::Done),
        Err(error) => {
            tracing::warn!(peer, id, error, "an image did not come whole");
            // The position in the stream is unknown.
            let _ = messages::write(connection, &Answer::Refused(error)).await;
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_reaches_the_queue_pairs_of_its_own_process_and_no_others() {
        let mine = [7, 8];
        let to = |number| Connection {
            number,
            remote: godwit_verbs::tables::Gid([0; 16]),
            remote_physical: 1,
            remote_keys: None,
        };
        for good in [
            Request::Status,
            Request::Suspend {
                only: Some(vec![7]),
            },
            Request::Resume {
                only: Some(vec![7, 8]),
            },
            Request::Drain {
                peer_sent: vec![(8, 1)],
                bound_ms: 1,
            },
            Request::Connect {
                connections: Vec::new(),
            },
            Request::Prepare {
                connections: vec![to(8)],
            },
            Request::Switch {
                numbers: vec![7, 8],
                remote_keys: Vec::new(),
            },
            Request::Abandon {
                only: Some(vec![7]),
            },
        ] {
            assert_eq!(beyond(&good, &mine), None, "{good:?}");
        }
        for bad in [
            Request::Suspend { only: None },
            Request::Resume { only: None },
            Request::Suspend {
                only: Some(vec![7, 9]),
            },
            Request::Drain {
                peer_sent: vec![(9, 1)],
                bound_ms: 1,
            },
            Request::Release,
            Request::TrackWritten,
            Request::MarkWritten,
            Request::Recreate { device: None },
            Request::Prepare {
                connections: vec![to(7), to(9)],
            },
            Request::Switch {
                numbers: vec![9],
                remote_keys: Vec::new(),
            },
            Request::Abandon { only: None },
            Request::Abandon {
                only: Some(vec![9]),
            },
            Request::Tidy,
            Request::HandOver,
            Request::Attach { holder: 1 },
        ] {
            assert!(beyond(&bad, &mine).is_some(), "{bad:?}");
        }
    }
}
