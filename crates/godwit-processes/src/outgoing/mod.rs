//! The source's side of a move: one task, which takes the steps of `godwit_move` and stores each step before its start.

pub mod containers;
mod datagrams;
mod memory;
mod preparing;
pub mod records;
mod recovery;
mod steps;
mod waiting;

use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use godwit_move::{Course, Ending, Kind, Outcome, Plane, Progress, Refusal, Step, Subject};
use godwit_verbs::mover::is_worth_copying;
use godwit_verbs::shim::QueuePairState;

use self::preparing::chosen::Chosen;
use self::preparing::preflight::Clear;
use self::preparing::reach::{ANSWER, Reach};
use self::records::shown::{name, phase, shown};
use self::records::stored::Outgoing;
pub use self::recovery::recover;
use super::messages::Ask;
use super::{check_enabled, folder, remove, view};
use crate::host::address::OwnAddress;
use crate::host::criu;
use crate::incoming::rounds;
use crate::{Processes, durable};
use godwit_api::{
    ErrorBody, ErrorCode, MigrateProcess, ProcessMigration, ProcessMigrationPhase as Phase,
};
use godwit_context::failpoint;
use godwit_context::ids::new_id;
use godwit_context::store::process_moves::Kind as Record;
use godwit_peers::clock;

/// Most files that may come along.
const MAX_FILES: usize = 64;
/// Time between two attempts of a step with an unknown outcome.
const AGAIN: Duration = Duration::from_secs(1);
/// Longest wait for the end of a cancelled move before its state is returned.
const CANCEL_WAIT: Duration = Duration::from_secs(60);

/// A stored move, with the transient state of its task.
struct Running {
    processes: Arc<Processes>,
    reach: Reach,
    plan: Outgoing,
    cancelled: Arc<AtomicBool>,
    /// The queue pairs of both sides at their suspension: the process's, and each partner's.
    suspended: Option<(Vec<QueuePairState>, Vec<Vec<QueuePairState>>)>,
    /// True if obstacles and partners were found since the move last waited.
    looked: bool,
    /// The time of the first suspension.
    stopped: Option<Instant>,
}

/// Moves a process to another node. Answers once no obstacle was found.
///
/// # Errors
/// All obstacles in one message; nothing has changed then.
pub async fn migrate(
    processes: &Arc<Processes>,
    pid: u32,
    request: MigrateProcess,
) -> Result<ProcessMigration, ErrorBody> {
    processes.context.check_open()?;
    check_enabled(processes)?;
    let chosen = Chosen::process(pid)
        .await
        .map_err(|error| ErrorBody::new(ErrorCode::Internal, error))?;
    start(processes, chosen, request).await
}

async fn start(
    processes: &Arc<Processes>,
    chosen: Chosen,
    request: MigrateProcess,
) -> Result<ProcessMigration, ErrorBody> {
    let (pid, name) = (chosen.pid, chosen.name());
    let invalid = |text: String| ErrorBody::new(ErrorCode::Invalid, text);
    let MigrateProcess { to, options, .. } = &request;
    let files = &options.files;
    if *to == processes.context.config.name {
        return Err(invalid(format!("{name} is on node '{to}' already")).hint("name another node"));
    }
    processes.context.peer(to)?;
    if files.len() > MAX_FILES {
        return Err(invalid(format!(
            "{} files are named, and at most {MAX_FILES} can come along",
            files.len()
        )));
    }
    let address = match &options.address {
        None => None,
        Some(text) => Some(own_address(text).await?),
    };
    let id = new_id()?;
    let mut reach = Reach::new(Arc::clone(processes), id);
    let held = || processes.held.holder(pid).is_some();
    let mut found = None;
    // The search would miss a partner that moves just now. The partner's move has an end, and this move waits for the
    // end.
    if !held() {
        let looked =
            preparing::preflight::look(processes, &mut reach, &chosen, to, address.as_ref(), files)
                .await;
        match looked.clear(&name, to) {
            Ok(clear) => found = Some(clear),
            Err(_) if held() => {}
            Err(text) => return Err(ErrorBody::new(ErrorCode::Conflict, text)),
        }
    }
    let looked = found.is_some();
    let found = match found {
        Some(clear) => clear,
        None => Clear {
            queue_pairs: 0,
            datagrams: false,
            partners: Vec::new(),
            layout: criu::layout(pid).ok().flatten().ok_or_else(|| {
                let text = format!("process {pid} does not run");
                ErrorBody::new(ErrorCode::Conflict, text)
            })?,
        },
    };
    // Nodes accept only few of these connections at once.
    reach.keep(|name| name == to || found.partners.iter().any(|(partner, _)| partner == name));
    let plan = plan(id.to_string(), chosen, request, address, found);
    let place = folder(processes, &plan.id);
    std::fs::create_dir_all(&place).map_err(|error| {
        ErrorBody::new(
            ErrorCode::Internal,
            format!("cannot make a folder for the image: {error}"),
        )
    })?;
    begin(processes, reach, plan, looked).inspect_err(|_| {
        // The folder is empty. A failed removal is made up for at the node's next start.
        let _left = std::fs::remove_dir(place);
    })
}

/// Returns the address of this host that is to move with a process.
async fn own_address(text: &str) -> Result<OwnAddress, ErrorBody> {
    let invalid = |text: String| ErrorBody::new(ErrorCode::Invalid, text);
    let parsed: IpAddr = text.parse().map_err(|_| {
        let shown: String = text.chars().take(64).collect();
        invalid(format!("{shown:?} is no IP address"))
            .hint("give it without its network, such as 10.0.0.100")
    })?;
    if parsed.is_ipv6() {
        let text = format!("an IPv6 address such as {parsed} cannot move with a process");
        return Err(invalid(text).hint("give an IPv4 address"));
    }
    let found = OwnAddress::find(parsed).await;
    let found = found.map_err(|error| ErrorBody::new(ErrorCode::Internal, error))?;
    found.ok_or_else(|| {
        let text = format!("this host has no address {parsed} that could move");
        ErrorBody::new(ErrorCode::Conflict, text).hint("see 'ip address show'")
    })
}

/// Returns the record of a new move.
fn plan(
    id: String,
    chosen: Chosen,
    request: MigrateProcess,
    address: Option<OwnAddress>,
    found: Clear,
) -> Outgoing {
    let subject = match chosen.container {
        None => Subject::Process,
        Some(_) => Subject::Container,
    };
    let mut plan = Outgoing {
        id,
        pid: chosen.pid,
        container: chosen.container,
        plain: chosen.plain,
        command: view::command(chosen.pid),
        to: request.to,
        address,
        files: request.options.files,
        partners: found.partners,
        queue_pairs: found.queue_pairs,
        datagrams: found.datagrams,
        layout: found.layout,
        started_at: clock::now_text(),
        moving: Course::new(subject, []),
        not_held: true,
        made: None,
        rounds: 0,
        ahead: false,
        attached: false,
        goes_on: false,
    };
    let memory = request.options.pre_copy && is_worth_copying(plan.subject().resident());
    let copied = [(Plane::Memory, memory), (Plane::Objects, request.pre_setup)].into_iter();
    let left_out = copied
        .filter(|(_, is)| !is)
        .map(|(plane, _)| Step::Copy(plane));
    plan.moving = Course::new(subject, left_out);
    plan
}

fn begin(
    processes: &Arc<Processes>,
    reach: Reach,
    plan: Outgoing,
    looked: bool,
) -> Result<ProcessMigration, ErrorBody> {
    let shown = shown(processes, &plan);
    let cancelled = processes.moves.begin(shown.clone())?;
    let running = Running {
        processes: Arc::clone(processes),
        reach,
        plan,
        cancelled,
        suspended: None,
        looked,
        stopped: None,
    };
    godwit_context::spawn(running.run());
    Ok(shown)
}

/// Cancels a move if the destination was not told to restore yet, and returns the resulting state.
///
/// # Errors
/// The move is unknown, has ended, or is too far.
pub async fn cancel(processes: &Arc<Processes>, id: &str) -> Result<ProcessMigration, ErrorBody> {
    let seen = processes.moves.table.get(id)?;
    let conflict = |text: String| ErrorBody::new(ErrorCode::Conflict, text);
    if seen.phase.ended() {
        return Err(conflict(format!(
            "move {id} has ended: it is {}",
            seen.phase.name()
        )));
    }
    processes.moves.cancel(id);
    let began = Instant::now();
    loop {
        let seen = processes.moves.table.get(id)?;
        match seen.phase {
            Phase::Aborted => return Ok(seen),
            Phase::Completed | Phase::Restoring | Phase::InDoubt | Phase::Connecting => {
                return Err(conflict(format!(
                    "it is too late to cancel move {id}: the destination was told to restore the process"
                )));
            }
            _ if began.elapsed() > CANCEL_WAIT => return Ok(seen),
            _ => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
}

impl Running {
    /// Stores the state of the move.
    fn store(&self) -> Result<(), String> {
        let store = &self.processes.context.store;
        let stored = store.put_process_move(Record::Outgoing, &self.plan.id, &self.plan);
        stored.map_err(|error| error.to_string())
    }

    async fn run(mut self) {
        let Some(ending) = self.take_steps().await else {
            // The node is closing: its next start takes the move up.
            return;
        };
        // The steps that follow delay no process.
        let blackout = self.stopped.map(steps::milliseconds);
        self.processes.moves.works(&self.plan.id);
        self.tell_senders(&ending).await;
        // The destination's record of the move has no use any more.
        let to = self.plan.to.clone();
        if self.plan.moving.progress(Plane::Image) >= Progress::Sending {
            let _ = self.reach.ask(&to, Ask::Over, ANSWER).await;
        }
        self.end(ending, blackout);
    }

    /// Removes the image and the rounds if the process runs here and does not need them: these files may fill the disk.
    // Not shared: a connection is used by one task at a time.
    async fn make_room(&mut self) {
        let step = self.plan.moving.step();
        let going_on = matches!(step, Step::TakeBack(Plane::Objects | Plane::Connections));
        if going_on && self.plan.subject().surely_found().await.is_some() {
            for name in ["image", rounds::KEPT] {
                // A missing folder does not matter.
                let _ = std::fs::remove_dir_all(folder(&self.processes, &self.plan.id).join(name));
            }
        }
    }

    async fn take_steps(&mut self) -> Option<Ending> {
        loop {
            if self.cancelled.load(Ordering::Acquire) {
                let why = Refusal::new(Kind::Cancelled, "it was cancelled");
                self.plan.moving.cancel(why);
            }
            self.plan.holds_from(self.plan.moving.step());
            if let Err(error) = self.store() {
                tracing::error!(
                    id = self.plan.id,
                    error,
                    "a move of a process cannot be stored"
                );
                if !self.plan.unstored(&error) {
                    self.make_room().await;
                    if self.processes.context.is_closing() {
                        return None;
                    }
                    tokio::time::sleep(AGAIN).await;
                    continue;
                }
            }
            if let Some(ending) = self.plan.moving.ending() {
                return Some(ending);
            }
            if self.processes.context.is_closing() {
                return None;
            }
            let step = self.plan.moving.step();
            self.processes
                .moves
                .table
                .change(&self.plan.id, |view| view.phase = phase(step));
            tracing::info!(
                id = self.plan.id,
                pid = self.plan.pid,
                step = name(step),
                "a process moves"
            );
            failpoint::reach(format!("process-{}", name(step))).await;
            let mut outcome = self.carry_out(step).await;
            match &outcome {
                Outcome::Done => {}
                Outcome::Failed(why) | Outcome::Unknown(why) | Outcome::Died(why) => {
                    let why = &why.what;
                    tracing::warn!(id = self.plan.id, step = name(step), why, "a step failed");
                }
            }
            let fails = matches!(outcome, Outcome::Failed(_) | Outcome::Unknown(_));
            if fails
                && step.needs_subject_here()
                && self.plan.subject().surely_found().await.is_none()
            {
                let text = format!("process {} has ended", self.plan.pid);
                outcome = Outcome::Died(Refusal::new(Kind::Ended, text));
            }
            if matches!(outcome, Outcome::Unknown(_)) && !step.cancellable() {
                tokio::time::sleep(AGAIN).await;
            }
            self.plan.moving.happened(outcome);
        }
    }

    /// Returns the error of an ending, if any. `kept` is the place of the image of a lost process.
    fn error(&self, ending: Ending, kept: Option<&Path>) -> Option<ErrorBody> {
        let (to, here, name) = (
            &self.plan.to,
            &self.processes.context.config.name,
            self.plan.name(),
        );
        let conflict = |text: String| Some(ErrorBody::new(ErrorCode::Conflict, text));
        match ending {
            Ending::Moved { lost: None } => None,
            Ending::Moved { lost: Some(lost) } => conflict(format!(
                "{name} runs at node '{to}', but its RDMA connections were lost: {lost}"
            )),
            Ending::Stayed { why, lost: None } => conflict(format!(
                "{name} did not move and goes on at node '{here}' with its connections: {}",
                why.what
            )),
            Ending::Stayed {
                why,
                lost: Some(lost),
            } => conflict(format!(
                "{name} did not move and goes on at node '{here}', but its RDMA connections were lost: {}; {lost}",
                why.what
            )),
            Ending::Gone { why } if !self.has_image() => {
                conflict(format!("{name} did not move: {}", why.what))
            }
            Ending::Gone { why } => {
                conflict(format!("{name} is lost: {}", why.what)).map(|error| match kept {
                    Some(place) => error.hint(format!("its image is kept in {}", place.display())),
                    None => error,
                })
            }
        }
    }

    /// Returns true if the source may have an image of the process. A dump may end the process and still fail.
    fn has_image(&self) -> bool {
        self.plan.moving.progress(Plane::Image) >= Progress::Freezing
    }

    /// Forgets an ended move, except for the image and the record of a lost process, which are for people.
    fn forget(&self, kept: Option<&Path>) -> Result<(), String> {
        let left = match kept {
            // The file keeps the image's folder once the record is gone, also over a power failure.
            Some(place) => serde_json::to_vec(&self.plan)
                .map_err(std::io::Error::from)
                .and_then(|record| durable::write(&place.join("lost.json"), &record)),
            None => remove(&folder(&self.processes, &self.plan.id)),
        };
        left.map_err(|error| error.to_string())?;
        let store = &self.processes.context.store;
        let removed = store.remove_process_move(Record::Outgoing, &self.plan.id);
        removed.map_err(|error| error.to_string())
    }

    /// Records the ending of a move. `blackout` is the standstill of the process in milliseconds, if stopped.
    fn end(&self, ending: Ending, blackout: Option<f64>) {
        let Outgoing { id, pid, to, .. } = &self.plan;
        let place = folder(&self.processes, id);
        let keeps = matches!(ending, Ending::Gone { .. })
            && self.has_image()
            && place.join("image").try_exists().unwrap_or(true);
        let kept = keeps.then_some(place.as_path());
        let error = self.error(ending, kept);
        if let Err(error) = self.forget(kept) {
            tracing::warn!(id, error, "cannot remove what is left of a move");
        }
        let moves = &self.processes.moves.table;
        moves.change(id, |view| {
            view.blackout_ms = blackout;
            view.waits_for = None;
        });
        match &error {
            None => tracing::info!(id, pid, to, "the process runs at the other node"),
            Some(error) => {
                tracing::warn!(id, pid, error = error.message, "a move of a process failed")
            }
        }
        self.processes.held.moved(id);
        moves.end(id, error, |_| ());
    }
}
