//! Moves VMs away. `godwit_move` gives the order of the steps; only the disks' records (`disks/group.rs`) decide the
//! VM's place.

mod departure;
pub(in crate::vms) mod given;
pub(crate) mod planes;
pub mod post_copy_source;
pub mod preflight;
mod steps;
mod switch;
pub mod table;

pub use self::switch::switch;

use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_core::authority::Ownership;
use godwit_core::units::Bytes;
use godwit_core::wire::{Purpose, TrafficClass};
use godwit_move::{Course, Ending, Outcome, Plane as Of, Step, Subject};
use serde_json::json;
use tokio::sync::{Notify, oneshot, watch};

use crate::nics::links::Links;
use crate::nics::uplinks;
use crate::vms::Vms;
use crate::vms::memory::{blockers, pooled, pools, released, relocated};
use crate::vms::messages::{Answer, MachineOffer, Order};
use crate::vms::outgoing::departure::{Departure, POLL, SourceLink};
use crate::vms::outgoing::planes::Plane;
use crate::vms::outgoing::planes::disks::Disks;
use crate::vms::outgoing::planes::memory::Memory;
use crate::vms::outgoing::planes::nics::Nics;
use crate::vms::outgoing::post_copy_source::{Giving, unmark};
use crate::vms::vm::{Inner, Qemu, VmActivity, VmGuard};
use godwit_api::{
    ErrorBody, ErrorCode, MemoryMode, MigrateVm, VmMigration, VmMigrationPhase as Phase,
};
use godwit_context::failpoint;
use godwit_context::ids;
use godwit_context::store::machine::{VmEntry, VmMark};
use godwit_disks::disks::disk::{Activity, Disk};
use godwit_disks::disks::group::{HandedOver, SwitchGroup};
use godwit_peers::clock;
use godwit_peers::greeting;
use godwit_qemu::inspect::Facts;
use godwit_qemu::machine::Machine;

/// Longest wait for the destination's search for blockers.
const CHECK_TIMEOUT: Duration = Duration::from_secs(45);
/// Longest wait for the report that the guest runs at the destination.
const RUN_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest wait for QEMU's end after `quit`.
const QUIT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest wait for the disks to be departed.
const DEPART_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest wait for all disks to be ready for the handover.
const SWITCH_TIMEOUT: Duration = Duration::from_secs(15);
/// Longest wait for the end of a cancelled move.
const CANCEL_WAIT: Duration = Duration::from_secs(20);
/// Longest wait for the destination to forget a cancelled move.
const FORGET_TIMEOUT: Duration = Duration::from_secs(8);

/// Starts to move a VM. Returns once both nodes have found no blocker.
///
/// # Errors
/// The request is invalid, the peer is unreachable, or there are blockers: the error names all of them, and nothing has
/// moved.
pub async fn migrate(
    vms: &Arc<Vms>,
    name: &str,
    request: MigrateVm,
) -> Result<VmMigration, ErrorBody> {
    vms.context.check_open()?;
    let vm = vms.get(name)?;
    if request.to == vms.context.config.name {
        let text = format!("VM {name} is on node '{}' already", request.to);
        return Err(ErrorBody::new(ErrorCode::Invalid, text).hint("name another node"));
    }
    vms.protections.refuse(name, "moved")?;
    let zero_copy = request.memory == MemoryMode::ZeroCopy;
    if request.stay_in_pool && !zero_copy {
        let text = format!("VM {name}: only memory that moves by zero-copy can stay in its pool");
        return Err(ErrorBody::new(ErrorCode::Invalid, text)
            .hint("give --memory zero-copy as well, or leave --stay-in-pool out"));
    }
    let peer = vms.context.peer(&request.to)?.clone();
    let id = ids::new_id()?;
    let guard = vm.begin(VmActivity::Outgoing(id), |inner| {
        vm.is_here(inner)?;
        vm.is_current(inner)?;
        memory_is_here(inner)?;
        nothing_waits_for_room(inner)
    })?;
    let qemu = vm.qemu()?;
    let view = VmMigration {
        id: id.to_string(),
        vm: name.to_owned(),
        from: vms.context.config.name.clone(),
        to: peer.name.clone(),
        phase: Phase::Checking,
        memory_mode: request.memory,
        memory: Default::default(),
        disks: Vec::new(),
        started_at: clock::now_text(),
        ended_at: None,
        total_seconds: None,
        blackout_ms: None,
        switchover_ms: None,
        memory_bytes: 0,
        disk_bytes: 0,
        error: None,
        warnings: Vec::new(),
    };
    let (number, cancelled) = vms
        .migrations
        .begin(view.clone(), request.options.max_bandwidth);
    vms.context.remember(number, &view).await;
    let (begun, told) = oneshot::channel();
    let of = Departure {
        vms: Arc::clone(vms),
        vm,
        peer,
        id,
        request,
        qemu,
    };
    godwit_context::spawn(Move::new(of, cancelled).run(guard, begun));
    told.await.unwrap_or_else(|_| {
        let text = format!("the task that moves VM {name} failed");
        Err(ErrorBody::new(ErrorCode::Internal, text))
    })?;
    vms.migrations.get(vms, &id.to_string())
}

fn memory_is_here(vm: &Inner) -> Result<(), ErrorBody> {
    let Some(VmMark::Pulling { from, .. }) = &vm.entry.mark else {
        return Ok(());
    };
    let text = format!("the rest of its memory is still at node '{from}'");
    Err(ErrorBody::new(ErrorCode::Conflict, text).hint("try again when all of it is here"))
}

/// Refuses a paused guest: requests that wait for room are not part of the moving state.
fn nothing_waits_for_room(vm: &Inner) -> Result<(), ErrorBody> {
    let Some(why) = &vm.stands_still else {
        return Ok(());
    };
    let text = format!("it stands still, because {why}");
    Err(ErrorBody::new(ErrorCode::Conflict, text).hint(
        "see 'godwit vm show' and 'godwit disk show'; it goes on by itself when it can, and can move then",
    ))
}

/// Cancels the move of a VM; the guest goes on here.
///
/// # Errors
/// The move is unknown, has ended, or is too far.
pub async fn cancel(vms: &Arc<Vms>, id: &str) -> Result<VmMigration, ErrorBody> {
    let deadline = Instant::now() + CANCEL_WAIT;
    let view = vms.migrations.get(vms, id)?;
    if view.phase.ended() {
        let text = format!("migration {id} has ended: it is {}", view.phase.name());
        return Err(ErrorBody::new(ErrorCode::Conflict, text));
    }
    vms.migrations.cancel(id);
    loop {
        let view = vms.migrations.get(vms, id)?;
        match view.phase {
            Phase::Aborted => return Ok(view),
            Phase::Completed | Phase::PullingMemory => {}
            _ if Instant::now() < deadline => {
                tokio::time::sleep(POLL).await;
                continue;
            }
            _ => {}
        }
        let text = format!(
            "migration {id} of VM {} cannot be cancelled any more",
            view.vm
        );
        return Err(
            ErrorBody::new(ErrorCode::Conflict, text).hint("let it end, then migrate the VM back")
        );
    }
}

/// A move under way.
struct Move {
    of: Departure,
    course: Course,
    cancelled: Arc<Notify>,
    /// The error of the last failed step.
    failure: Result<(), ErrorBody>,
}

/// The parts that work on behalf of a move and must end with the move.
struct Working {
    link: SourceLink,
    disks: Disks,
    memory: Memory,
    nics: Nics,
    /// The time of the order to hand the disks over.
    told: Option<Instant>,
}

impl Move {
    fn new(of: Departure, cancelled: Arc<Notify>) -> Self {
        let left_out = (!of.request.memory.pulls()).then_some(Step::Pull(Of::Memory));
        Self {
            of,
            course: Course::new(Subject::Machine, left_out),
            cancelled,
            failure: Ok(()),
        }
    }

    async fn run(mut self, guard: VmGuard, begun: oneshot::Sender<Result<(), ErrorBody>>) {
        let checked = tokio::select! {
            checked = self.check() => checked,
            error = self.given_up() => Err(error),
        };
        let (result, refused) = match checked {
            Ok(working) => {
                // The caller may have hung up; the move goes on.
                let _ = begun.send(Ok(()));
                self.course.happened(Outcome::Done);
                (self.carry_through(working).await, None)
            }
            Err(error) => (Err(error), Some(begun)),
        };
        match &result {
            Ok(()) => tracing::info!(vm = self.of.vm.name, to = self.of.peer.name, "moved the VM"),
            Err(error) => tracing::warn!(vm = self.of.vm.name, %error, "the VM was not moved"),
        }
        let gives = matches!(self.of.vm.lock().entry.mark, Some(VmMark::Giving { .. }));
        let is_open = gives || self.course.step() == Step::Settle;
        if is_open && self.of.vms.context.is_closing() {
            // The move has not ended: the node's next run goes on with the move.
            return;
        }
        // A caller that sees the move's end must find the VM without an activity.
        drop(guard);
        let vms = Arc::clone(&self.of.vms);
        if let Some((number, view)) = vms.migrations.end(&vms, self.of.id, result.clone()) {
            vms.context.remember(number, &view).await;
        }
        if let Some(begun) = refused {
            let _ = begun.send(result);
        }
    }

    /// Waits until the move is cancelled, or the node is closing.
    async fn given_up(&self) -> ErrorBody {
        tokio::select! {
            () = self.cancelled.notified() => {}
            () = self.of.vms.context.closed() => {}
        }
        self.of.given_up()
    }

    /// Searches for all blockers, at both nodes.
    async fn check(&self) -> Result<Working, ErrorBody> {
        let facts = Facts::read(&self.of.qemu.qmp)
            .await
            .map_err(|error| self.of.error(ErrorCode::Conflict, &error))?;
        let mut entry = self.of.vm.lock().entry.clone();
        if entry.id.is_empty() {
            entry.id = ids::new_id()?.to_string();
        }
        let mut blockers = Disks::preflight(&self.of, &entry.machine, &facts);
        blockers.extend(Memory::preflight(&self.of, &entry.machine, &facts));
        blockers.extend(Nics::preflight(&self.of, &entry.machine, &facts));
        let hello = greeting::hello(
            &self.of.vms.context.config.name,
            &self.of.vm.name,
            TrafficClass::Control,
            Purpose::Machine,
            self.of.id,
        );
        let attempted = format!("migrate VM {}", self.of.vm.name);
        let dialled = self.of.vms.context.dialer.dial(&self.of.peer, hello).await;
        let (connection, agreed) =
            dialled.map_err(|error| error.into_body(&self.of.peer.name, &attempted))?;
        let peer = &self.of.peer.name;
        blockers.extend(Nics::unknown(peer, agreed.features, &entry.machine));
        let mut link = SourceLink::open(
            connection,
            || Order::Ping,
            |answer| matches!(answer, Answer::Pong),
        );
        let mut question = None;
        let mut pool = None;
        if self.of.request.memory == MemoryMode::ZeroCopy {
            let (name, migration) = (&self.of.vm.name, self.of.id.to_string());
            match pooled::offer(&self.of.vms, name, &mut entry, &migration) {
                Ok((mut offer, asked)) => {
                    offer.stays = self.of.request.stay_in_pool;
                    if !offer.stays {
                        let config = &self.of.vms.context.config;
                        blockers.extend(blockers::of(config, &offer.pool, &entry.machine));
                    }
                    blockers.extend(blockers::unsent(&entry.machine));
                    blockers.extend(self.not_in_pool(&entry, &offer.pool).await);
                    (pool, question) = (Some(offer), Some(asked));
                }
                Err(blocker) => blockers.push(blocker),
            }
        }
        let version = self.of.qemu.qmp.version();
        let links = Links::read().await.unwrap_or_default();
        let offer = MachineOffer {
            id: entry.id.clone(),
            epoch: entry.epoch + 1,
            machine: Nics::elsewhere(&self.of, &entry.machine)?,
            machine_type: facts.machine_type,
            qemu: [version.major, version.minor, version.micro],
            memory_bytes: facts.memory_bytes,
            memory: self.of.request.memory,
            pool,
            disks: self.of.disk_sizes().await?,
            disk_ids: self.of.disk_ids(),
            nic_mtus: nic_mtus(&entry.machine),
            nic_placings: links.placings(&entry.machine.nics),
        };
        link.say(Order::Offer(Box::new(offer))).await;
        let mut answer = link.hear_within(CHECK_TIMEOUT).await;
        if let Some(Answer::Notices(notices)) = answer {
            notices.into_iter().for_each(|notice| self.of.warn(notice));
            answer = link.hear_within(CHECK_TIMEOUT).await;
        }
        match answer {
            Some(Answer::Ready) => {
                let peer = &self.of.peer.name;
                let answered = question.as_ref().map(|asked| asked.answered_by(peer));
                if let Some(Err(error)) = answered {
                    let name = entry.memory.as_ref().map_or("", |memory| &memory.pool);
                    blockers.push(pools::refused(peer, name, &error).message);
                }
            }
            Some(Answer::Blocked(more)) => blockers.extend(more),
            _ => {
                return Err(self
                    .of
                    .error(ErrorCode::PeerUnreachable, &"it did not answer the offer")
                    .hint("see the log of the other node, and start the migration again"));
            }
        }
        if !blockers.is_empty() {
            let reason = String::from("something stands in its way");
            link.say(Order::Abort { reason }).await;
            return Err(self.blocked(&blockers));
        }
        if let Some(notice) = Nics::notice(&entry.machine) {
            self.of.warn(notice);
        }
        entry.mark = Some(VmMark::Outgoing {
            migration: self.of.id.to_string(),
            to: self.of.peer.name.clone(),
            runs: facts.runs,
        });
        self.of.store(&entry).await?;
        entry.mark = self.of.request.memory.pulls().then(|| VmMark::Giving {
            migration: self.of.id.to_string(),
        });
        entry.epoch += 1;
        entry.left_by = Some(self.of.id.to_string());
        entry.moved_to = Some(self.of.peer.name.clone());
        if self.of.request.memory == MemoryMode::ZeroCopy
            && let Some(memory) = &mut entry.memory
        {
            memory.given_to = entry.moved_to.clone();
        }
        let disks = entry.machine.disks.len();
        let (vms, name) = (Arc::clone(&self.of.vms), self.of.vm.name.clone());
        let handed_over: HandedOver = Box::new(move |moved| {
            let (vms, name) = (Arc::clone(&vms), name.clone());
            Box::pin(async move { pooled::hand_over(&vms, &name, &moved).await })
        });
        let group = SwitchGroup::new(self.of.vm.name.clone(), entry, disks, handed_over);
        Ok(Working {
            link,
            disks: Disks::new(group),
            memory: Memory::default(),
            nics: Nics,
            told: None,
        })
    }

    /// Refuses memory outside the pool, which would be lost. The answer comes from QEMU's process: this node's own
    /// knowledge may be from before a restart.
    async fn not_in_pool(&self, entry: &VmEntry, pool: &str) -> Option<String> {
        let (of, memory) = (&self.of, entry.memory.as_ref()?);
        match relocated::local_bytes(&of.vms, &of.vm, memory, of.qemu.process.pid).await {
            Ok(0) => None,
            Ok(local) => Some(format!(
                "{} of its memory is not in memory pool {pool}: bring it back first with \
                 'godwit vm memory {} --to pool'",
                Bytes(local),
                of.vm.name
            )),
            Err(why) => Some(why),
        }
    }

    fn blocked(&self, blockers: &[String]) -> ErrorBody {
        let things = match blockers.len() {
            1 => String::from("one thing stands in its way"),
            count => format!("{count} things stand in its way"),
        };
        let list = blockers.join("\n- ");
        self.of
            .error(ErrorCode::Conflict, &format!("{things}:\n- {list}"))
            .hint("nothing was moved; put these right and start the migration again")
    }

    /// Moves the VM, or restores the previous state.
    async fn carry_through(&mut self, mut working: Working) -> Result<(), ErrorBody> {
        self.take_steps(&mut working).await;
        if matches!(self.course.step(), Step::Pull(_)) {
            let giving = Giving::new(
                Arc::clone(&self.of.vms),
                Arc::clone(&self.of.vm),
                (self.of.peer.name.clone(), self.of.id),
                self.of.qemu.clone(),
                (Some(working.link), working.memory.tunnel.take()),
            );
            giving.see_through().await?;
            self.course.happened(Outcome::Done);
        }
        match self.course.ending() {
            Some(Ending::Moved { lost }) => {
                // Memory copied out of a memory pool has no use in the pool any more.
                let entry = self.of.vm.lock().entry.clone();
                released::release(&self.of.vms, &self.of.vm.name, &entry).await;
                // If the other node is gone, the disks stay in doubt here.
                let _ = tokio::time::timeout(DEPART_TIMEOUT, self.disks_departed()).await;
                lost.map_or(Ok(()), |_| self.failure.clone())
            }
            _ => self.failure.clone(),
        }
    }

    /// Ends a move that did not come to its handover, once the guest goes on here: nothing stays at the destination.
    async fn stay(&self, working: &mut Working) {
        let of = &self.of;
        working.memory.clear(of).await;
        working.nics.clear(of).await;
        working.disks.clear(of).await;
        let mut entry = of.vm.lock().entry.clone();
        entry.mark = None;
        if let Err(error) = of.store(&entry).await {
            tracing::error!(vm = of.vm.name, %error, "cannot store that the VM stays");
        }
        // The destination hangs up once it has forgotten the VM. A caller that sees the move's end may then move the VM
        // there again.
        let forgotten = async { while working.link.hear().await.is_some() {} };
        let _ = tokio::time::timeout(FORGET_TIMEOUT, forgotten).await;
    }

    /// Has the guest started at the destination, and ends QEMU here unless the rest of the memory follows.
    async fn start_there(&self, working: &mut Working) -> Result<(), ErrorBody> {
        self.of.vm.lock().entry = working.disks.group.moved().clone();
        working.link.say(Order::Given).await;
        let (announced, seen) = watch::channel(None);
        Nics::forward(&self.of, working.link.speaker(), seen);
        let pulls = self.of.request.memory.pulls();
        if pulls {
            self.of.enter(Phase::PullingMemory);
        }
        let mut answer = working.link.hear_within(RUN_TIMEOUT).await;
        if matches!(answer, Some(Answer::Announced)) {
            announced.send_replace(Some(Instant::now()));
            answer = working.link.hear_within(RUN_TIMEOUT).await;
        }
        let heard = Instant::now();
        failpoint::reach(String::from("vm::before::quit")).await;
        let result = match answer {
            Some(Answer::Running {
                owned_for_us,
                running_for_us,
            }) => {
                let running_for_us = working.memory.ran().then_some(running_for_us);
                self.measured(heard, working, owned_for_us, running_for_us);
                Ok(())
            }
            Some(Answer::Failed(why)) => {
                let text = format!(
                    "VM {} was given to node '{}' and does not run there: {why}",
                    self.of.vm.name, self.of.peer.name
                );
                Err(ErrorBody::new(ErrorCode::Internal, text)
                    .hint("its disks are there, with everything that was written"))
            }
            _ => {
                let text = format!(
                    "node '{}' has VM {} and did not say that it runs",
                    self.of.peer.name, self.of.vm.name
                );
                self.of.warn(text);
                Ok(())
            }
        };
        if !pulls || result.is_err() {
            quit(&self.of.qemu).await;
        }
        if pulls && result.is_err() {
            unmark(&self.of.vms, &self.of.vm).await;
        }
        result
    }

    /// Waits until the destination has confirmed all disks. A caller that sees the move's end then finds the disks
    /// departed.
    async fn disks_departed(&self) {
        let departed = |disk: Arc<Disk>| {
            let inner = disk.lock();
            inner.activity == Activity::Idle
                && matches!(inner.record.ownership, Ownership::Departed { .. })
        };
        for name in self.of.disks() {
            while !self.of.vms.disks.find(&name).is_none_or(departed) {
                tokio::time::sleep(POLL).await;
            }
        }
    }

    /// Records the blackout and the switchover from the destination's times, which are ages, so no clocks are compared.
    /// A guest that stood still before has no blackout.
    fn measured(
        &self,
        heard: Instant,
        working: &Working,
        owned_for_us: u64,
        running_for_us: Option<u64>,
    ) {
        let age = |micros: u64| heard.checked_sub(Duration::from_micros(micros));
        let milliseconds =
            |from: Instant, to: Instant| to.saturating_duration_since(from).as_secs_f64() * 1000.0;
        let between = |from: Option<Instant>, micros| Some(milliseconds(from?, age(micros)?));
        let blackout = running_for_us.and_then(|micros| between(working.memory.stopped, micros));
        let switchover = between(working.told, owned_for_us);
        self.of.vms.migrations.change(self.of.id, |view| {
            view.blackout_ms = blackout;
            view.switchover_ms = switchover;
        });
    }
}

/// Returns the MTU of each NIC's uplink, as far as known.
pub(crate) fn nic_mtus(machine: &Machine) -> Vec<u32> {
    let mtus = machine.nics.iter().map(|nic| uplinks::mtu(&nic.uplink));
    // A missing uplink is among the blockers already.
    mtus.map_while(Result::ok).collect()
}

pub(super) async fn quit(qemu: &Qemu) {
    // QEMU may be gone already.
    let _ = qemu.qmp.execute("quit", json!({})).await;
    let ended = tokio::time::timeout(QUIT_TIMEOUT, qemu.process.ended()).await;
    if ended.is_err() {
        qemu.process.kill().await;
    }
}
