//! The execution of each step.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use godwit_move::{Kind, Outcome, Plane, Refusal, Step};
use godwit_verbs::control::{Answer as LibraryAnswer, Request};
use godwit_verbs::mover::{Party, at_moved, at_partner, peer_sent};
use godwit_verbs::shim::{QueuePairState, Recreated};

use super::Running;
use super::preparing::reach::{ANSWER, Trouble};
use crate::host::criu;
use crate::host::criu::NotRestored;
use crate::images::Source;
use crate::incoming::arrivals;
use crate::messages::{Answer, Ask, ImageOffer};
use crate::{NotDone, ask, folder, hear, images, status};
use godwit_api::ProcessMigration;

/// Longest wait for requests in flight.
const DRAIN_BOUND: Duration = Duration::from_secs(20);
/// Longest restore before the destination is asked to settle.
const RESTORE: Duration = Duration::from_secs(620);
/// The answer of a process that never released its objects.
const HAS_OBJECTS: &str = "this process has its objects";

pub(super) fn failed(text: String) -> Trouble {
    Trouble::Refused(text)
}

pub(super) fn unexpected() -> Trouble {
    failed("the library gave an answer to another question".to_owned())
}

pub(super) fn milliseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

/// Returns true if a step concerns only the libraries of the process and its partners.
fn of_library(step: Step) -> bool {
    match step {
        Step::Copy(plane) | Step::Freeze(plane) | Step::TakeUp(plane) | Step::TakeBack(plane) => {
            matches!(plane, Plane::Objects | Plane::Connections)
        }
        Step::Stop | Step::Drain | Step::Resume | Step::ResumeHere | Step::LetGo => true,
        Step::Prepare | Step::Send(_) | Step::Decide | Step::Settle | Step::Pull(_) | Step::End => {
            false
        }
    }
}

fn unknown(why: String) -> Outcome {
    Outcome::Unknown(Refusal::new(Kind::Unreachable, why))
}

/// The side that connects the process to its partners.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Where {
    Here,
    There,
}

impl Running {
    pub(super) async fn carry_out(&mut self, step: Step) -> Outcome {
        let began = Instant::now();
        if step == Step::Stop {
            self.stopped = Some(began);
        }
        let done = match step {
            Step::Prepare => self.wait_for_turn().await,
            Step::Copy(Plane::Memory) => self.pre_copy().await,
            step if self.plan.plain && of_library(step) => Ok(()),
            Step::Copy(_) => self.pre_set_up().await,
            Step::Stop => self.suspend().await,
            Step::Drain => self.drain().await,
            Step::Freeze(Plane::Objects) => self.own(Request::Release).await.map(drop),
            Step::Freeze(_) => self.dump().await,
            Step::Send(_) => self.send().await,
            Step::Decide => return self.restore(Ask::Restore).await,
            Step::Settle => return self.restore(Ask::Settle).await,
            Step::TakeUp(Plane::Objects) => self.recreate().await,
            Step::TakeUp(_) => self.connect(Where::There).await,
            Step::Resume => self.resume(Where::There).await,
            Step::TakeBack(Plane::Image) => self.bring_back().await,
            Step::TakeBack(Plane::Objects) => self.recreate_here().await,
            Step::TakeBack(_) => self.connect(Where::Here).await,
            Step::ResumeHere => self.resume(Where::Here).await,
            Step::LetGo => self.resume_partners().await,
            Step::Pull(_) | Step::End => Ok(()),
        };
        let took = milliseconds(began);
        self.shows(|view| {
            let parts = &mut view.breakdown_ms;
            match step {
                Step::Copy(Plane::Memory) => view.pre_copy_ms = done.is_ok().then_some(took),
                Step::Copy(_) => view.pre_setup_ms = done.is_ok().then_some(took),
                Step::Stop | Step::Drain => *view.wait_ms.get_or_insert(0.0) += took,
                Step::Freeze(Plane::Objects) => parts.dump_rdma = took,
                Step::Freeze(_) => parts.dump_others = took,
                Step::Send(_) => parts.transfer = took,
                Step::TakeUp(_) => parts.restore_rdma += took,
                Step::Resume => parts.resume += took,
                _ => {}
            }
        });
        match done {
            Ok(()) => Outcome::Done,
            Err(Trouble::Refused(why)) => Outcome::Failed(Refusal::new(Kind::Refused, why)),
            Err(Trouble::Silent(why)) => unknown(why),
        }
    }

    pub(super) fn shows(&self, change: impl FnOnce(&mut ProcessMigration)) {
        self.processes.moves.table.change(&self.plan.id, change);
    }

    /// Sends a request to the process at the source.
    // Not shared: a connection is used by one task at a time.
    pub(super) async fn own(&mut self, request: Request) -> Result<LibraryAnswer, Trouble> {
        ask(self.plan.pid, request).await.map_err(failed)
    }

    async fn suspend(&mut self) -> Result<(), Trouble> {
        let pid = self.plan.pid;
        let ours = godwit_context::spawn(hear(pid, Request::Suspend { only: None }));
        let mut theirs = Vec::new();
        let mut trouble = None;
        for (name, party) in &self.plan.partners {
            let only = Some(party.numbers());
            match self
                .reach
                .partner(name, party.pid, Request::Suspend { only })
                .await
            {
                Ok(LibraryAnswer::Suspended(pairs)) => theirs.push(pairs),
                Ok(_) => trouble = Some(unexpected()),
                Err(error) => trouble = Some(error),
            }
        }
        let ours = ours
            .await
            .unwrap_or_else(|error| Err(NotDone::Silent(error.to_string())));
        // A refusing process is held by another move, of the process or of a partner. This move must not end the other
        // move's hold.
        self.plan.not_held = matches!(ours, Err(NotDone::Refused(_)));
        let LibraryAnswer::Suspended(ours) = ours.map_err(|error| failed(error.into_text()))?
        else {
            return Err(unexpected());
        };
        self.suspended = Some((ours, theirs));
        trouble.map_or(Ok(()), Err)
    }

    async fn drain(&mut self) -> Result<(), Trouble> {
        let Some((ours, theirs)) = self.suspended.take() else {
            return Err(failed("what was sent is not known".to_owned()));
        };
        let bound_ms = DRAIN_BOUND.as_millis() as u64;
        let mut for_us = Vec::new();
        for ((_, party), pairs) in self.plan.partners.iter().zip(&theirs) {
            let links = party.links.iter().map(|link| (link.ours, link.theirs));
            for_us.extend(peer_sent(links, pairs));
        }
        let request = Request::Drain {
            peer_sent: for_us,
            bound_ms,
        };
        let own = godwit_context::spawn(ask(self.plan.pid, request));
        let mut trouble = None;
        for (name, party) in &self.plan.partners {
            let links = party.links.iter().map(|link| (link.theirs, link.ours));
            let request = Request::Drain {
                peer_sent: peer_sent(links, &ours),
                bound_ms,
            };
            if let Err(error) = self.reach.partner(name, party.pid, request).await {
                trouble = Some(error);
            }
        }
        own.await
            .unwrap_or_else(|error| Err(error.to_string()))
            .map_err(failed)?;
        trouble.map_or(Ok(()), Err)
    }

    fn image(&self) -> PathBuf {
        folder(&self.processes, &self.plan.id).join("image")
    }

    async fn dump(&mut self) -> Result<(), Trouble> {
        let image = self.image();
        let made = std::fs::remove_dir_all(&image).or_else(|error| match error.kind() {
            std::io::ErrorKind::NotFound => Ok(()),
            _ => Err(error),
        });
        made.and_then(|()| std::fs::create_dir(&image))
            .map_err(|error| failed(format!("cannot make {}: {error}", image.display())))?;
        let since = self.since().await;
        let subject = self.plan.subject();
        let dumped = subject.dump(&image, since.as_deref()).await;
        // After the end of a process the kernel would reset its connections while the address is here, so the lock
        // stays.
        if dumped.is_err() && subject.surely_found().await.is_some() {
            subject.unlock_network().await;
        }
        dumped.map_err(failed)
    }

    async fn send(&mut self) -> Result<(), Trouble> {
        // From here on no host has the address: packets to the address are lost and sent again, and no host refuses
        // them.
        if let Some(own) = &self.plan.address {
            own.remove().await.map_err(failed)?;
        }
        self.plan.subject().unlock_network().await;
        let image = self.image();
        let (of_criu, opened) = images::gather(&image, &self.plan.files).map_err(failed)?;
        let (along, opened): (Vec<_>, Vec<_>) = opened.into_iter().unzip();
        let offer = ImageOffer {
            pid: self.plan.pid,
            layout: self.plan.layout.clone(),
            container: self.plan.container.clone(),
            address: self.plan.address.clone(),
            rounds: self.plan.rounds_before(),
            image: of_criu.clone(),
            files: along.clone(),
        };
        let sources = of_criu
            .iter()
            .map(|file| (Source::Own(image.join(&file.name)), file.bytes));
        let along = opened
            .into_iter()
            .map(Source::Opened)
            .zip(along.iter().map(|file| file.bytes));
        let asked = Ask::Image(Box::new(offer));
        self.transfer(asked, sources.chain(along).collect()).await
    }

    /// Sends these files to the destination.
    pub(super) async fn transfer(
        &mut self,
        asked: Ask,
        files: Vec<(Source, u64)>,
    ) -> Result<(), Trouble> {
        let (to, id) = (self.plan.to.clone(), self.plan.id.clone());
        match self.reach.ask(&to, asked, ANSWER).await? {
            Answer::Ready => {}
            _ => return Err(unexpected()),
        }
        let moves = &self.processes.moves.table;
        let count = |bytes| moves.change(&id, |view| view.image_bytes += bytes);
        let connection = self.reach.connection(&to).await?;
        let sent = async {
            images::send(connection, files.into_iter(), count).await?;
            crate::messages::read::<Answer>(connection, ANSWER).await
        };
        match sent.await {
            Ok(Answer::Done) => Ok(()),
            Ok(Answer::Refused(why)) => {
                // The other node hangs up: the position in the stream is unknown.
                self.reach.hang_up(&to);
                Err(failed(format!("node '{to}': {why}")))
            }
            Ok(_) => Err(unexpected()),
            Err(error) => {
                self.reach.hang_up(&to);
                Err(Trouble::Silent(format!("node '{to}': {error}")))
            }
        }
    }

    /// Has the destination restore the process or settle the move.
    async fn restore(&mut self, asked: Ask) -> Outcome {
        let to = self.plan.to.clone();
        match self.reach.ask(&to, asked, RESTORE).await {
            Ok(Answer::Here { milliseconds }) => {
                self.shows(|view| view.breakdown_ms.full_restore = milliseconds);
                Outcome::Done
            }
            Ok(Answer::NotHere(why)) => {
                let why = format!("node '{to}': {why}");
                Outcome::Failed(Refusal::new(Kind::Refused, why))
            }
            Ok(_) => unknown(format!("node '{to}' gave an answer to another question")),
            Err(trouble) => unknown(trouble.into_text()),
        }
    }

    async fn recreate(&mut self) -> Result<(), Trouble> {
        let to = self.plan.to.clone();
        match self.reach.ask(&to, Ask::Recreate, ANSWER).await? {
            Answer::Recreated {
                made,
                attached,
                warning,
                ..
            } => {
                self.plan.made = Some(made);
                self.plan.attached = attached;
                if self.plan.ahead && !attached {
                    let why = warning.unwrap_or("the destination has it no more".to_owned());
                    self.warn(format!(
                        "what was made ahead of the process was not used: {why}"
                    ));
                }
                Ok(())
            }
            _ => Err(unexpected()),
        }
    }

    async fn bring_back(&mut self) -> Result<(), Trouble> {
        let subject = self.plan.subject();
        if let Some(found) = subject.surely_found().await {
            // A failed restore would end the running process.
            subject.unlock_network().await;
            self.has_number(found);
            return Ok(());
        }
        let pid = subject.pid;
        let own = self.plan.address.as_ref();
        if let Some(own) = own {
            // The address goes before CRIU's lock: otherwise incoming packets would be answered with a reset.
            if let Err(error) = own.remove().await {
                tracing::warn!(
                    pid,
                    error,
                    "peers may hear that connections of a process have ended"
                );
            }
        }
        subject.unlock_network().await;
        let guard = arrivals::guard(&self.plan.id);
        let restored = criu::restore(&self.image(), &subject, own, &guard).await;
        let found = restored.map_err(|error| match error {
            NotRestored::Nothing(why) | NotRestored::Left(why) => failed(why),
        })?;
        self.has_number(found);
        Ok(())
    }

    /// Records the process's number, which changes at each restore in a container.
    fn has_number(&mut self, pid: u32) {
        let before = std::mem::replace(&mut self.plan.pid, pid);
        self.processes
            .held
            .renumber(&self.processes, &self.plan.id, before, pid);
        self.shows(|view| view.pid = pid);
    }

    async fn recreate_here(&mut self) -> Result<(), Trouble> {
        match ask(self.plan.pid, Request::Recreate { device: None }).await {
            Ok(LibraryAnswer::Recreated(made)) => {
                self.plan.made = Some(made);
                Ok(())
            }
            Ok(_) => Err(unexpected()),
            // The process kept all of its objects, and the partners know its keys.
            Err(error) if error.contains(HAS_OBJECTS) && !self.plan.moving.was_interrupted() => {
                self.plan.made = None;
                Ok(())
            }
            Err(error) => Err(failed(error)),
        }
    }

    async fn connect(&mut self, place: Where) -> Result<(), Trouble> {
        let attached = self.plan.attached && place == Where::There;
        let partners = if attached {
            self.switch().await?
        } else {
            self.plan.partners.clone()
        };
        if partners.is_empty() {
            return Ok(());
        }
        let made = match (&self.plan.made, place) {
            (Some(made), _) if attached => Recreated {
                remote_keys: made.remote_keys.clone(),
                queue_pairs: self.pairs_there().await?,
            },
            (Some(made), _) => made.clone(),
            (None, Where::Here) => Recreated {
                remote_keys: Vec::new(),
                queue_pairs: status(self.plan.pid).await.map_err(failed)?.queue_pairs,
            },
            (None, Where::There) => {
                return Err(failed("what the process made is not known".to_owned()));
            }
        };
        let keep_keys = self.plan.made.is_none();
        for (name, party) in partners {
            let mut connections = at_partner(&party, &made).map_err(failed)?;
            if keep_keys {
                connections
                    .iter_mut()
                    .for_each(|one| one.remote_keys = None);
            }
            let theirs = self.partner_pairs(&name, party.pid).await?;
            self.reach
                .partner(&name, party.pid, Request::Connect { connections })
                .await?;
            let connections = at_moved(&party, &theirs).map_err(failed)?;
            self.process(place, Request::Connect { connections })
                .await?;
        }
        Ok(())
    }

    /// Has partners switch to their prepared queue pairs. Returns the partners that refused: they are connected as
    /// without pre-setup, which does no harm to a partner that has switched and was not heard.
    async fn switch(&mut self) -> Result<Vec<(String, Party)>, Trouble> {
        let made = self.plan.made.as_ref();
        let remote_keys = made.map_or_else(Vec::new, |made| made.remote_keys.clone());
        let mut others = Vec::new();
        for (name, party) in self.plan.partners.clone() {
            let request = Request::Switch {
                numbers: party.numbers(),
                remote_keys: remote_keys.clone(),
            };
            match self.reach.partner(&name, party.pid, request).await {
                Ok(_) => {}
                Err(Trouble::Refused(why)) => {
                    self.warn(format!(
                        "what process {} at node '{name}' made ahead was not used: {why}",
                        party.pid
                    ));
                    others.push((name, party));
                }
                Err(silent) => return Err(silent),
            }
        }
        Ok(others)
    }

    /// Returns the queue pairs of the process at the destination.
    async fn pairs_there(&mut self) -> Result<Vec<QueuePairState>, Trouble> {
        let to = self.plan.to.clone();
        let request = Request::Status;
        match self.reach.library(&to, Ask::Moved { request }).await? {
            LibraryAnswer::Status(status) => Ok(status.queue_pairs),
            _ => Err(unexpected()),
        }
    }

    pub(super) async fn partner_pairs(
        &mut self,
        name: &str,
        pid: u32,
    ) -> Result<Vec<QueuePairState>, Trouble> {
        match self.reach.partner(name, pid, Request::Status).await? {
            LibraryAnswer::Status(status) => Ok(status.queue_pairs),
            _ => Err(unexpected()),
        }
    }

    /// Sends a request to the process at the given side.
    async fn process(&mut self, place: Where, request: Request) -> Result<(), Trouble> {
        let to = self.plan.to.clone();
        match place {
            Where::Here => self.own(request).await.map(drop),
            Where::There => self
                .reach
                .library(&to, Ask::Moved { request })
                .await
                .map(drop),
        }
    }

    async fn resume(&mut self, place: Where) -> Result<(), Trouble> {
        // Both sides are told, regardless of the other's answer.
        let first = if self.plan.is_to_go_on(place) {
            self.process(place, Request::Resume { only: None }).await
        } else {
            Ok(())
        };
        self.plan.goes_on |= place == Where::There && first.is_ok();
        let second = self.resume_partners().await;
        first.and(second)
    }

    async fn resume_partners(&mut self) -> Result<(), Trouble> {
        let mut told = Ok(());
        for (name, party) in &self.plan.partners {
            let request = Request::Resume {
                only: Some(party.numbers()),
            };
            let asked = self.reach.partner(name, party.pid, request).await;
            told = told.and(asked.map(drop));
        }
        told
    }
}
