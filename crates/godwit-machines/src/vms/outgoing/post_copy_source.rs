//! Source: serves the rest of a guest's memory while the guest runs at the destination.
//!
//! The disks are gone, so this QEMU never runs the guest again, but has memory that the guest at the destination needs.
//! QEMU is kept, across restarts of this node, until the destination has everything or has no guest any more. Whenever
//! the memory's connection breaks, QEMU pauses at both ends and keeps its memory; then this side makes another
//! connection, as often as needed (see `post_copy_destination.rs`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_core::units::MigrationId;
use godwit_core::wire::{Purpose, TrafficClass};
use tokio::task::AbortHandle;

use crate::vms::Vms;
use crate::vms::messages::{Answer, Order};
use crate::vms::outgoing::{SourceLink, quit};
use crate::vms::tunnel;
use crate::vms::view::memory_progress;
use crate::vms::vm::{Qemu, Vm, VmGuard};
use godwit_api::{ErrorBody, ErrorCode};
use godwit_context::store::machine::VmMark;
use godwit_peers::greeting;
use godwit_qemu::migration::{self, PULL_BROKEN, PULLING};

/// Time between two queries of QEMU's progress.
const POLL: Duration = Duration::from_millis(100);
/// Time before a broken connection is made again, at first and at most.
const FIRST_WAIT: Duration = Duration::from_millis(200);
const LONGEST_WAIT: Duration = Duration::from_secs(5);
/// Longest wait for the destination to be ready for another connection.
const READY_TIMEOUT: Duration = Duration::from_secs(12);
/// Time for both QEMUs to agree on the missing pages.
const RECOVER_TIMEOUT: Duration = Duration::from_secs(20);
/// Longest wait for the destination's [`Answer::Pulled`] after QEMU's completion here.
const PULLED_TIMEOUT: Duration = Duration::from_secs(10);
/// Prefix of the warning about broken connections.
const BROKEN: &str = "the memory's connection broke";

/// The end of the transfer.
enum End {
    /// The destination has all of the memory.
    Whole,
    /// The guest at the destination is gone, or its node gave the reason why the guest cannot go on.
    GoneThere(String),
    /// The rest of the memory is gone.
    LostHere(String),
    /// The node is closing; its next run goes on.
    Closing,
}

/// A guest's memory on its way.
pub(in crate::vms) struct Giving {
    vms: Arc<Vms>,
    vm: Arc<Vm>,
    /// The destination.
    to: String,
    id: MigrationId,
    qemu: Qemu,
    link: Option<SourceLink>,
    /// The task carrying the memory.
    tunnel: Option<AbortHandle>,
    breaks: u32,
    broken: bool,
}

impl Giving {
    /// Serves a guest's memory through the connections of its move, which may have ended.
    pub(in crate::vms) fn new(
        vms: Arc<Vms>,
        vm: Arc<Vm>,
        (to, id): (String, MigrationId),
        qemu: Qemu,
        connections: (Option<SourceLink>, Option<AbortHandle>),
    ) -> Self {
        Self {
            vms,
            vm,
            to,
            id,
            qemu,
            link: connections.0,
            tunnel: connections.1,
            breaks: 0,
            broken: false,
        }
    }

    /// Serves the memory to the end, and ends QEMU.
    ///
    /// # Errors
    /// The memory or the guest is lost; or the node is closing, and nothing is decided.
    pub(in crate::vms) async fn see_through(mut self) -> Result<(), ErrorBody> {
        let name = self.vm.name.clone();
        let ended = self.until_over().await;
        let there = matches!(ended, End::GoneThere(_));
        let (why, told) = match ended {
            End::Whole => {
                quit(&self.qemu).await;
                unmark(&self.vms, &self.vm).await;
                return Ok(());
            }
            End::Closing => {
                let text = format!("the node ends while the rest of VM {name}'s memory moves");
                return Err(ErrorBody::new(ErrorCode::ShuttingDown, text));
            }
            End::GoneThere(why) => (why, true),
            End::LostHere(why) => match self.tell_lost(&why).await {
                Some(Answer::Pulled) => {
                    quit(&self.qemu).await;
                    unmark(&self.vms, &self.vm).await;
                    return Ok(());
                }
                told => (why, told.is_some()),
            },
        };
        tracing::error!(vm = name, why, "the rest of the memory did not move");
        quit(&self.qemu).await;
        if told {
            unmark(&self.vms, &self.vm).await;
        } else {
            let to = (self.to.clone(), self.id);
            let told = tell_until_heard(self.vms, self.vm, to, why.clone());
            godwit_context::spawn(told);
        }
        let text = if there {
            let to = &self.to;
            format!("VM {name} ended at node '{to}' before all its memory was there: {why}")
        } else {
            format!("VM {name} lost memory on its way: {why}")
        };
        Err(ErrorBody::new(ErrorCode::Internal, text)
            .hint("start it anew at the destination, where its disks are"))
    }

    async fn until_over(&mut self) -> End {
        let process = Arc::clone(&self.qemu.process);
        let vms = Arc::clone(&self.vms);
        let mut wait = FIRST_WAIT;
        let mut next = Instant::now();
        let mut recovers_since: Option<Instant> = None;
        loop {
            let status = self.look().await.unwrap_or_default();
            let recovers = status.starts_with("postcopy-recover");
            if !recovers {
                recovers_since = None;
            }
            match status.as_str() {
                "completed" => {
                    self.hear_the_end().await;
                    return End::Whole;
                }
                "failed" | "cancelled" => {
                    return End::LostHere(format!("QEMU's migration {status}"));
                }
                PULL_BROKEN => {
                    self.note_break();
                    if Instant::now() >= next {
                        let again = tokio::select! {
                            again = self.connect_again() => again,
                            () = process.ended() => return self.qemu_ended(),
                            () = vms.context.closed() => return End::Closing,
                        };
                        match again {
                            Ok(None) => {}
                            Ok(Some(end)) => return end,
                            Err(error) => self.warn(&format!("trying again ({error})")),
                        }
                        next = Instant::now() + wait;
                        wait = (wait * 2).min(LONGEST_WAIT);
                    }
                }
                PULLING => {
                    if std::mem::take(&mut self.broken) {
                        tracing::info!(vm = self.vm.name, "the rest of the memory moves again");
                        self.warn("it goes on");
                        wait = FIRST_WAIT;
                    }
                    if self.link.is_none() {
                        self.hang_up().await;
                    }
                }
                _ if recovers => {
                    let since = *recovers_since.get_or_insert_with(Instant::now);
                    if self.link.is_none() || since.elapsed() >= RECOVER_TIMEOUT {
                        self.hang_up().await;
                    }
                }
                _ => {}
            }
            tokio::select! {
                answer = hear(&mut self.link) => match answer {
                    Some(Answer::Pulled) => return End::Whole,
                    Some(Answer::Failed(why)) => return End::GoneThere(why),
                    Some(_) => {}
                    None => self.link = None,
                },
                () = process.ended() => return self.qemu_ended(),
                () = vms.context.closed() => return End::Closing,
                () = tokio::time::sleep(POLL) => {}
            }
        }
    }

    fn qemu_ended(&self) -> End {
        let said = godwit_qemu::process::log_tail(&self.vm.places.log());
        End::LostHere(if said.is_empty() {
            String::from("QEMU at the source has ended")
        } else {
            format!("QEMU at the source has ended: {said}")
        })
    }

    /// Returns QEMU's status of the migration, and records the progress in the move's view.
    async fn look(&self) -> Option<String> {
        let qmp = self.vm.lock().qemu.as_ref().map(|qemu| qemu.qmp.clone());
        let seen = migration::look(&qmp?).await.ok()?;
        self.vms.migrations.change(self.id, |view| {
            if seen.progress.bytes_total > 0 {
                view.memory = memory_progress(seen.progress);
            }
        });
        Some(seen.status)
    }

    /// Makes QEMU notice that its connection is useless.
    async fn hang_up(&mut self) {
        if let Some(tunnel) = self.tunnel.take() {
            tunnel.abort();
            return;
        }
        if let Some(monitor) = self.vm.monitor() {
            // QEMU may have noticed by itself.
            let _ = migration::break_off(&monitor).await;
        }
    }

    fn note_break(&mut self) {
        if !std::mem::replace(&mut self.broken, true) {
            self.breaks += 1;
            tracing::warn!(vm = self.vm.name, to = self.to, "{BROKEN}; trying again");
            self.warn("trying again");
        }
    }

    /// Replaces the warning about the connection in the move's view.
    fn warn(&self, what: &str) {
        let times = match self.breaks {
            1 => String::from("once"),
            times => format!("{times} times"),
        };
        let text = format!("{BROKEN} {times}: {what}");
        self.vms.migrations.change(self.id, |view| {
            view.warnings.retain(|warning| !warning.starts_with(BROKEN));
            view.warnings.push(text);
        });
    }

    /// Makes both connections anew and resumes QEMU's migration, or returns the end.
    async fn connect_again(&mut self) -> Result<Option<End>, ErrorBody> {
        self.link = None;
        if let Some(tunnel) = self.tunnel.take() {
            tunnel.abort();
        }
        let mut link = dial(&self.vms, &self.vm, (&self.to, self.id)).await?;
        link.say(Order::Resume).await;
        match link.hear_within(READY_TIMEOUT).await {
            Some(Answer::Ready) => {}
            Some(Answer::Pulled) => return Ok(Some(End::Whole)),
            Some(Answer::Failed(why)) => return Ok(Some(End::GoneThere(why))),
            _ => {
                let text = format!("node '{}' is not ready for the rest yet", self.to);
                return Err(ErrorBody::new(ErrorCode::PeerUnreachable, text));
            }
        }
        let peer = self.vms.context.peer(&self.to)?;
        let (socket, tunnel) = tunnel::lead(&self.vms, &self.vm, peer, self.id).await?;
        self.link = Some(link);
        self.tunnel = Some(tunnel);
        let qmp = self.vm.qemu()?.qmp;
        migration::resume(&qmp, &socket)
            .await
            .map_err(|error| ErrorBody::new(ErrorCode::Internal, error.to_string()))?;
        Ok(None)
    }

    /// Waits for the destination's confirmation after all memory was sent. A caller that sees the move's end then finds
    /// the VM ready for the next action.
    async fn hear_the_end(&mut self) {
        let deadline = tokio::time::Instant::now() + PULLED_TIMEOUT;
        while let Some(link) = &mut self.link {
            match tokio::time::timeout_at(deadline, link.hear()).await {
                Ok(Some(Answer::Pulled | Answer::Failed(_)) | None) | Err(_) => return,
                Ok(Some(_)) => {}
            }
        }
    }

    /// Tells the destination that the rest will not come. Returns its answer.
    async fn tell_lost(&mut self, why: &str) -> Option<Answer> {
        let link = match self.link.take() {
            Some(link) => link,
            None => dial(&self.vms, &self.vm, (&self.to, self.id)).await.ok()?,
        };
        say_lost(link, why).await
    }
}

async fn hear(link: &mut Option<SourceLink>) -> Option<Answer> {
    match link {
        Some(link) => link.hear().await,
        None => std::future::pending().await,
    }
}

async fn dial(vms: &Vms, vm: &Vm, (to, id): (&str, MigrationId)) -> Result<SourceLink, ErrorBody> {
    let peer = vms.context.peer(to)?;
    let name = &vms.context.config.name;
    let hello = greeting::hello(name, &vm.name, TrafficClass::Control, Purpose::Machine, id);
    let dialled = vms.context.dialer.dial(peer, hello).await;
    let attempted = format!("send the rest of the memory of VM {}", vm.name);
    let (connection, _) = dialled.map_err(|error| error.into_body(to, &attempted))?;
    Ok(SourceLink::open(
        connection,
        || Order::Ping,
        |answer| matches!(answer, Answer::Pong),
    ))
}

async fn say_lost(mut link: SourceLink, why: &str) -> Option<Answer> {
    let reason = why.to_owned();
    link.say(Order::Lost { reason }).await;
    let deadline = tokio::time::Instant::now() + READY_TIMEOUT;
    loop {
        match tokio::time::timeout_at(deadline, link.hear()).await {
            Ok(Some(answer @ (Answer::Pulled | Answer::Failed(_)))) => return Some(answer),
            Ok(Some(_)) => {}
            Ok(None) | Err(_) => return None,
        }
    }
}

/// Tells the destination that the rest will not come, until the destination answers. Its guest stands still meanwhile.
async fn tell_until_heard(
    vms: Arc<Vms>,
    vm: Arc<Vm>,
    (to, id): (String, MigrationId),
    why: String,
) {
    let mut wait = FIRST_WAIT;
    let marked = || {
        let kept = vms.find(&vm.name);
        let same = kept.is_some_and(|kept| Arc::ptr_eq(&kept, &vm));
        same && matches!(vm.lock().entry.mark, Some(VmMark::Giving { .. }))
    };
    while marked() {
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = vms.context.closed() => return,
        }
        wait = (wait * 2).min(LONGEST_WAIT);
        let link = dial(&vms, &vm, (&to, id)).await;
        if let Ok(link) = link
            && say_lost(link, &why).await.is_some()
        {
            return unmark(&vms, &vm).await;
        }
    }
}

/// Stores that this node holds nothing more that the VM needs.
pub(in crate::vms) async fn unmark(vms: &Vms, vm: &Arc<Vm>) {
    let entry = {
        let mut inner = vm.lock();
        inner.entry.mark = None;
        inner.entry.clone()
    };
    let kept = vms.find(&vm.name);
    if kept.is_some_and(|kept| Arc::ptr_eq(&kept, vm))
        && let Err(error) = vms.context.store.put_vm(&vm.name, &entry).await
    {
        // A restart would find the mark, and ask the destination.
        tracing::error!(vm = vm.name, %error, "cannot store that the VM's memory has moved");
    }
}

/// Takes up the transfer that was under way when the node ended. Without a QEMU the memory is lost.
pub(in crate::vms) async fn take_up(
    vms: Arc<Vms>,
    vm: Arc<Vm>,
    (to, id): (String, MigrationId),
    qemu: Option<Qemu>,
    guard: VmGuard,
) {
    let Some(qemu) = qemu else {
        drop(guard);
        let why = String::from("QEMU at the source ended while its node was away");
        let text = format!("VM {} lost memory on its way: {why}", vm.name);
        end(&vms, id, Err(ErrorBody::new(ErrorCode::Internal, text))).await;
        return tell_until_heard(vms, vm, (to, id), why).await;
    };
    tracing::info!(
        vm = vm.name,
        to,
        "goes on giving the rest of the VM's memory"
    );
    let giving = Giving::new(Arc::clone(&vms), vm, (to, id), qemu, (None, None));
    let result = giving.see_through().await;
    if vms.context.is_closing() {
        return;
    }
    // A caller that sees the move's end must find the VM without an activity.
    drop(guard);
    end(&vms, id, result).await;
}

async fn end(vms: &Vms, id: MigrationId, result: Result<(), ErrorBody>) {
    if let Some((number, view)) = vms.migrations.end(vms, id, result) {
        vms.context.remember(number, &view).await;
    }
}
