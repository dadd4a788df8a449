//! Moves VMs away. The order of the steps is that of `messages.rs`; nothing but the disks' records
//! (`disks/group.rs`) decides where the VM is.

pub(crate) mod convergence;
pub(crate) mod post_copy_source;
pub(crate) mod preflight;
pub(crate) mod rollback;
pub(crate) mod steps;
pub(crate) mod table;

use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_core::authority::Ownership;
use godwit_core::event::AbortReason;
use godwit_core::units::MigrationId;
use godwit_core::wire::{Purpose, TrafficClass};
use serde_json::json;
use tokio::sync::{Notify, oneshot, watch};
use tokio::task::AbortHandle;

use crate::clock;
use crate::config::PeerConfig;
use crate::disks::disk::{Activity, Disk};
use crate::disks::group::{GroupState, SwitchGroup};
use crate::disks::storage::image;
use crate::failpoint;
use crate::migrations::{options, outgoing};
use crate::node::{Node, blocking};
use crate::peers::greeting;
use crate::store::machine::VmMark;
use crate::vms::control::Link;
use crate::vms::lifecycle::run::stored_badly;
use crate::vms::messages::{Answer, MachineOffer, Order};
use crate::vms::outgoing::post_copy_source::{Giving, unmark};
use crate::vms::outgoing::rollback::TakenBack;
use crate::vms::vm::{Inner, Qemu, Vm, VmActivity, VmGuard};
use godwit_api::{ErrorBody, ErrorCode, MigrateVm, VmMigration, VmMigrationPhase as Phase};
use godwit_qemu::inspect::Facts;

/// Longest wait for the destination to look for blockers.
const CHECK_TIMEOUT: Duration = Duration::from_secs(45);
/// Longest wait to hear that the guest runs at the destination.
const RUN_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest wait for QEMU to end once it is told to.
const QUIT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the disks may take to know that the destination has them.
const DEPART_TIMEOUT: Duration = Duration::from_secs(5);
/// How often the disks' migrations are looked at.
pub(super) const POLL: Duration = Duration::from_millis(20);
/// How long a cancelled move may take to end.
const CANCEL_WAIT: Duration = Duration::from_secs(20);

/// Starts to move a VM. Returns once both nodes have found nothing that stands in the way.
///
/// # Errors
/// The request makes no sense, the peer cannot be reached, or something stands in the way: all of it
/// is named at once, and nothing has moved.
pub(crate) async fn migrate(
    node: &Arc<Node>,
    name: &str,
    request: MigrateVm,
) -> Result<VmMigration, ErrorBody> {
    node.check_open()?;
    let vm = node.vms.get(name)?;
    if request.to == node.config.name {
        let text = format!("VM {name} is on node '{}' already", request.to);
        return Err(ErrorBody::new(ErrorCode::Invalid, text).hint("name another node"));
    }
    let peer = node.peer(&request.to)?.clone();
    let id = options::new_id()?;
    let guard = vm.begin(VmActivity::Outgoing(id), |inner| {
        vm.is_here(inner)?;
        memory_is_here(inner)?;
        nothing_waits_for_room(inner)
    })?;
    let qemu = vm.qemu()?;
    let view = VmMigration {
        id: id.to_string(),
        vm: name.to_owned(),
        from: node.config.name.clone(),
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
    let (number, cancelled) = node.vm_migrations.begin(view.clone());
    store(node, number, &view).await;
    let (begun, told) = oneshot::channel();
    let step = Move {
        node: Arc::clone(node),
        vm,
        peer,
        id,
        request,
        qemu,
        stopped: None,
        told: None,
    };
    tokio::spawn(step.run(guard, cancelled, begun));
    told.await.unwrap_or_else(|_| {
        let text = format!("the task that moves VM {name} failed");
        Err(ErrorBody::new(ErrorCode::Internal, text))
    })?;
    node.vm_migrations.get(node, &id.to_string())
}

fn memory_is_here(vm: &Inner) -> Result<(), ErrorBody> {
    let Some(VmMark::Pulling { from, .. }) = &vm.entry.mark else {
        return Ok(());
    };
    let text = format!("the rest of its memory is still at node '{from}'");
    Err(ErrorBody::new(ErrorCode::Conflict, text).hint("try again when all of it is here"))
}

/// What waits for room is not part of the state that moves.
fn nothing_waits_for_room(vm: &Inner) -> Result<(), ErrorBody> {
    let Some(disk) = &vm.lacks_room else {
        return Ok(());
    };
    let text = format!("it stands still because no space is left for disk {disk} here");
    Err(ErrorBody::new(ErrorCode::Conflict, text)
        .hint("free space where the disk's image is; it goes on by itself then and can move"))
}

/// That a move is missing from the history is no reason to stop it.
pub(super) async fn store(node: &Node, number: u64, view: &VmMigration) {
    if let Err(error) = node.store.put_vm_migration(number, view).await {
        tracing::error!(migration = view.id, %error, "cannot store the migration's history");
    }
}

/// Cancels the move of a VM; it goes on here.
///
/// # Errors
/// There is none such, it has ended, or it is too late.
pub(crate) async fn cancel(node: &Arc<Node>, id: &str) -> Result<VmMigration, ErrorBody> {
    let deadline = Instant::now() + CANCEL_WAIT;
    let view = node.vm_migrations.get(node, id)?;
    if view.phase.ended() {
        let text = format!("migration {id} has ended: it is {}", view.phase.name());
        return Err(ErrorBody::new(ErrorCode::Conflict, text));
    }
    node.vm_migrations.cancel(id);
    loop {
        let view = node.vm_migrations.get(node, id)?;
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

pub(super) type SourceLink = Link<Order, Answer>;

/// One move under way.
pub(super) struct Move {
    pub(super) node: Arc<Node>,
    pub(super) vm: Arc<Vm>,
    pub(super) peer: PeerConfig,
    pub(super) id: MigrationId,
    pub(super) request: MigrateVm,
    pub(super) qemu: Qemu,
    /// When the guest stopped here.
    pub(super) stopped: Option<Instant>,
    /// When the disks were told to change hands.
    pub(super) told: Option<Instant>,
}

/// What is under way on behalf of a move and must end with it.
pub(super) struct Working {
    pub(super) link: SourceLink,
    pub(super) group: Arc<SwitchGroup>,
    /// The ids of the disks' migrations.
    pub(super) disks: Vec<String>,
    pub(super) tunnel: Option<AbortHandle>,
    /// Whether the guest runs, but for the move; nothing before its memory moves.
    pub(super) ran: Option<bool>,
}

impl Move {
    async fn run(
        mut self,
        guard: VmGuard,
        cancelled: Arc<Notify>,
        begun: oneshot::Sender<Result<(), ErrorBody>>,
    ) {
        let checked = tokio::select! {
            checked = self.check() => checked,
            () = cancelled.notified() => Err(self.error(ErrorCode::Conflict, &"it was cancelled")),
        };
        let (result, refused) = match checked {
            Ok(working) => {
                // Whoever asked may have hung up; the move goes on.
                let _ = begun.send(Ok(()));
                (self.carry_out(working, &cancelled).await, None)
            }
            Err(error) => (Err(error), Some(begun)),
        };
        match &result {
            Ok(()) => tracing::info!(vm = self.vm.name, to = self.peer.name, "moved the VM"),
            Err(error) => tracing::warn!(vm = self.vm.name, %error, "the VM was not moved"),
        }
        let gives = matches!(self.vm.lock().entry.mark, Some(VmMark::Giving { .. }));
        if gives && self.node.is_closing() {
            // It has not ended: the next process goes on with it.
            return;
        }
        // Whoever sees that the move has ended may do the next thing with the VM.
        drop(guard);
        let node = Arc::clone(&self.node);
        if let Some((number, view)) = node.vm_migrations.end(&node, self.id, result.clone()) {
            store(&node, number, &view).await;
        }
        if let Some(begun) = refused {
            let _ = begun.send(result);
        }
    }

    pub(super) fn error(&self, code: ErrorCode, why: &dyn std::fmt::Display) -> ErrorBody {
        let (vm, to) = (&self.vm.name, &self.peer.name);
        ErrorBody::new(code, format!("VM {vm} was not moved to node '{to}': {why}"))
    }

    pub(super) fn enter(&self, phase: Phase) {
        tracing::info!(vm = self.vm.name, phase = phase.name(), "migration of a VM");
        self.node
            .vm_migrations
            .change(self.id, |view| view.phase = phase);
    }

    /// Looks for everything that stands in the way, at both nodes.
    async fn check(&self) -> Result<Working, ErrorBody> {
        let facts = Facts::read(&self.qemu.qmp)
            .await
            .map_err(|error| self.error(ErrorCode::Conflict, &error))?;
        let mut entry = self.vm.lock().entry.clone();
        let mut blockers = preflight::leaving(&self.node, &entry.machine, &facts);
        let hello = greeting::hello(
            &self.node.config.name,
            &self.vm.name,
            TrafficClass::Control,
            Purpose::Machine,
            self.id,
        );
        let attempted = format!("migrate VM {}", self.vm.name);
        let dialled = self.node.dialer.dial(&self.peer, hello).await;
        let (connection, _) =
            dialled.map_err(|error| error.into_body(&self.peer.name, &attempted))?;
        let mut link = SourceLink::open(
            connection,
            || Order::Ping,
            |answer| matches!(answer, Answer::Pong),
        );
        let version = self.qemu.qmp.version();
        let offer = MachineOffer {
            machine: entry.machine.clone(),
            machine_type: facts.machine_type,
            qemu: [version.major, version.minor, version.micro],
            memory_bytes: facts.memory_bytes,
            memory: self.request.memory,
            disks: self.sizes(&entry.machine.disks).await?,
        };
        link.say(Order::Offer(Box::new(offer))).await;
        match link.hear_within(CHECK_TIMEOUT).await {
            Some(Answer::Ready) => {}
            Some(Answer::Blocked(more)) => blockers.extend(more),
            _ => {
                return Err(self
                    .error(ErrorCode::PeerUnreachable, &"it did not answer the offer")
                    .hint("see the log of the other node, and start the migration again"));
            }
        }
        if !blockers.is_empty() {
            let reason = String::from("something stands in its way");
            link.say(Order::Abort { reason }).await;
            return Err(self.blocked(&blockers));
        }
        entry.mark = Some(VmMark::Outgoing {
            migration: self.id.to_string(),
            to: self.peer.name.clone(),
            runs: facts.runs,
        });
        self.store(&entry).await?;
        entry.mark = self.request.memory.pulls().then(|| VmMark::Giving {
            migration: self.id.to_string(),
        });
        entry.moved_to = Some(self.peer.name.clone());
        let disks = entry.machine.disks.len();
        Ok(Working {
            link,
            group: SwitchGroup::new(self.vm.name.clone(), entry, disks),
            disks: Vec::new(),
            tunnel: None,
            ran: None,
        })
    }

    fn blocked(&self, blockers: &[String]) -> ErrorBody {
        let things = match blockers.len() {
            1 => String::from("one thing stands in its way"),
            count => format!("{count} things stand in its way"),
        };
        let list = blockers.join("\n- ");
        self.error(ErrorCode::Conflict, &format!("{things}:\n- {list}"))
            .hint("nothing was moved; put these right and start the migration again")
    }

    async fn sizes(&self, disks: &[String]) -> Result<Vec<(String, u64)>, ErrorBody> {
        let mut sizes = Vec::with_capacity(disks.len());
        for name in disks {
            let path = self
                .node
                .disks
                .find(name)
                .map(|disk| disk.lock().entry.path.clone());
            let size = blocking(move || path.and_then(|path| image::allocated(&path))).await?;
            sizes.push((name.clone(), size.unwrap_or(0)));
        }
        Ok(sizes)
    }

    /// Notes whether the guest runs, but for the move: also for the process after this one.
    pub(super) async fn note_ran(&self, working: &mut Working, ran: bool) -> Result<(), ErrorBody> {
        working.ran = Some(ran);
        let mut entry = self.vm.lock().entry.clone();
        match &mut entry.mark {
            Some(VmMark::Outgoing { runs, .. }) if *runs != ran => *runs = ran,
            _ => return Ok(()),
        }
        self.store(&entry).await
    }

    async fn store(&self, entry: &crate::store::machine::VmEntry) -> Result<(), ErrorBody> {
        self.node
            .store
            .put_vm(&self.vm.name, entry)
            .await
            .map_err(|error| stored_badly(&self.vm.name, &error))?;
        self.vm.lock().entry = entry.clone();
        Ok(())
    }

    /// Moves the VM, or puts everything back as it was.
    async fn carry_out(
        &mut self,
        mut working: Working,
        cancelled: &Notify,
    ) -> Result<(), ErrorBody> {
        let given = working.group.state();
        let node = Arc::clone(&self.node);
        let moved = tokio::select! {
            moved = self.until_given(&mut working) => Some(moved),
            () = until_cancelled(&node, cancelled, given) => None,
        };
        let moved =
            moved.unwrap_or_else(|| Err(self.error(ErrorCode::Conflict, &"it was cancelled")));
        if let Err(error) = moved
            && working.group.fail(AbortReason::Cancelled)
        {
            self.put_back(working).await;
            return Err(error);
        }
        // From here on the VM is the destination's, whatever happens: it may only take longer to
        // know that it runs.
        let mut state = working.group.state();
        let is_given = |state: &GroupState| *state == GroupState::Given;
        tokio::select! {
            _ = state.wait_for(is_given) => {}
            () = self.node.closed() => {
                return Err(self.error(ErrorCode::ShuttingDown, &"the node is shutting down"));
            }
        }
        self.finish(working).await
    }

    /// Before the disks were given away: the guest goes on here, nothing stays there.
    async fn put_back(&self, mut working: Working) {
        let reason = String::from("the source gave it up");
        working.link.say(Order::Abort { reason }).await;
        // The disks take requests again as soon as their engines know; the guest must not wait for
        // the rest.
        for disk in self.vm_disks() {
            let disk = self.node.disks.find(&disk);
            let leaves = |disk: &Arc<Disk>| matches!(disk.lock().activity, Activity::Outgoing(_));
            if let Some(disk) = disk.filter(leaves) {
                outgoing::cancel_in_engine(&disk).await;
            }
        }
        if let Some(ran) = working.ran {
            match rollback::take_back(&self.vm, &self.qemu.qmp, ran).await {
                Ok(TakenBack::AsBefore) => {}
                Ok(TakenBack::Bound) => {
                    let text = format!("the guest goes on, but {}", rollback::BOUND);
                    self.node
                        .vm_migrations
                        .change(self.id, |view| view.warnings.push(text));
                }
                Err(error) => {
                    tracing::error!(vm = self.vm.name, %error, "the guest does not go on");
                    self.vm.lock().problem = Some(format!("the guest does not go on: {error}"));
                }
            }
        }
        if let Some(tunnel) = working.tunnel.take() {
            tunnel.abort();
        }
        // Also one whose offer is still being made: its task does not know of this one's end.
        for disk in self.vm_disks() {
            let disk = self.node.disks.find(&disk);
            let leaves = disk.and_then(|disk| disk.lock().activity.migration());
            if let Some(id) = leaves {
                // One that has ended meanwhile is what is wanted.
                let _ = outgoing::cancel(&self.node, &id.to_string()).await;
            }
        }
        let mut entry = self.vm.lock().entry.clone();
        entry.mark = None;
        if let Err(error) = self.store(&entry).await {
            tracing::error!(vm = self.vm.name, %error, "cannot store that the VM stays");
        }
    }

    /// After the disks were given away: the guest starts there, and QEMU ends here.
    async fn finish(&self, mut working: Working) -> Result<(), ErrorBody> {
        self.vm.lock().entry = working.group.moved().clone();
        working.link.say(Order::Given).await;
        let pulls = self.request.memory.pulls();
        if pulls {
            self.enter(Phase::PullingMemory);
        }
        let answer = working.link.hear_within(RUN_TIMEOUT).await;
        let heard = Instant::now();
        failpoint::reach(String::from("vm::before::quit")).await;
        let result = match answer {
            Some(Answer::Running {
                owned_for_us,
                running_for_us,
            }) => {
                let running_for_us = working.ran.unwrap_or(true).then_some(running_for_us);
                self.measured(heard, owned_for_us, running_for_us);
                Ok(())
            }
            Some(Answer::Failed(why)) => {
                let text = format!(
                    "VM {} was given to node '{}' and does not run there: {why}",
                    self.vm.name, self.peer.name
                );
                Err(ErrorBody::new(ErrorCode::Internal, text)
                    .hint("its disks are there, with everything that was written"))
            }
            _ => {
                let text = format!(
                    "node '{}' has VM {} and did not say that it runs",
                    self.peer.name, self.vm.name
                );
                self.node
                    .vm_migrations
                    .change(self.id, |view| view.warnings.push(text));
                Ok(())
            }
        };
        if pulls && result.is_ok() {
            let giving = Giving::new(
                Arc::clone(&self.node),
                Arc::clone(&self.vm),
                (self.peer.name.clone(), self.id),
                self.qemu.clone(),
                (Some(working.link), working.tunnel.take()),
            );
            giving.see_through().await?;
        } else {
            quit(&self.qemu).await;
            if pulls {
                unmark(&self.node, &self.vm).await;
            }
        }
        // The other node may be gone, and then they stay in doubt here.
        let _ = tokio::time::timeout(DEPART_TIMEOUT, self.disks_departed()).await;
        result
    }

    /// Waits until the destination has said of all disks that they are there, so that whoever sees
    /// the end of the move finds them departed.
    async fn disks_departed(&self) {
        let departed = |disk: Arc<Disk>| {
            let inner = disk.lock();
            inner.activity == Activity::Idle
                && matches!(inner.record.ownership, Ownership::Departed { .. })
        };
        for name in self.vm_disks() {
            while !self.node.disks.find(&name).is_none_or(departed) {
                tokio::time::sleep(POLL).await;
            }
        }
    }

    /// From the destination's times, which it gives as ages, so that no clocks are compared. A guest
    /// that stood still before has no blackout.
    fn measured(&self, heard: Instant, owned_for_us: u64, running_for_us: Option<u64>) {
        let age = |micros: u64| heard.checked_sub(Duration::from_micros(micros));
        let milliseconds =
            |from: Instant, to: Instant| to.saturating_duration_since(from).as_secs_f64() * 1000.0;
        let between = |from: Option<Instant>, micros| Some(milliseconds(from?, age(micros)?));
        let blackout = running_for_us.and_then(|micros| between(self.stopped, micros));
        let switchover = between(self.told, owned_for_us);
        self.node.vm_migrations.change(self.id, |view| {
            view.blackout_ms = blackout;
            view.switchover_ms = switchover;
        });
    }
}

/// Ends a VM's QEMU.
pub(super) async fn quit(qemu: &Qemu) {
    // It may be gone already.
    let _ = qemu.qmp.execute("quit", json!({})).await;
    let ended = tokio::time::timeout(QUIT_TIMEOUT, qemu.process.ended()).await;
    if ended.is_err() {
        qemu.process.kill().await;
    }
}

/// Ready when the move is cancelled while that is possible, or when the node ends.
async fn until_cancelled(node: &Arc<Node>, cancelled: &Notify, given: watch::Receiver<GroupState>) {
    loop {
        tokio::select! {
            () = cancelled.notified() => {
                if *given.borrow() == GroupState::Gathering {
                    return;
                }
            }
            () = node.closed() => return,
        }
    }
}
