//! Destination: decides if an incoming VM runs here.
//!
//! The guest may run here if and only if this node durably owns all disks of the VM and QEMU has its memory. The disks
//! come all or not at all (`disks/group.rs`). While a disk is accepted but undecided, nothing is decided: QEMU is kept,
//! and the guest stands still. The VM is given up only when no disk is here and none can come any more. So the
//! connection to the source is a matter of speed alone: with or without the connection, and after a restart of this
//! node, the same facts lead to the same end. For a VM without disks the source's word takes the disks' place
//! (`asking.rs`), and without the source's word an operator's (`doubt.rs`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_core::authority::Ownership;
use godwit_core::units::MigrationId;
use godwit_memory::ownership::Arrival;
use tokio::task::{AbortHandle, JoinHandle};

use crate::vms::Vms;
use crate::vms::control::Link;
use crate::vms::incoming::doubt::{self, Decided, Doubt, Verdict};
use crate::vms::incoming::nics::ArrivingNics;
use crate::vms::incoming::post_copy_destination::Pulling;
use crate::vms::incoming::{let_run, pour, start};
use crate::vms::lifecycle::run::forget;
use crate::vms::memory::{mover, pooled};
use crate::vms::messages::{Answer, MachineOffer, Order};
use crate::vms::outgoing::planes::nics::announce_cards;
use crate::vms::tunnel::OpenDoor;
use crate::vms::vm::{Qemu, Vm, VmGuard};
use godwit_api::{ErrorBody, ErrorCode, MemoryPlace, MoveMemory};
use godwit_context::failpoint;
use godwit_context::store::machine::{VmMark, VmOrigin};
use godwit_disks::disks::disk::{Activity, Disk};
use godwit_disks::disks::following;
use godwit_disks::disks::vhost::Held;
use godwit_peers::PeerConnection;
use godwit_qemu::inspect;
use godwit_qemu::monitor::qmp::QmpError;

/// Time between two checks of the facts without a notification.
const POLL: Duration = Duration::from_millis(100);

/// Time between two checks while the guest stands still and waits for the result.
const FAST_POLL: Duration = Duration::from_millis(1);

/// Longest wait for the memory in QEMU once the disks are here and the source is gone.
const LOAD_TIMEOUT: Duration = Duration::from_secs(30);

/// The place of a VM's disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Claim {
    /// This node owns all disks.
    Owned,
    /// This node owns no disk, and none comes.
    Elsewhere,
    /// Some disks come, or are undecided.
    Open,
}

/// The link for the source's orders and their answers.
pub(crate) type DestinationLink = Link<Answer, Order>;

/// The task of a starting QEMU. Aborting the task ends the QEMU.
type Starting = JoinHandle<Result<Qemu, ErrorBody>>;

/// An incoming VM.
pub(crate) struct Incoming<'a> {
    vms: &'a Arc<Vms>,
    vm: &'a Arc<Vm>,
    offer: Option<MachineOffer>,
    link: Option<DestinationLink>,
    door: Option<OpenDoor<'a>>,
    /// The task carrying the memory.
    carrying: Option<AbortHandle>,
    /// The hold on the VM's disks, if they must wait.
    held: Option<Held>,
    qemu: Option<Qemu>,
    starting: Option<Starting>,
    /// The reason for giving the VM up.
    given_up: Option<String>,
    /// True while the source waits for [`Answer::Loaded`].
    load_asked: bool,
    /// True once the source was sent [`Answer::Loaded`].
    told_loaded: bool,
    /// The source's word on giving the VM away. Decides for a VM without disks.
    given: Option<bool>,
    /// The decision to wait for if the source is gone.
    doubt: Doubt,
    nics: ArrivingNics,
    owned_at: Option<Instant>,
}

/// An event while nothing could be decided.
enum Happened {
    Order(Option<Order>),
    Memory(Option<PeerConnection>),
    Started(Result<Qemu, ErrorBody>),
    QemuEnded,
    Decided(Decided),
    Closing,
    Nothing,
}

impl<'a> Incoming<'a> {
    /// Returns a VM whose offer was accepted.
    pub(crate) fn new(
        vms: &'a Arc<Vms>,
        vm: &'a Arc<Vm>,
        offer: MachineOffer,
        link: DestinationLink,
        door: OpenDoor<'a>,
    ) -> Self {
        Self {
            offer: Some(offer),
            link: Some(link),
            door: Some(door),
            given_up: None,
            ..Self::found(vms, vm, None, None)
        }
    }

    /// Returns a VM found incoming after a restart; QEMU may still run.
    pub(crate) fn found(
        vms: &'a Arc<Vms>,
        vm: &'a Arc<Vm>,
        qemu: Option<Qemu>,
        held: Option<Held>,
    ) -> Self {
        Self {
            vms,
            vm,
            offer: None,
            link: None,
            door: None,
            carrying: None,
            held,
            qemu,
            starting: None,
            given_up: Some(String::from("this node was started again")),
            load_asked: false,
            told_loaded: false,
            given: None,
            doubt: Doubt::default(),
            nics: ArrivingNics::default(),
            owned_at: None,
        }
    }

    /// Decides the VM's fate here: the VM runs, or is removed. Returns early when the node closes. The guard is dropped
    /// before the source is told the end, so a caller told of the end finds no activity of the VM.
    pub(crate) async fn decide(mut self, guard: VmGuard) {
        loop {
            let mut owners = self.vms.disks.owners.subscribe();
            let mut wait = POLL;
            match self.claim() {
                Claim::Owned => {
                    let since = *self.owned_at.get_or_insert_with(Instant::now);
                    wait = FAST_POLL;
                    match self.qemu.clone() {
                        Some(qemu) if loaded(&qemu).await => return self.run(&qemu, guard).await,
                        Some(_) if since.elapsed() < LOAD_TIMEOUT => {}
                        _ => return self.lose(guard).await,
                    }
                }
                Claim::Elsewhere if self.given_up.is_some() => return self.remove(guard).await,
                Claim::Elsewhere => {}
                Claim::Open if self.given_up.is_some() => {
                    self.stop_receiving().await;
                    if self.link.is_none() {
                        self.doubt.begin(self.vms, self.vm);
                    }
                }
                Claim::Open => {}
            }
            if self.load_asked
                && let Some(qemu) = &self.qemu
            {
                wait = FAST_POLL;
                if loaded(qemu).await {
                    self.load_asked = false;
                    self.told_loaded = true;
                    self.say(Answer::Loaded).await;
                }
            }
            let happened = tokio::select! {
                order = hear(&mut self.link) => Happened::Order(order),
                memory = arrived(&mut self.door), if self.qemu.is_some() => Happened::Memory(memory),
                started = started(&mut self.starting) => Happened::Started(started),
                () = ended(self.qemu.as_ref()) => Happened::QemuEnded,
                decided = self.doubt.next() => Happened::Decided(decided),
                () = self.vms.context.closed() => Happened::Closing,
                _ = owners.changed() => Happened::Nothing,
                () = tokio::time::sleep(wait) => Happened::Nothing,
            };
            match happened {
                Happened::Order(order) => self.obey(order).await,
                Happened::Memory(Some(connection)) => {
                    self.carrying = Some(pour(self.vm, connection, self.vm.places.incoming()));
                }
                Happened::Memory(None) => self.door = None,
                Happened::Started(started) => {
                    self.starting = None;
                    match started {
                        Ok(qemu) => {
                            self.qemu = Some(qemu);
                            self.say(Answer::Started).await;
                        }
                        Err(error) => self.fail(error.message).await,
                    }
                }
                Happened::QemuEnded => {
                    self.qemu = None;
                    let said = godwit_qemu::process::log_tail(&self.vm.places.log());
                    self.fail(format!("its QEMU has ended: {said}")).await;
                }
                Happened::Decided(Decided::BySource(given)) => self.given = Some(given),
                Happened::Decided(Decided::ByOperator(Verdict::Ours, reply)) => {
                    let claimed = doubt::claim_all(self.vms, self.vm).await;
                    if claimed.is_ok() {
                        self.given = Some(true);
                    }
                    // The operator's request may have ended.
                    let _ = reply.send(claimed);
                }
                Happened::Decided(Decided::ByOperator(Verdict::GivenUp, reply)) => {
                    self.remove(guard).await;
                    let _ = reply.send(Ok(()));
                    return;
                }
                Happened::Closing => return,
                Happened::Nothing => {}
            }
        }
    }

    async fn obey(&mut self, order: Option<Order>) {
        match order {
            Some(Order::Start) => {
                if let (Some(offer), None, None) = (&self.offer, &self.qemu, &self.starting) {
                    let (vms, vm) = (Arc::clone(self.vms), Arc::clone(self.vm));
                    let offer = offer.clone();
                    let starting = async move { start(&vms, &vm, offer).await };
                    self.starting = Some(godwit_context::spawn(starting));
                }
            }
            Some(Order::Load { runs }) => match self.store_runs(runs).await {
                Ok(()) => self.load_asked = true,
                Err(error) => self.fail(error).await,
            },
            Some(Order::Nic(piece)) => {
                if let Err(why) = self.nics.take(self.vm, &piece).await {
                    self.fail(why).await;
                }
            }
            Some(Order::Given) => self.given = Some(true),
            Some(Order::Abort { reason }) => {
                self.given_up = Some(reason);
                self.given.get_or_insert(false);
            }
            Some(
                Order::NicsQuiet
                | Order::NicsDone
                | Order::Offer(_)
                | Order::Resume
                | Order::Ask { .. }
                | Order::Protection(_)
                | Order::Lost { .. }
                | Order::Ping,
            ) => {}
            None => {
                self.link = None;
                let lost = || String::from("the connection to the source is lost");
                self.given_up.get_or_insert_with(lost);
            }
        }
    }

    /// Stores if the guest is to run. A running guest, the usual case, needs no write, which would prolong the
    /// standstill.
    async fn store_runs(&self, now: bool) -> Result<(), String> {
        let entry = {
            let mut inner = self.vm.lock();
            let Some(VmMark::Incoming { runs, .. }) = &mut inner.entry.mark else {
                return Ok(());
            };
            if *runs == now {
                return Ok(());
            }
            *runs = now;
            inner.entry.clone()
        };
        let stored = self.vms.context.store.put_vm(&self.vm.name, &entry).await;
        stored.map_err(|error| format!("cannot store whether its guest is to run: {error}"))
    }

    async fn say(&self, answer: Answer) {
        if let Some(link) = &self.link {
            link.say(answer).await;
        }
    }

    async fn fail(&mut self, why: String) {
        tracing::warn!(vm = self.vm.name, why, "the VM cannot be received");
        self.say(Answer::Failed(why.clone())).await;
        self.given_up = Some(why);
    }

    fn disks(&self) -> Vec<String> {
        self.vm.lock().entry.machine.disks.clone()
    }

    /// Returns the VM's disks that are here or come. Skips a disk of the same name with another id.
    fn found_disks(&self) -> Vec<Arc<Disk>> {
        let (names, ids) = {
            let entry = &self.vm.lock().entry;
            (entry.machine.disks.clone(), entry.disk_ids.clone())
        };
        let found = names.iter().enumerate().filter_map(|(number, name)| {
            let disk = self.vms.disks.find(name)?;
            let id = disk.lock().entry.id.map(|id| id.to_string());
            let is_it = match (ids.get(number), id) {
                (Some(wanted), Some(id)) => *wanted == id,
                // An earlier version sends no ids of disks.
                _ => true,
            };
            is_it.then_some(disk)
        });
        found.collect()
    }

    fn claim(&self) -> Claim {
        let disks = self.disks();
        let memory = pooled::arrival(self.vms, self.vm);
        if disks.is_empty() {
            // The title of the memory decides, or else the source's word. The source gives nothing away before
            // [`Answer::Loaded`]; a restarted node does not know if the answer was sent.
            let could = self.told_loaded || self.offer.is_none();
            return match (memory, self.given) {
                (Some(Arrival::Given), _) | (None, Some(true)) => Claim::Owned,
                (Some(Arrival::Elsewhere), _) | (_, Some(false)) => Claim::Elsewhere,
                _ if could => Claim::Open,
                _ => Claim::Elsewhere,
            };
        }
        let mut owned = 0;
        let mut open = false;
        for disk in self.found_disks() {
            let inner = disk.lock();
            match inner.record.ownership {
                Ownership::Serving => owned += 1,
                Ownership::Accepted { .. } => open = true,
                Ownership::Vacant | Ownership::Relinquished { .. } | Ownership::Departed { .. } => {
                    open |= matches!(inner.activity, Activity::Incoming(_) | Activity::Removing);
                }
            }
        }
        let has_memory = matches!(memory, None | Some(Arrival::Given));
        if owned == disks.len() && has_memory {
            Claim::Owned
        } else if owned > 0 || open {
            Claim::Open
        } else {
            Claim::Elsewhere
        }
    }

    /// Stops receiving disks without an acceptance. Accepted disks wait for the source.
    async fn stop_receiving(&self) {
        for disk in self.found_disks() {
            let incoming = matches!(disk.lock().activity, Activity::Incoming(_));
            if incoming {
                following::give_up(&disk).await;
            }
        }
    }

    /// Resumes the guest here.
    async fn run(mut self, qemu: &Qemu, guard: VmGuard) {
        failpoint::reach(String::from("vm::before::run")).await;
        let pulls = self.pulls();
        let runs = !matches!(
            self.vm.lock().entry.mark,
            Some(VmMark::Incoming { runs: false, .. })
        );
        // The network is told first: the guest's packets would tell the network, too.
        ArrivingNics::take_over(self.vm, self.link.as_ref()).await;
        let ready = match pooled::may_run(self.vms, self.vm) {
            Ok(()) if runs => let_run(qemu).await,
            Ok(()) => Ok(()),
            Err(error) => Err(QmpError::Unexpected(error.message)),
        };
        match ready {
            Ok(()) => {}
            // QEMU's main loop waits for memory that comes only once pulled. The guest then runs.
            Err(QmpError::Timeout { .. }) if pulls.is_some() => {}
            Err(error) => {
                tracing::error!(vm = self.vm.name, %error, "the VM is here but does not run");
                self.settle(None, Some(error.to_string()), guard).await;
                self.say(Answer::Failed(error.to_string())).await;
                return;
            }
        }
        let running = Instant::now();
        if runs {
            let machine = self.vm.lock().entry.machine.clone();
            announce_cards(&self.vm.name, &machine, qemu);
        }
        if let Some(link) = &mut self.link {
            std::mem::take(&mut self.nics)
                .take_late(self.vm, link)
                .await;
        }
        let owned = self.owned_at.unwrap_or(running);
        let mark = pulls.as_ref().map(|(migration, from)| VmMark::Pulling {
            migration: migration.to_string(),
            from: from.clone(),
        });
        self.settle(mark, None, guard).await;
        let micros = |since: Instant| since.elapsed().as_micros() as u64;
        self.say(Answer::Running {
            owned_for_us: micros(owned),
            running_for_us: micros(running),
        })
        .await;
        tracing::info!(vm = self.vm.name, runs, "the VM is here");
        let follows = self.offer.as_ref().and_then(|offer| offer.pool.as_ref());
        if follows.is_some_and(|pool| !pool.stays) {
            self.let_memory_follow().await;
        }
        let Some((migration, from)) = pulls else {
            return;
        };
        let (here, process) = ((self.vms, self.vm), Arc::clone(&qemu.process));
        let held = self.held.take();
        let pulling = match self.door.take() {
            Some(door) => Pulling::new(
                here,
                process,
                door,
                self.link.take(),
                self.carrying.take(),
                held,
            ),
            None => Pulling::found(here, process, (migration, &from), held),
        };
        // The rest of `self` has no use any more, and would be kept for as long as the memory takes.
        drop(self);
        pulling.run().await;
    }

    /// Moves the memory from the memory pool to this node. The guest runs, even if this fails.
    async fn let_memory_follow(&self) {
        let request = MoveMemory {
            to: MemoryPlace::Local,
            hold_us: None,
            max_bandwidth: None,
        };
        if let Err(error) = mover::start(self.vms, &self.vm.name, request).await {
            tracing::warn!(vm = self.vm.name, %error, "the VM's memory stays in its memory pool");
            self.vm.lock().problem = Some(error.message);
        }
    }

    /// Returns the migration and the source node, if the guest is to run before the rest of the memory is here.
    fn pulls(&self) -> Option<(MigrationId, String)> {
        let inner = self.vm.lock();
        match (&inner.entry.mark, &inner.entry.origin) {
            (
                Some(VmMark::Incoming {
                    migration,
                    pulls: true,
                    ..
                }),
                VmOrigin::Received { from },
            ) => Some((migration.parse().ok()?, from.clone())),
            _ => None,
        }
    }

    /// Gives up a guest whose disks are here without the memory.
    async fn lose(&self, guard: VmGuard) {
        let why = "its memory did not arrive; its disks are here: stop it and start it anew";
        tracing::error!(vm = self.vm.name, "{why}");
        if let Some(qemu) = &self.qemu {
            qemu.process.kill().await;
        }
        self.settle(None, Some(why.to_owned()), guard).await;
        self.say(Answer::Failed(why.to_owned())).await;
    }

    /// Makes the VM this node's, and ends the activity.
    async fn settle(&self, mark: Option<VmMark>, problem: Option<String>, guard: VmGuard) {
        let entry = {
            let mut inner = self.vm.lock();
            inner.entry.mark = mark;
            inner.entry.disk_ids.clear();
            inner.problem = problem;
            inner.verdicts = None;
            if let Some(memory) = &mut inner.entry.memory {
                memory.epoch += 1;
            }
            inner.entry.clone()
        };
        // A restart would find the mark, and come to the same end.
        if let Err(error) = self.vms.context.store.put_vm(&self.vm.name, &entry).await {
            tracing::error!(vm = self.vm.name, %error, "cannot store the VM");
        }
        drop(guard);
    }

    /// Removes a cancelled VM.
    async fn remove(&mut self, guard: VmGuard) {
        let why = self.given_up.as_deref().unwrap_or("it was given up");
        tracing::info!(vm = self.vm.name, why, "the VM does not come");
        // The start may wait for a disk of the cancelled move.
        if let Some(starting) = self.starting.take() {
            starting.abort();
            let _ = starting.await;
        }
        let watched = self.vm.lock().qemu.clone();
        if let Some(qemu) = self.qemu.take().or(watched) {
            qemu.process.kill().await;
        }
        forget(self.vms, self.vm, guard).await;
    }
}

pub(in crate::vms) async fn hear(link: &mut Option<DestinationLink>) -> Option<Order> {
    match link {
        Some(link) => link.hear().await,
        None => std::future::pending().await,
    }
}

async fn arrived(door: &mut Option<OpenDoor<'_>>) -> Option<PeerConnection> {
    match door {
        Some(door) => door.arrivals.recv().await,
        None => std::future::pending().await,
    }
}

async fn started(starting: &mut Option<Starting>) -> Result<Qemu, ErrorBody> {
    match starting {
        Some(starting) => starting.await.unwrap_or_else(|error| {
            let text = format!("the task that starts its QEMU failed: {error}");
            Err(ErrorBody::new(ErrorCode::Internal, text))
        }),
        None => std::future::pending().await,
    }
}

async fn ended(qemu: Option<&Qemu>) {
    match qemu {
        Some(qemu) => qemu.process.ended().await,
        None => std::future::pending().await,
    }
}

/// Returns true if QEMU no longer waits for the memory. The run state is then the guest's: a guest that never ran, or
/// ended, is in the same state again.
async fn loaded(qemu: &Qemu) -> bool {
    let state = inspect::run_state(&qemu.qmp).await;
    state.is_ok_and(|state| state != inspect::AWAITS_MEMORY)
}
