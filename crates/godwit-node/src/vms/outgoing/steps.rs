//! Source: the steps of a VM's move up to the moment at which its disks are given away.

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{broadcast, oneshot};
use tokio::task::AbortHandle;

use crate::disks::group::GroupState;
use crate::failpoint;
use crate::migrations::outgoing;
use crate::vms::messages::{Answer, Order};
use crate::vms::outgoing::convergence::Convergence;
use crate::vms::outgoing::{Move, POLL, Working};
use crate::vms::tunnel;
use crate::vms::view::{memory_progress, pull};
use godwit_api::{ErrorBody, ErrorCode, MemoryMode, MigrationPhase, VmMigrationPhase as Phase};
use godwit_qemu::monitor::qmp::QmpEvent;
use godwit_qemu::{inspect, migration};

/// Longest time that the destination's QEMU may take to start.
const START_TIMEOUT: Duration = Duration::from_secs(40);
/// Longest wait for the destination's QEMU to have everything that was sent.
const LOAD_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest wait for all disks to be ready to be given away.
const SWITCH_TIMEOUT: Duration = Duration::from_secs(15);

/// Whether the destination's QEMU waits for its memory.
#[derive(Clone, Copy)]
enum StartingQemu {
    /// It is being started, and should have been then.
    Until(tokio::time::Instant),
    Done,
}

impl StartingQemu {
    /// Ready once it should have been started and is not.
    async fn overdue(self) {
        match self {
            Self::Until(deadline) => tokio::time::sleep_until(deadline).await,
            Self::Done => std::future::pending().await,
        }
    }
}

impl Move {
    /// Everything up to the moment at which the disks are given away.
    pub(in crate::vms) async fn until_given(
        &mut self,
        working: &mut Working,
    ) -> Result<(), ErrorBody> {
        self.enter(Phase::CopyingDisks);
        for disk in self.vm_disks() {
            let request = self.request.for_disk(&disk);
            let group = Some(Arc::clone(&working.group));
            let started = outgoing::start_in(&self.node, request, group).await?;
            for warning in &started.warnings {
                let warning = format!("disk {disk}: {warning}");
                self.node
                    .vm_migrations
                    .change(self.id, |view| view.warnings.push(warning));
            }
            self.node
                .vm_migrations
                .add_disk(self.id, started.id.clone());
            working.disks.push(started.id);
        }
        // What keeps its QEMU from starting shows before the disks are copied, and nothing waits for it
        // once they are.
        working.link.say(Order::Start).await;
        let mut starting = StartingQemu::Until(tokio::time::Instant::now() + START_TIMEOUT);
        failpoint::reach(String::from("vm::copying-disks")).await;
        self.until_converged(working, &mut starting).await?;
        if let StartingQemu::Until(deadline) = starting {
            self.enter(Phase::Starting);
            let answer = tokio::time::timeout_at(deadline, working.link.hear()).await;
            self.started(answer.unwrap_or_default())?;
        }

        self.enter(Phase::CopyingMemory);
        let mut events = self.qemu.qmp.events();
        let state = inspect::run_state(&self.qemu.qmp)
            .await
            .map_err(|error| self.error(ErrorCode::Conflict, &error))?;
        self.note_ran(working, inspect::is_live(&state)).await?;
        working.tunnel = Some(self.start_memory().await?);
        failpoint::reach(String::from("vm::copying-memory")).await;
        let mode = self.request.memory;
        self.while_disks_last(working, &mut events, mode).await?;

        self.enter(Phase::SwitchingOver);
        self.complete_memory(working, &mut events).await?;
        failpoint::reach(String::from("vm::loaded")).await;
        self.give(working).await
    }

    pub(in crate::vms) fn vm_disks(&self) -> Vec<String> {
        self.vm.lock().entry.machine.disks.clone()
    }

    fn unwilling(&self, answer: Option<Answer>, what: &str) -> ErrorBody {
        match answer {
            Some(Answer::Failed(why)) => {
                self.error(ErrorCode::PeerRefused, &format!("it {what}: {why}"))
            }
            _ => self.error(ErrorCode::PeerUnreachable, &format!("it {what}: no answer")),
        }
        .hint(format!("see the log of node '{}'", self.peer.name))
    }

    /// Why one of the disks does not move any more, or must not: what waits for room is not part of
    /// what moves with the guest.
    fn disk_trouble(&self, working: &Working) -> Option<ErrorBody> {
        let full = self.vm_disks().into_iter().find(|disk| {
            let disk = self.node.disks.find(disk);
            disk.is_some_and(|disk| disk.lock().lacks_room())
        });
        if let Some(disk) = full {
            let why = format!("no space is left for disk {disk} here, and writes wait for it");
            return Some(
                self.error(ErrorCode::NoSpace, &why)
                    .hint("free space where its image is, and start the migration again"),
            );
        }
        working.disks.iter().find_map(|id| {
            let (_, view) = self.node.migrations.get(id).ok()?;
            (view.phase == MigrationPhase::Aborted).then(|| {
                let why = view.error.map(|error| error.message);
                let why = why.unwrap_or_else(|| format!("disk {} did not move", view.disk));
                self.error(ErrorCode::Conflict, &why)
            })
        })
    }

    /// What the destination says about its QEMU.
    fn started(&self, answer: Option<Answer>) -> Result<(), ErrorBody> {
        match answer {
            Some(Answer::Started) => Ok(()),
            other => Err(self.unwilling(other, "did not start its QEMU")),
        }
    }

    /// Waits until only double writes remain of every disk. The destination starts its QEMU meanwhile.
    async fn until_converged(
        &self,
        working: &mut Working,
        starting: &mut StartingQemu,
    ) -> Result<(), ErrorBody> {
        loop {
            if let Some(trouble) = self.disk_trouble(working) {
                return Err(trouble);
            }
            let converged = working.disks.iter().all(|id| {
                let found = self.node.migrations.get(id);
                found.is_ok_and(|(_, view)| view.phase == MigrationPhase::Converged)
            });
            if converged {
                return Ok(());
            }
            tokio::select! {
                () = tokio::time::sleep(POLL) => {}
                () = self.qemu.process.ended() => {
                    return Err(self.error(ErrorCode::Conflict, &"its QEMU has ended"));
                }
                answer = working.link.hear() => match *starting {
                    StartingQemu::Until(_) => {
                        self.started(answer)?;
                        *starting = StartingQemu::Done;
                    }
                    StartingQemu::Done => return Err(self.unwilling(answer, "gave the VM up")),
                },
                () = starting.overdue() => self.started(None)?,
            }
        }
    }

    /// Starts QEMU's migration through this node's connection to the other.
    async fn start_memory(&self) -> Result<AbortHandle, ErrorBody> {
        let (socket, carrying) = tunnel::lead(&self.node, &self.vm, &self.peer, self.id).await?;
        let start = async {
            migration::set_capabilities(&self.qemu.qmp, pull(self.request.memory), true).await?;
            migration::start(&self.qemu.qmp, &socket, self.request.max_bandwidth).await
        };
        if let Err(error) = start.await {
            carrying.abort();
            return Err(self.error(ErrorCode::Internal, &error));
        }
        Ok(carrying)
    }

    /// Copies the memory until the guest stands still, as long as the disks stay converged and the
    /// destination is there.
    async fn while_disks_last(
        &mut self,
        working: &mut Working,
        events: &mut broadcast::Receiver<QmpEvent>,
        mode: MemoryMode,
    ) -> Result<(), ErrorBody> {
        let mut stops = self.qemu.qmp.events();
        let (node, id) = (Arc::clone(&self.node), self.id);
        let mut convergence = Convergence::default();
        let tell = |seen: &migration::Seen| {
            // What is pulled need not have been sent before.
            let asked = (!mode.pulls()).then(|| convergence.look(seen, Instant::now()));
            node.vm_migrations.change(id, |view| {
                view.memory = memory_progress(seen.progress);
                view.warnings.extend(asked.flatten());
            });
        };
        let qmp = self.qemu.qmp.clone();
        let mut copying = pin!(migration::until_paused(&qmp, events, pull(mode), tell));
        loop {
            tokio::select! {
                copied = &mut copying => {
                    // The guest stood still a moment before QEMU said that it is so far.
                    self.stopped.get_or_insert_with(Instant::now);
                    return copied.map_err(|error| self.error(ErrorCode::Conflict, &error));
                }
                event = stops.recv() => match event {
                    Ok(event) if event.name == "STOP" => {
                        self.stopped = Some(Instant::now());
                        // Either the move stopped it or somebody who wants it to stand still.
                        let state = inspect::run_state(&qmp).await;
                        if state.is_ok_and(|state| state == "paused") {
                            self.note_ran(working, false).await?;
                        }
                    }
                    Ok(event) if event.name == "RESUME" => {
                        self.stopped = None;
                        self.note_ran(working, true).await?;
                    }
                    _ => {}
                },
                answer = working.link.hear() => {
                    return Err(self.unwilling(answer, "gave the VM up"));
                }
                () = tokio::time::sleep(POLL) => {
                    if let Some(trouble) = self.disk_trouble(working) {
                        return Err(trouble);
                    }
                }
            }
        }
    }

    /// Everything that the guest cannot run without is at the destination before the disks are given
    /// away: all of it with pre-copy, the state of its devices when it pulls the rest.
    async fn complete_memory(
        &self,
        working: &mut Working,
        events: &mut broadcast::Receiver<QmpEvent>,
    ) -> Result<(), ErrorBody> {
        let failed = |error: &dyn std::fmt::Display| self.error(ErrorCode::Conflict, error);
        let qmp = &self.qemu.qmp;
        let seen = migration::look(qmp).await.map_err(|error| failed(&error))?;
        failpoint::reach(String::from("vm::pre-switchover")).await;
        if seen.status == "pre-switchover" {
            migration::go_on(qmp)
                .await
                .map_err(|error| failed(&error))?;
        }
        let (node, id) = (Arc::clone(&self.node), self.id);
        let tell = |seen: &migration::Seen| {
            if seen.progress.bytes_total > 0 {
                node.vm_migrations
                    .change(id, |view| view.memory = memory_progress(seen.progress));
            }
        };
        let did_not = "did not take the memory";
        let runs = working.ran.unwrap_or(true);
        working.link.say(Order::Load { runs }).await;
        let mut loaded = false;
        {
            // Until this QEMU says so it may still fail, and then it lets the guest run by itself,
            // whatever the destination has.
            let sent = if self.request.memory.pulls() {
                ["completed", migration::PULLING].as_slice()
            } else {
                &["completed"]
            };
            let mut sending = pin!(migration::wait_for(qmp, events, sent, tell));
            loop {
                tokio::select! {
                    sent = &mut sending => {
                        sent.map_err(|error| failed(&error))?;
                        break;
                    }
                    answer = working.link.hear() => match answer {
                        Some(Answer::Loaded) if !loaded => loaded = true,
                        other => return Err(self.unwilling(other, did_not)),
                    },
                }
            }
        }
        if loaded {
            return Ok(());
        }
        let broken = async {
            match migration::wait_for(qmp, events, &["completed"], tell).await {
                Ok(()) => std::future::pending().await,
                Err(error) => error,
            }
        };
        tokio::select! {
            error = broken => Err(failed(&error)),
            answer = working.link.hear_within(LOAD_TIMEOUT) => match answer {
                Some(Answer::Loaded) => Ok(()),
                other => Err(self.unwilling(other, did_not)),
            },
        }
    }

    /// Gives all disks away together, unless the destination cannot run the guest any more.
    async fn give(&mut self, working: &mut Working) -> Result<(), ErrorBody> {
        let told = Instant::now();
        self.told = Some(told);
        // Otherwise the destination has all that it needs.
        let pulls = self.request.memory.pulls();
        let mut answers = Vec::new();
        for name in self.vm_disks() {
            let engine = self.node.disks.find(&name).and_then(|disk| disk.engine());
            let Some(engine) = engine else {
                let why = format!("disk {name} is not served any more");
                return Err(self.error(ErrorCode::Conflict, &why));
            };
            let (reply, answer) = oneshot::channel();
            engine.switch_over(Box::new(move |leaves| {
                let _ = reply.send(leaves);
            }));
            answers.push((name, answer));
        }
        // Not one after the other: the guest stands still.
        for (name, answer) in answers {
            if !answer.await.unwrap_or(false) {
                let why = format!("disk {name} does not move any more");
                return Err(self.error(ErrorCode::Conflict, &why));
            }
        }
        working.group.ask_without_disks(&self.node).await;
        let mut state = working.group.state();
        let given = |state: &GroupState| *state != GroupState::Gathering;
        loop {
            tokio::select! {
                decided = state.wait_for(given) => {
                    return match decided.map(|state| *state) {
                        Ok(GroupState::Storing | GroupState::Given) => Ok(()),
                        _ => Err(self.error(ErrorCode::Conflict, &"its disks were not given away")),
                    };
                }
                () = self.qemu.process.ended(), if pulls => {
                    return Err(self.error(ErrorCode::Conflict, &"its QEMU has ended"));
                }
                // Whoever hears this too late to keep the disks goes on: see `carry_out`.
                answer = working.link.hear() => {
                    return Err(self.unwilling(answer, "gave the VM up"));
                }
                () = tokio::time::sleep(POLL) => {
                    if let Some(trouble) = self.disk_trouble(working) {
                        return Err(trouble);
                    }
                    if told.elapsed() >= SWITCH_TIMEOUT {
                        let why = "the destination did not accept all disks in time";
                        return Err(self.error(ErrorCode::PeerUnreachable, &why));
                    }
                }
            }
        }
    }
}
