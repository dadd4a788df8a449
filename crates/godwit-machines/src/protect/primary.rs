//! The node that runs a protected machine: carries out the orders of [`Primary`].

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use godwit_api::{ErrorBody, ErrorCode};
use godwit_context::failpoint;
use godwit_context::store::machine::protections::{ProtectionEntry, ProtectionPart};
use godwit_disks::disks::disk::Disk;
use godwit_disks::disks::following;
use godwit_protect::{Ask, Grant, Order, Pings, Primary, PrimaryState, Sign, Timing};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::checkpoints::Sending;
use super::guest::{self, Lease};
use super::messages::{Hear, PrimaryLink, Say};
use super::session::{self, Connected};
use super::witness::Change;
use super::{Here, Input, News, Orders, backup, decide};

/// Time between two attempts to reach the backup.
const CONNECT_AGAIN: Duration = Duration::from_secs(1);
/// Time between two requests to the witness.
const ASK_AGAIN: Duration = Duration::from_millis(500);

/// A backup that takes, or follows, the machine's disks.
pub(super) struct Session {
    number: u64,
    pub(super) control: PrimaryLink,
    beats: PrimaryLink,
    pub(super) pings: Pings,
    ping_at: Instant,
    /// The disks and their migrations, once all have begun.
    pub(super) started: Option<Vec<(String, String)>>,
    /// The last news of each migration.
    news: BTreeMap<String, News>,
    /// True once the backup has said that all disks follow.
    follows: bool,
}

pub(super) struct PrimaryActor {
    pub(super) here: Here,
    orders: Orders,
    pub(super) entry: ProtectionEntry,
    pub(super) primary: Primary,
    pub(super) session: Option<Session>,
    sessions: u64,
    connecting: bool,
    connect_at: Instant,
    /// True while a request to the witness is under way.
    asking: bool,
    ask_at: Instant,
    /// True if this process found the protection in the store.
    was_away: bool,
    /// True if an operator has ordered this node to go on.
    ordered: bool,
    /// True if the machine is to be started once this node goes on.
    start: bool,
    /// Those who wait for the end of the protection.
    leaving: Vec<oneshot::Sender<Result<(), ErrorBody>>>,
    /// The backup's connection during the end of the protection.
    farewell: Option<PrimaryLink>,
    lease: Lease,
    /// The session's checkpoints.
    pub(super) sending: Option<Sending>,
    /// The end of an earlier session, which may still hold packets back.
    pub(super) ending: Option<JoinHandle<()>>,
    /// End of the wait for a backup that is to take a dead machine.
    pub(super) leaves_until: Instant,
    /// True if the guest may stand still since the death of an earlier process of this node amid a checkpoint.
    pub(super) interrupted: bool,
    pub(super) problem: Option<String>,
}

impl PrimaryActor {
    /// Starts the primary of a new protection, or of a protection after a takeover.
    pub(super) fn new(
        here: Here,
        orders: Orders,
        entry: ProtectionEntry,
        primary: Primary,
    ) -> Self {
        let now = Instant::now();
        let lease = Lease::new(Arc::clone(&here.vms), here.vm.clone());
        Self {
            here,
            orders,
            entry,
            primary,
            session: None,
            sessions: 0,
            connecting: false,
            connect_at: now,
            asking: false,
            ask_at: now,
            was_away: false,
            ordered: false,
            start: false,
            leaving: Vec::new(),
            farewell: None,
            lease,
            sending: None,
            ending: None,
            leaves_until: now,
            interrupted: false,
            problem: None,
        }
    }

    /// Runs until the protection ends or the node closes. `orders` are carried out first.
    pub(super) async fn run(mut self, connected: Option<Connected>, orders: Vec<Order>) {
        if let Some(connected) = connected {
            self.connected(connected);
        }
        self.obey(orders).await;
        let mut tick = tokio::time::interval(Timing::of(self.timeout()).every / 2);
        let context = Arc::clone(&self.here.vms.context);
        loop {
            self.show();
            let input = tokio::select! {
                input = self.orders.recv() => match input {
                    Some(input) => input,
                    None => return,
                },
                heard = hear(&mut self.session) => {
                    self.heard(heard).await;
                    continue;
                }
                _ = tick.tick() => {
                    self.tick().await;
                    continue;
                }
                () = context.closed() => return,
            };
            if let Input::Offered(offered) = input {
                match self.becomes_backup(*offered).await {
                    true => return,
                    false => continue,
                }
            }
            if self.take(input).await {
                return;
            }
        }
    }

    /// Starts the primary that an earlier process stored.
    pub(super) async fn recover(mut self, orders: Vec<Order>) {
        self.was_away = true;
        // The host may have died, and the machine with it.
        self.start = true;
        self.interrupted = self.entry.checkpoints_per_second.is_some();
        self.run(None, orders).await;
    }

    const fn timeout(&self) -> Duration {
        Duration::from_millis(self.entry.timeout_ms)
    }

    fn disks(&self) -> Vec<Arc<Disk>> {
        self.here.disks()
    }

    /// Takes an input. Returns true if the protection has ended.
    async fn take(&mut self, input: Input) -> bool {
        match input {
            Input::Disk(disk, migration, news) => self.news(&disk, migration, news).await,
            Input::Decided(ask, answer) => self.decided(&ask, answer).await,
            Input::Witness(answer) if self.primary.state() == PrimaryState::Paired => {
                self.problem = answer.err();
            }
            Input::Connected(connected) => {
                self.connecting = false;
                match connected {
                    Ok(connected) if self.primary.state() == PrimaryState::Alone => {
                        self.connected(connected);
                    }
                    Ok(_) => {}
                    Err(error) => self.problem = Some(error.message),
                }
                self.connect_at = Instant::now() + CONNECT_AGAIN;
            }
            Input::Started(number, started) => self.started(number, started).await,
            Input::Unprotect { force, reply } => return self.unprotect(force, reply).await,
            Input::Failover(reply) => {
                let text = format!(
                    "VM {} runs here: its backup is node '{}'",
                    self.here.vm, self.entry.peer
                );
                let _ = reply.send(Err(ErrorBody::new(ErrorCode::Conflict, text).hint(
                    format!(
                        "give the command at node '{}', when this one is down",
                        self.entry.peer
                    ),
                )));
            }
            Input::Question(reply) | Input::Look(reply) => {
                let took = self.primary.state() != PrimaryState::Ended;
                let _ = reply.send((self.primary.record().known, took));
            }
            Input::CheckpointsEnded(number, why) => {
                let is_current = self.session.as_ref().is_some_and(|it| it.number == number);
                if is_current && !self.leave_dead_machine().await {
                    self.lost(why).await;
                }
            }
            Input::Offered(_)
            | Input::Beats(_)
            | Input::Witness(_)
            | Input::Given
            | Input::Checkpoints(_)
            | Input::Waiting(..)
            | Input::FirstCheckpoint(_) => {}
        }
        !self.leaving.is_empty() && self.primary.state() == PrimaryState::Alone && self.left().await
    }

    /// Uses new connections, and begins to synchronize the disks.
    fn connected(&mut self, connected: Connected) {
        self.problem = None;
        self.sessions += 1;
        let number = self.sessions;
        let timing = Timing::of(self.timeout());
        self.session = Some(Session {
            number,
            control: connected.control,
            beats: connected.beats,
            pings: Pings::new(timing, self.here.now()),
            ping_at: Instant::now(),
            started: None,
            news: BTreeMap::new(),
            follows: false,
        });
        let (vms, entry) = (Arc::clone(&self.here.vms), self.entry.clone());
        let (disks, inputs) = (self.here.disk_names(), self.here.inputs.clone());
        tokio::spawn(async move {
            let started = session::start_disks(&vms, &disks, &entry).await;
            let _ = inputs.send(Input::Started(number, started)).await;
        });
    }

    async fn started(&mut self, number: u64, started: Result<Vec<(String, String)>, ErrorBody>) {
        let current = self.session.as_mut().filter(|it| it.number == number);
        match (current, started) {
            (Some(session), Ok(started)) => {
                session.started = Some(started);
                self.look().await;
            }
            (Some(_), Err(error)) => self.lost(error.message).await,
            (None, Ok(started)) => session::cancel(&self.here.vms, started),
            (None, Err(_)) => {}
        }
    }

    async fn news(&mut self, disk: &str, migration: String, news: News) {
        if let Some(session) = &mut self.session {
            // News may overtake each other, and what is lost stays lost.
            let known = session.news.entry(migration).or_insert(news);
            if !matches!(known, News::Lost(_)) {
                *known = news;
            }
            self.look().await;
        } else if self.primary.state() == PrimaryState::Alone
            && let Some(disk) = self.here.vms.disks.find(disk)
        {
            // A migration that was cancelled late may have come to be followed, and holds the disk's answers.
            following::go_alone(&disk);
        }
    }

    /// Looks if all disks follow, or one does not.
    async fn look(&mut self) {
        let Some(Session {
            number,
            started: Some(started),
            news,
            follows,
            ..
        }) = &self.session
        else {
            return;
        };
        let (number, follows) = (*number, *follows);
        let mut all = true;
        for (disk, migration) in started {
            match news.get(migration) {
                Some(News::Followed) => {}
                Some(News::Lost(reason)) => {
                    let why = self.here.trouble_of(migration);
                    let why = why.unwrap_or_else(|| {
                        format!("disk {disk} is not followed any more: {reason}")
                    });
                    return self.lost(why).await;
                }
                Some(News::Follows) | None => all = false,
            }
        }
        if all {
            self.begin_checkpoints(number);
        }
        if all && follows && self.primary.state() == PrimaryState::Alone {
            failpoint::reach(String::from("protect::in-sync")).await;
            let orders = self.primary.in_sync();
            self.obey(orders).await;
        }
    }

    /// Takes a message of the backup; none if a connection has ended.
    async fn heard(&mut self, heard: Option<Hear>) {
        let Some(session) = &mut self.session else {
            return;
        };
        match heard {
            Some(Hear::Pong(number)) => session.pings.answered(number),
            Some(Hear::Following) => {
                session.follows = true;
                self.look().await;
            }
            Some(Hear::Behind(why)) => self.lost(why).await,
            Some(Hear::Beat | Hear::Ready | Hear::Refused(_) | Hear::Word { .. }) => {}
            // The backup hangs up to take the machine that is left to it: see `tick`.
            None if self.primary.leaves() => self.end_session(),
            None => {
                let why = format!("the connection to node '{}' was lost", self.entry.peer);
                self.lost(why).await;
            }
        }
    }

    async fn tick(&mut self) {
        let now = Instant::now();
        self.end_interrupted_checkpoint();
        if let Some(session) = &mut self.session {
            if now >= session.ping_at {
                let number = session.pings.send(self.here.now());
                session.control.try_say(Say::Ping(number));
                session.beats.try_say(Say::Ping(number));
                session.ping_at =
                    now + Timing::of(Duration::from_millis(self.entry.timeout_ms)).every;
            }
            let sign = session.pings.sign(self.here.now());
            // Nothing depends on a backup that may not take the machine. With checkpoints nobody sees what the guest does
            // before the backup has acknowledged it.
            let leased = self.primary.state() != PrimaryState::Alone
                && self.entry.checkpoints_per_second.is_none();
            self.stand_still(leased && sign != Sign::Alive);
            if sign == Sign::Lost {
                let why = format!("node '{}' is silent", self.entry.peer);
                self.lost(why).await;
            }
        }
        if self.primary.leaves() && now >= self.leaves_until {
            let why = format!("node '{}' does not take the VM", self.entry.peer);
            self.lost(why).await;
        }
        match self.primary.state() {
            PrimaryState::Alone => {
                self.start_if_due();
                if self.session.is_none() && !self.connecting && now >= self.connect_at {
                    self.connect();
                }
            }
            PrimaryState::Ended => self.end().await,
            PrimaryState::Pairing | PrimaryState::Paired | PrimaryState::Severed => {}
        }
        if !self.asking && now >= self.ask_at {
            let orders = self.primary.retry();
            self.obey(orders).await;
        }
    }

    fn stand_still(&self, still: bool) {
        if self.lease.stand_still(still) {
            tracing::info!(vm = self.here.vm, still, "the guest's lease");
        }
    }

    fn start_if_due(&mut self) {
        let Some(vm) = self.here.machine().filter(|_| self.start) else {
            return;
        };
        if guest::needs_no_start(&vm) || guest::start_again(&self.here.vms, &vm) {
            self.start = false;
        }
    }

    fn connect(&mut self) {
        let Some(vm) = self.here.machine() else {
            return;
        };
        self.connecting = true;
        let machine = vm.lock().entry.clone();
        let (vms, entry) = (Arc::clone(&self.here.vms), self.entry.clone());
        let inputs = self.here.inputs.clone();
        tokio::spawn(async move {
            let connected = session::connect(&vms, &vm.name, &machine, &entry).await;
            let _ = inputs.send(Input::Connected(connected)).await;
        });
    }

    /// The backup is lost, or its copy is of no use.
    async fn lost(&mut self, why: String) {
        tracing::warn!(
            vm = self.here.vm,
            peer = self.entry.peer,
            why,
            "the backup is lost"
        );
        self.problem = Some(why);
        let orders = self.primary.backup_lost();
        self.end_session();
        self.obey(orders).await;
    }

    /// Hangs up. A machine that depends on no backup goes on.
    fn end_session(&mut self) {
        let Some(session) = self.session.take() else {
            return;
        };
        self.connect_at = Instant::now() + CONNECT_AGAIN;
        self.end_checkpoints();
        if self.primary.state() == PrimaryState::Alone {
            self.stop_holding_packets();
            session::cancel(&self.here.vms, session.started.unwrap_or_default());
            self.disks()
                .iter()
                .for_each(|disk| following::go_alone(disk));
            self.stand_still(false);
        }
        if !self.leaving.is_empty() {
            self.farewell = Some(session.control);
        }
    }

    /// Carries out orders, after the record of what led to them is durable.
    pub(super) async fn obey(&mut self, orders: Vec<Order>) {
        let record = self.primary.record();
        if self.entry.primary() != Some(&record) {
            self.entry.part = ProtectionPart::Primary(record);
            if !self.here.store(&self.entry).await {
                return;
            }
        }
        for order in orders {
            match order {
                Order::Ask(ask) => self.ask(ask),
                Order::Hold => {
                    self.disks().iter().for_each(|disk| following::hold(disk));
                    self.stand_still(self.entry.checkpoints_per_second.is_none());
                }
                Order::GoAlone => self.go_alone(),
                Order::Protected => {
                    tracing::info!(
                        vm = self.here.vm,
                        by = self.entry.peer,
                        "the VM is protected"
                    );
                    self.problem = None;
                    let told =
                        |session: &Session| session.control.try_say(Say::Paired(record.known));
                    if !self.session.as_ref().is_some_and(told) {
                        // Without the word a backup without a witness takes nothing.
                        tracing::warn!(vm = self.here.vm, "the backup does not keep up");
                    }
                }
                Order::End => {
                    self.start = true;
                    self.end().await;
                }
                Order::Sever | Order::Take(_) => {}
            }
        }
    }

    fn ask(&mut self, ask: Ask) {
        if self.asking {
            return;
        }
        self.asking = true;
        let request = decide::Request {
            vm: self.here.vm.clone(),
            entry: self.entry.clone(),
            ask,
            told: Grant::FIRST,
            ordered: self.ordered,
            was_away: self.was_away,
            leaves: self.primary.leaves(),
        };
        self.here.decide(request);
    }

    async fn decided(&mut self, ask: &Ask, answer: Result<Grant, String>) {
        self.asking = false;
        self.ask_at = Instant::now() + ASK_AGAIN;
        match answer {
            Ok(grant) => {
                let orders = self.primary.answered(ask, grant);
                self.obey(orders).await;
            }
            Err(why) => self.problem = Some(why),
        }
    }

    fn go_alone(&mut self) {
        tracing::warn!(vm = self.here.vm, "the VM goes on without a backup");
        self.stop_holding_packets();
        (self.was_away, self.ordered) = (false, false);
        self.disks()
            .iter()
            .for_each(|disk| following::go_alone(disk));
        self.stand_still(false);
        self.start_if_due();
        self.connect_at = Instant::now() + CONNECT_AGAIN;
    }

    /// Ends the machine here.
    async fn end(&mut self) {
        self.end_session();
        self.disks().iter().for_each(|disk| following::hold(disk));
        if let Some(vm) = self.here.machine() {
            guest::end(&vm, &self.entry.peer).await;
        }
    }

    /// Hands the protection to a backup's part, if the other node has the machine and this node knows. Returns true if so.
    async fn becomes_backup(&mut self, offered: backup::Offered) -> bool {
        if self.primary.state() != PrimaryState::Ended {
            let text = format!(
                "node '{}' has VM {} itself, and the last word on it is not heard yet",
                self.here.vms.context.config.name, self.here.vm
            );
            offered.link.say(Hear::Refused(vec![text])).await;
            return false;
        }
        self.end().await;
        backup::instead(&self.here, self.entry.clone(), offered).await
    }

    /// Begins to end the protection. Returns true if it has ended.
    async fn unprotect(
        &mut self,
        force: bool,
        reply: oneshot::Sender<Result<(), ErrorBody>>,
    ) -> bool {
        if self.primary.state() == PrimaryState::Ended {
            let text = format!("VM {} is at node '{}' now", self.here.vm, self.entry.peer);
            let error = ErrorBody::new(ErrorCode::Conflict, text)
                .hint(format!("end its protection at node '{}'", self.entry.peer));
            let _ = reply.send(Err(error));
            return false;
        }
        self.leaving.push(reply);
        self.ordered |= force;
        self.ask_at = Instant::now();
        let orders = self.primary.backup_lost();
        self.end_session();
        self.obey(orders).await;
        self.primary.state() == PrimaryState::Alone && self.left().await
    }

    /// Forgets the protection. Returns true if that is durable.
    async fn left(&mut self) -> bool {
        let removed = self.here.forget().await;
        if let Ok(Some((witness, of))) = decide::witness(&self.here.vms, &self.entry) {
            let change = Change::end(self.primary.record().known);
            if let Err(error) = witness.swap(&of, change).await {
                tracing::warn!(vm = self.here.vm, %error, "the witness keeps a grant that nobody needs");
            }
        }
        if let Some(link) = self.farewell.take() {
            link.say(Say::Ended).await;
        }
        for reply in self.leaving.drain(..) {
            let _ = reply.send(removed.clone());
        }
        removed.is_ok()
    }
}

/// Returns the next message of the session; `None` if a connection has ended. Waits for ever without a session.
async fn hear(session: &mut Option<Session>) -> Option<Hear> {
    let Some(session) = session else {
        return std::future::pending().await;
    };
    tokio::select! {
        heard = session.control.hear() => heard,
        heard = session.beats.hear() => heard,
    }
}
