//! The node that takes a protected machine over: carries out the orders of [`Backup`].

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use godwit_api::{ErrorBody, ErrorCode};
use godwit_block::engine::KEPT_ROOM;
use godwit_context::failpoint;
use godwit_context::store::machine::protections::{BackupEntry, ProtectionEntry, ProtectionPart};
use godwit_core::authority::Ownership;
use godwit_core::units::Epoch;
use godwit_disks::disks::disk::Activity;
use godwit_disks::disks::following;
use godwit_protect::{Ask, Backup, BackupState, Grant, Heard, Order, Sign, Timing};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::checkpoints::{self, Keeping};
use super::messages::{BackupLink, Hear, ProtectionOffer, Say};
use super::taking::Taking;
use super::{Here, Input, News, Orders, decide};
use crate::vms::outgoing::preflight;

/// Time between two requests to the witness.
const ASK_AGAIN: Duration = Duration::from_millis(500);
/// Longest wait for the end of an earlier synchronization.
const SETTLE: Duration = Duration::from_secs(5);
/// Time between two looks at the disks.
const LOOK: Duration = Duration::from_millis(20);

/// A machine offered on a connection.
#[derive(Debug)]
pub(crate) struct Offered {
    pub(super) link: BackupLink,
    pub(super) offer: ProtectionOffer,
    pub(super) from: String,
}

pub(super) struct BackupActor {
    pub(super) here: Here,
    orders: Orders,
    pub(super) entry: ProtectionEntry,
    /// True once the entry is stored.
    stored: bool,
    pub(super) backup: Backup,
    /// The last grant that the primary told, which counts if there is no witness.
    pub(super) told: Grant,
    control: Option<BackupLink>,
    beats: Option<BackupLink>,
    heard: Heard,
    /// The disks that follow, and their migrations.
    pub(super) follows: BTreeMap<String, String>,
    pub(super) keeping: Keeping,
    pub(super) asking: bool,
    ask_at: Instant,
    /// True if an operator has ordered this node to take the machine.
    ordered: bool,
    /// Those who wait for the takeover.
    pub(super) waiting: Vec<oneshot::Sender<Result<(), ErrorBody>>>,
    pub(super) taking: Option<Taking>,
    /// Reason why the machine cannot be taken over after all.
    cannot_take: Option<String>,
    pub(super) problem: Option<String>,
}

/// Returns the entry of a backup of an offered machine.
pub(super) fn entry_of(id: String, offered: &Offered) -> ProtectionEntry {
    let offer = &offered.offer;
    ProtectionEntry {
        id,
        peer: offered.from.clone(),
        me: offer.you,
        witness: offer.witness.clone(),
        when_alone: offer.when_alone,
        timeout_ms: offer.timeout_ms,
        max_bandwidth: offer.max_bandwidth,
        pool: None,
        checkpoints_per_second: offer.checkpoints_per_second,
        part: ProtectionPart::Backup(Box::new(BackupEntry {
            known: offer.known,
            machine_id: offer.machine.id.clone(),
            epoch: offer.machine.epoch,
            machine: offer.machine.machine.clone(),
        })),
    }
}

/// Makes the node of an ended machine the backup of the node that has the machine now: gives the disks up first. Returns
/// false if a disk cannot be given up yet.
pub(super) async fn instead(here: &Here, old: ProtectionEntry, offered: Offered) -> bool {
    let epochs = offered.offer.disk_epochs.iter().copied().map(Epoch);
    for ((name, _), epoch) in offered.offer.machine.disks.iter().zip(epochs) {
        if let Some(disk) = here.vms.disks.find(name) {
            following::yield_to(&disk, epoch).await;
        }
    }
    let vacant = || {
        let disks = here.disks();
        disks
            .iter()
            .all(|disk| disk.lock().record.ownership == Ownership::Vacant)
    };
    if !settled(vacant).await {
        let text = format!("a disk of VM {} is not given up yet", here.vm);
        offered.link.say(Hear::Refused(vec![text])).await;
        return false;
    }
    if let Some(vm) = here.machine() {
        let entry = {
            let mut inner = vm.lock();
            inner.entry.moved_to = Some(old.peer.clone());
            inner.entry.epoch = offered.offer.machine.epoch;
            (inner.entry.mark, inner.entry.surpassed) = (None, None);
            inner.entry.clone()
        };
        if let Err(error) = here.vms.context.store.put_vm(&vm.name, &entry).await {
            tracing::error!(vm = vm.name, %error, "cannot store that the VM is elsewhere");
            return false;
        }
    }
    let entry = ProtectionEntry {
        pool: old.pool,
        ..entry_of(old.id, &offered)
    };
    if !here.store(&entry).await {
        return false;
    }
    super::spawn_backup(&here.vms, &here.vm, entry, true, Some(offered));
    true
}

/// Returns the blockers of an offered machine here.
async fn blockers(here: &Here, offer: &ProtectionOffer) -> Vec<String> {
    let mut machine = offer.machine.clone();
    let has_checkpoints = offer.checkpoints_per_second.is_some();
    if has_checkpoints {
        for (_, bytes) in &mut machine.disks {
            *bytes = bytes.saturating_add(KEPT_ROOM);
        }
    }
    let mut blockers = preflight::coming(&here.vms, &here.vm, &machine).await;
    let witness = offer.witness.as_deref();
    blockers.extend(witness.and_then(|text| decide::usable(&here.vms, text).err()));
    if has_checkpoints && blockers.is_empty() {
        blockers.extend(checkpoints::other_qemu(&here.vms, &machine).await);
    }
    blockers
}

async fn settled(is_so: impl Fn() -> bool) -> bool {
    let wait = async {
        while !is_so() {
            tokio::time::sleep(LOOK).await;
        }
    };
    tokio::time::timeout(SETTLE, wait).await.is_ok()
}

impl BackupActor {
    pub(super) fn new(here: Here, orders: Orders, entry: ProtectionEntry, stored: bool) -> Self {
        let known = entry.backup().map_or(Grant::FIRST, |backup| backup.known);
        let timing = Timing::of(Duration::from_millis(entry.timeout_ms));
        let heard = Heard::new(timing, here.now());
        // The orders of a new backup are given with each offer, and by `run`.
        let (backup, _) = Backup::new(entry.me, known);
        Self {
            here,
            orders,
            entry,
            stored,
            backup,
            told: known,
            control: None,
            beats: None,
            heard,
            follows: BTreeMap::new(),
            keeping: Keeping::default(),
            asking: false,
            ask_at: Instant::now(),
            ordered: false,
            waiting: Vec::new(),
            taking: None,
            cannot_take: None,
            problem: None,
        }
    }

    /// Runs until the protection ends, this node becomes the primary, or the node closes.
    pub(super) async fn run(mut self, offered: Option<Offered>) {
        match offered {
            Some(offered) => self.offered(offered).await,
            // A grant that an earlier process may have left is given back.
            None => {
                checkpoints::end_left(&self.here.vms, &self.here.vm).await;
                let orders = self.backup.retry();
                self.obey(orders).await;
            }
        }
        if !self.stored {
            self.here.take_off();
            return;
        }
        let every = Timing::of(Duration::from_millis(self.entry.timeout_ms)).every;
        let mut tick = tokio::time::interval(every / 2);
        let context = Arc::clone(&self.here.vms.context);
        loop {
            self.show();
            tokio::select! {
                input = self.orders.recv() => match input {
                    Some(input) => if self.take(input).await {
                        return;
                    },
                    None => return,
                },
                said = hear(&mut self.control) => if self.said(said, true).await {
                    return;
                },
                said = hear(&mut self.beats) => if self.said(said, false).await {
                    return;
                },
                _ = tick.tick() => self.tick().await,
                () = context.closed() => return,
            }
        }
    }

    /// Takes an input. Returns true if this node is no backup any more.
    async fn take(&mut self, input: Input) -> bool {
        match input {
            Input::Offered(offered) => self.offered(*offered).await,
            Input::Beats(link) => self.beats = Some(link),
            Input::Disk(disk, migration, News::Follows) => self.disk_follows(disk, migration).await,
            Input::Disk(disk, migration, News::Lost(_)) => self.disk_lost(&disk, &migration).await,
            Input::Decided(ask, answer) => self.decided(&ask, answer).await,
            Input::Witness(answer) => {
                if self.backup.state() == BackupState::Following {
                    self.problem = answer.err();
                }
            }
            Input::Question(reply) => {
                let took = self.backup.state() == BackupState::Took;
                if !took {
                    self.start_over("the primary goes on alone").await;
                }
                let _ = reply.send((self.backup.known(), took));
            }
            Input::Look(reply) => {
                let took = self.backup.state() == BackupState::Took;
                let _ = reply.send((self.backup.known(), took));
            }
            Input::Failover(reply) => self.failover(reply),
            Input::Unprotect {
                force: false,
                reply,
            } => {
                let text = format!("VM {} runs at node '{}'", self.here.vm, self.entry.peer);
                let error = ErrorBody::new(ErrorCode::Conflict, text).hint(
                    "end its protection there; if that node does not know of it any more, --force ends it here",
                );
                let _ = reply.send(Err(error));
            }
            Input::Unprotect { force: true, reply } => {
                let left = self.leave().await;
                let _ = reply.send(left.clone());
                return left.is_ok();
            }
            Input::Given => return self.became_primary(),
            Input::Checkpoints(connection) => self.checkpoints_come(connection),
            Input::Waiting(session, started) => self.machine_waits(session, started).await,
            Input::FirstCheckpoint(session) => self.first_checkpoint(session),
            Input::CheckpointsEnded(session, why) => self.checkpoints_ended(session, why).await,
            Input::Disk(_, _, News::Followed) | Input::Connected(_) | Input::Started(..) => {}
        }
        false
    }

    /// Takes an offer: the disks here are no copy of the machine's disks until they follow again.
    async fn offered(&mut self, offered: Offered) {
        let name = self.here.vms.context.config.name.clone();
        if self.backup.state() == BackupState::Took {
            let text = format!("node '{name}' has taken VM {}", self.here.vm);
            return offered.link.say(Hear::Refused(vec![text])).await;
        }
        (self.control, self.beats) = (None, None);
        self.start_over("the primary synchronizes anew").await;
        let blockers = blockers(&self.here, &offered.offer).await;
        if !blockers.is_empty() {
            tracing::warn!(
                vm = self.here.vm,
                ?blockers,
                "the VM cannot be protected here"
            );
            return offered.link.say(Hear::Refused(blockers)).await;
        }
        self.entry = entry_of(self.entry.id.clone(), &offered);
        if !self.here.store(&self.entry).await {
            return;
        }
        self.stored = true;
        let (backup, orders) = Backup::new(self.entry.me, offered.offer.known);
        (self.backup, self.told) = (backup, offered.offer.known);
        (self.asking, self.ordered, self.problem) = (false, false, None);
        self.obey(orders).await;
        let timing = Timing::of(Duration::from_millis(self.entry.timeout_ms));
        self.heard = Heard::new(timing, self.here.now());
        self.expect_checkpoints(&offered.offer.machine);
        offered.link.say(Hear::Ready).await;
        self.control = Some(offered.link);
    }

    /// Gives up the copies here as copies of the machine's disks.
    pub(super) async fn start_over(&mut self, why: &str) {
        tracing::info!(vm = self.here.vm, why, "the backup starts over");
        self.backup.resync();
        self.follows.clear();
        self.drop_checkpoints().await;
        let disks = self.here.disks();
        for disk in &disks {
            if matches!(disk.lock().activity, Activity::Incoming(_)) {
                following::give_up(disk).await;
            }
        }
        let idle = || {
            let busy = |disk: &_| matches!(super::activity(disk), Activity::Incoming(_));
            !disks.iter().any(busy)
        };
        settled(idle).await;
    }

    async fn disk_follows(&mut self, disk: String, migration: String) {
        let Some(found) = self.here.vms.disks.find(&disk) else {
            return;
        };
        let is_current = {
            let inner = found.lock();
            let current = inner.activity.migration().map(|id| id.to_string());
            current.as_deref() == Some(migration.as_str())
                && inner.entry.counterpart.as_deref() == Some(self.entry.peer.as_str())
        };
        if !is_current {
            return;
        }
        self.follows.insert(disk, migration);
        let all = |disk: &String| self.follows.contains_key(disk);
        if self.backup.state() == BackupState::Syncing && self.here.disk_names().iter().all(all) {
            tracing::info!(
                vm = self.here.vm,
                from = self.entry.peer,
                "all disks of the VM follow here"
            );
            match self.has_checkpoints() {
                true => self.prepare_machine(),
                false => self.in_sync(),
            }
        }
    }

    /// Follows: everything is here from which the machine would go on.
    pub(super) fn in_sync(&mut self) {
        self.backup.in_sync();
        self.heard.ping(self.here.now());
        self.say(Hear::Following);
    }

    async fn disk_lost(&mut self, disk: &str, migration: &str) {
        if self
            .follows
            .get(disk)
            .is_none_or(|known| known != migration)
        {
            return;
        }
        let why = self.here.trouble_of(migration);
        let why = why.unwrap_or_else(|| format!("disk {disk} does not follow any more"));
        if self.backup.state() == BackupState::Took {
            self.cannot_take = Some(why);
            return;
        }
        self.problem = Some(why.clone());
        self.say(Hear::Behind(why));
        self.start_over("a disk does not follow any more").await;
    }

    pub(super) fn say(&self, hear: Hear) {
        if let Some(control) = &self.control {
            // A primary that does not keep up is lost soon.
            control.try_say(hear);
        }
    }

    /// Takes a message of the primary; none if the connection has ended. Returns true if the protection has ended.
    async fn said(&mut self, said: Option<Say>, on_control: bool) -> bool {
        match said {
            Some(Say::Ping(number)) => {
                self.heard.ping(self.here.now());
                let link = if on_control {
                    &self.control
                } else {
                    &self.beats
                };
                if let Some(link) = link {
                    link.try_say(Hear::Pong(number));
                }
            }
            Some(Say::Paired(grant)) if grant.owner != self.entry.me => self.told = grant,
            Some(Say::MachineDied) => {
                let why = format!("the VM has died at node '{}'", self.entry.peer);
                // Without a witness the primary's own word counts as an operator's: it asks for nothing meanwhile.
                self.ordered |= self.entry.witness.is_none();
                self.primary_lost(why).await;
            }
            Some(Say::Ended) => return self.leave().await.is_ok(),
            Some(Say::Beat | Say::Paired(_)) => {}
            None if on_control => self.control = None,
            None => self.beats = None,
        }
        false
    }

    async fn tick(&mut self) {
        if self.backup.state() == BackupState::Following
            && self.heard.sign(self.here.now()) == Sign::Lost
        {
            let why = format!("node '{}' is silent", self.entry.peer);
            self.primary_lost(why).await;
        }
        if let Some(why) = self.cannot_take.take() {
            self.give_back(why).await;
        }
        if !self.asking && Instant::now() >= self.ask_at {
            let orders = self.backup.retry();
            self.obey(orders).await;
        }
    }

    /// Takes the machine, if the witness agrees.
    async fn primary_lost(&mut self, why: String) {
        tracing::warn!(
            vm = self.here.vm,
            peer = self.entry.peer,
            why,
            "the primary is lost"
        );
        self.problem = Some(why);
        (self.control, self.beats) = (None, None);
        failpoint::reach(String::from("protect::primary-lost")).await;
        let orders = self.backup.primary_lost();
        self.obey(orders).await;
    }

    pub(super) async fn obey(&mut self, orders: Vec<Order>) {
        for order in orders {
            match order {
                Order::Ask(ask) => self.ask(ask),
                Order::Sever => {
                    for disk in self.here.disks() {
                        if !following::sever(&disk).await {
                            let why = format!("disk {} does not follow here", disk.name);
                            self.problem = Some(why.clone());
                            return self.start_over(&why).await;
                        }
                    }
                    if !self.sever_checkpoints().await {
                        let why = "no checkpoint is whole here";
                        self.problem = Some(why.to_owned());
                        return self.start_over(why).await;
                    }
                }
                Order::Take(term) => {
                    tracing::warn!(
                        vm = self.here.vm,
                        term = term.0,
                        "this node takes the VM over"
                    );
                    if let Err(error) = self.take_over().await {
                        self.cannot_take = Some(error.message);
                    }
                }
                Order::Hold | Order::GoAlone | Order::Protected | Order::End => {}
            }
        }
    }

    fn ask(&mut self, ask: Ask) {
        if self.asking {
            return;
        }
        self.asking = true;
        self.here.decide(decide::Request {
            vm: self.here.vm.clone(),
            entry: self.entry.clone(),
            ask,
            told: self.told,
            ordered: self.ordered,
            was_away: false,
            leaves: false,
        });
    }

    async fn decided(&mut self, ask: &Ask, answer: Result<Grant, String>) {
        self.asking = false;
        self.ask_at = Instant::now() + ASK_AGAIN;
        match answer {
            Ok(grant) => {
                self.told = grant;
                let orders = self.backup.answered(ask, grant);
                self.obey(orders).await;
            }
            Err(why) => self.problem = Some(why),
        }
    }

    /// Takes the machine over on an operator's order.
    fn failover(&mut self, reply: oneshot::Sender<Result<(), ErrorBody>>) {
        let (vm, peer) = (&self.here.vm, &self.entry.peer);
        let conflict =
            |text: String, hint: String| ErrorBody::new(ErrorCode::Conflict, text).hint(hint);
        let refusal = match self.backup.state() {
            BackupState::Asking if self.entry.witness.is_some() => Some(conflict(
                format!("VM {vm}: the witness decides who takes it over"),
                String::from("see 'godwit vm show' for the witness's answer"),
            )),
            BackupState::Asking | BackupState::Took => None,
            BackupState::Following => Some(conflict(
                format!("VM {vm} runs at node '{peer}', which is not lost"),
                format!("stop it there first, or move it: godwit migrate vm/{vm}"),
            )),
            BackupState::Syncing => Some(conflict(
                format!("VM {vm} cannot be taken over: not every acknowledged write is here"),
                format!("bring node '{peer}' back"),
            )),
        };
        match refusal {
            Some(error) => {
                let _ = reply.send(Err(error));
            }
            None => {
                (self.ordered, self.asking) = (true, false);
                self.ask_at = Instant::now();
                self.waiting.push(reply);
            }
        }
    }

    /// Ends the backup's part. The copies of the disks stay.
    async fn leave(&mut self) -> Result<(), ErrorBody> {
        if self.backup.state() == BackupState::Took {
            let text = format!("VM {} is being taken over", self.here.vm);
            return Err(ErrorBody::new(ErrorCode::Conflict, text));
        }
        self.start_over("the protection has ended").await;
        self.here.forget().await
    }
}

async fn hear(link: &mut Option<BackupLink>) -> Option<Say> {
    match link {
        Some(link) => link.hear().await,
        None => std::future::pending().await,
    }
}
