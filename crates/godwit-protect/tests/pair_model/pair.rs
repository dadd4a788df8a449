//! Two nodes, a disk, a link, the witness, and all possible events.

use godwit_core::authority::{Authority, AuthorityRecord, Effect, Ownership};
use godwit_core::units::{Epoch, MigrationId};
use godwit_protect::{
    Ask, Backup, BackupState, Grant, Member, Order, Primary, PrimaryRecord, PrimaryState,
};
use stateright::{Model, Property};

/// A defect of both nodes, or of the witness.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Planted {
    Nothing,
    /// A primary without a backup goes on before the witness answers.
    GoesOn,
    /// A backup without a primary takes over before the witness answers.
    TakesUnasked,
    /// A backup counts as in sync from the start.
    TakesUnsynced,
    /// A primary acknowledges before the backup has the write.
    AcknowledgesEarly,
    /// The witness can be put back to its first grant.
    StaleWitness,
    /// A primary asks to pair before it has stored that it does.
    PairingNotStored,
    /// A backup that has restarted does not give a grant back.
    KeepsGrant,
}

pub(crate) struct Pair {
    pub(crate) writes: u8,
    pub(crate) crashes: u8,
    /// Number of times that the link ends while both nodes live.
    pub(crate) cuts: u8,
    pub(crate) planted: Planted,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Role {
    Primary(Primary),
    Backup(Backup),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Node {
    role: Role,
    /// The durable record of a primary; a backup has none.
    stored: Option<PrimaryRecord>,
    authority: Authority,
    durable: AuthorityRecord,
    storing: Option<AuthorityRecord>,
    flushing: bool,
    /// Writes on this node's disk, a bit each.
    disk: u8,
    /// Primary: true while no write is acknowledged before the backup has the write.
    strict: bool,
    /// Primary: true if the node has ended the machine.
    ended: bool,
    /// The answer to the last request to the witness.
    answer: Option<(Ask, Grant)>,
}

/// State of the link between both nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Link {
    Down,
    /// The backup has every write so far, and receives all others.
    InSync,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct State {
    nodes: [Node; 2],
    link: Link,
    witness: Grant,
    /// Requests to the witness, which may arrive at any time and any number of times.
    asks: Vec<(usize, Ask)>,
    written: u8,
    /// Writes acknowledged to clients, a bit each.
    acknowledged: u8,
    crashes: u8,
    cuts: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Step {
    Write(usize),
    /// The backup receives the primary's writes.
    Receive(usize),
    Acknowledge(usize),
    /// The backup's disk is made equal, and stays so.
    Sync(usize),
    /// The primary hears that the backup is in sync.
    HearInSync(usize),
    /// The link ends; each node notices later.
    Cut,
    /// A node notices that the link is down.
    Notice(usize),
    /// A node takes a link that is up for one that is down.
    Suspect(usize),
    /// The machine dies at the primary, whose node lives.
    MachineDies(usize),
    Retry(usize),
    AskArrives(usize),
    AnswerArrives(usize),
    Flushed(usize),
    Stored(usize),
    /// A primary that has ended hears from the other node that it serves.
    Meet(usize),
    Crash(usize),
    PutBack,
}

const MEMBERS: [Member; 2] = [Member::First, Member::Second];
const MIGRATION: MigrationId = MigrationId([1; 16]);

impl Node {
    fn acknowledges(&self) -> bool {
        let Role::Primary(primary) = &self.role else {
            return false;
        };
        let runs = match primary.state() {
            PrimaryState::Alone => !self.strict,
            PrimaryState::Pairing | PrimaryState::Paired => false,
            PrimaryState::Severed | PrimaryState::Ended => false,
        };
        runs && self.authority.may_serve()
    }

    /// Returns true if this node may acknowledge together with its backup.
    fn acknowledges_with(&self) -> bool {
        let Role::Primary(primary) = &self.role else {
            return false;
        };
        let runs = match primary.state() {
            PrimaryState::Alone => self.strict,
            PrimaryState::Pairing | PrimaryState::Paired => true,
            PrimaryState::Severed | PrimaryState::Ended => false,
        };
        runs && self.authority.may_serve()
    }
}

impl State {
    fn carry_out(&mut self, node: usize, orders: Vec<Order>, planted: Planted) {
        let skips = planted == Planted::PairingNotStored;
        if let Role::Primary(primary) = &self.nodes[node].role
            && !(skips && primary.state() == PrimaryState::Pairing)
        {
            self.nodes[node].stored = Some(primary.record());
        }
        for order in orders {
            match order {
                Order::Ask(ask) => {
                    self.nodes[node].answer = None;
                    // A request that can change nothing is answered by the present grant.
                    if self.witness.term > ask.expected.term {
                        self.nodes[node].answer = Some((ask, self.witness));
                    } else if !self.asks.contains(&(node, ask)) {
                        self.asks.push((node, ask));
                        let key = |(node, ask): &(usize, Ask)| {
                            let Grant {
                                term,
                                owner,
                                paired,
                            } = ask.wanted;
                            (*node, term, owner as u8, paired, ask.expected.term)
                        };
                        self.asks.sort_by_key(key);
                    }
                }
                Order::GoAlone => {
                    self.nodes[node].strict = false;
                    self.nodes[node].ended = false;
                }
                Order::End => self.nodes[node].ended = true,
                Order::Take(_) => {
                    let epoch = self.nodes[1 - node].durable.epoch.next();
                    let effects = self.nodes[node].authority.take(MIGRATION, epoch);
                    self.apply(node, effects);
                }
                Order::Hold | Order::Protected | Order::Sever => {}
            }
        }
        if planted == Planted::GoesOn
            && let Role::Primary(primary) = &self.nodes[node].role
            && primary.state() == PrimaryState::Severed
        {
            let known = primary.record().known;
            self.nodes[node].role = Role::Primary(Primary::new(MEMBERS[node], known));
            self.nodes[node].strict = false;
        }
    }

    fn apply(&mut self, node: usize, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Flush => self.nodes[node].flushing = true,
                Effect::Persist(record) => self.nodes[node].storing = Some(record),
                _ => {}
            }
        }
    }

    fn backup_of(&self, primary: usize) -> Option<&Backup> {
        match &self.nodes[1 - primary].role {
            Role::Backup(backup) => Some(backup),
            Role::Primary(_) => None,
        }
    }

    fn take(&mut self, step: Step, planted: Planted) {
        match step {
            Step::Write(node) => {
                self.nodes[node].disk |= 1 << self.written;
                self.written += 1;
                if self.nodes[node].acknowledges() {
                    self.acknowledged |= self.nodes[node].disk;
                }
            }
            Step::Receive(node) => self.nodes[1 - node].disk = self.nodes[node].disk,
            Step::Acknowledge(node) => self.acknowledged |= self.nodes[node].disk,
            Step::Sync(node) => self.sync(node),
            Step::HearInSync(node) => {
                let Role::Primary(primary) = &mut self.nodes[node].role else {
                    return;
                };
                let orders = primary.in_sync();
                self.carry_out(node, orders, planted);
            }
            Step::Cut => {
                self.cuts += 1;
                self.link = Link::Down;
            }
            Step::Notice(node) => self.notice(node, planted),
            Step::Suspect(node) => {
                self.cuts += 1;
                self.notice(node, planted);
            }
            Step::MachineDies(node) => {
                let Role::Primary(primary) = &mut self.nodes[node].role else {
                    return;
                };
                self.cuts += 1;
                let orders = primary.machine_died();
                self.carry_out(node, orders, planted);
            }
            Step::Retry(node) => {
                let orders = match &mut self.nodes[node].role {
                    Role::Primary(primary) => primary.retry(),
                    Role::Backup(backup) => backup.retry(),
                };
                self.carry_out(node, orders, planted);
            }
            Step::AskArrives(at) => {
                let (node, ask) = self.asks[at];
                self.witness = self.witness.after(&ask);
                self.nodes[node].answer = Some((ask, self.witness));
                let term = self.witness.term;
                self.asks.retain(|(_, ask)| ask.expected.term >= term);
            }
            Step::AnswerArrives(node) => self.answered(node, planted),
            Step::Flushed(node) => {
                self.nodes[node].flushing = false;
                let effects = self.nodes[node].authority.flushed();
                self.apply(node, effects);
            }
            Step::Stored(node) => self.stored(node),
            Step::Meet(node) => self.meet(node, planted),
            Step::Crash(node) => self.crash(node, planted),
            Step::PutBack => {
                self.crashes += 1;
                self.witness = Grant {
                    paired: true,
                    ..Grant::FIRST
                };
            }
        }
    }

    /// Makes the backup's disk equal, and keeps it equal.
    fn sync(&mut self, node: usize) {
        let disk = self.nodes[node].disk;
        let backup = &mut self.nodes[1 - node];
        if let Role::Backup(backup) = &mut backup.role {
            backup.resync();
            backup.in_sync();
        }
        if backup.authority.receiving().is_none() {
            backup.authority.receive(MIGRATION);
        }
        backup.disk = disk;
        self.nodes[node].strict = true;
        self.link = Link::InSync;
    }

    /// A primary that has ended hears that the other node serves, and becomes the backup.
    fn meet(&mut self, node: usize, planted: Planted) {
        let epoch = self.nodes[1 - node].durable.epoch;
        let it = &mut self.nodes[node];
        it.authority.yield_to(epoch);
        it.authority.persisted();
        it.durable = it.authority.record();
        it.stored = None;
        self.becomes_backup(node, planted);
    }

    /// A node notices that the link is down.
    fn notice(&mut self, node: usize, planted: Planted) {
        let orders = match &mut self.nodes[node].role {
            Role::Primary(primary) => {
                let orders = primary.backup_lost();
                // Before the pairing nothing depends on the backup.
                if primary.state() == PrimaryState::Alone {
                    self.nodes[node].strict = false;
                }
                orders
            }
            Role::Backup(backup) => {
                if planted == Planted::TakesUnsynced {
                    backup.in_sync();
                    self.nodes[node].authority.receive(MIGRATION);
                }
                backup.primary_lost()
            }
        };
        let unasked = planted == Planted::TakesUnasked
            && orders.iter().any(|order| matches!(order, Order::Sever));
        self.carry_out(node, orders, planted);
        if unasked {
            self.carry_out(node, vec![Order::Take(self.witness.term)], planted);
        }
    }

    fn answered(&mut self, node: usize, planted: Planted) {
        let Some((ask, grant)) = self.nodes[node].answer.take() else {
            return;
        };
        let orders = match &mut self.nodes[node].role {
            Role::Primary(primary) => primary.answered(&ask, grant),
            Role::Backup(backup) => backup.answered(&ask, grant),
        };
        self.carry_out(node, orders, planted);
    }

    fn stored(&mut self, node: usize) {
        let Some(record) = self.nodes[node].storing.take() else {
            return;
        };
        self.nodes[node].durable = record;
        let effects = self.nodes[node].authority.persisted();
        let owns = effects.contains(&Effect::Owner(MIGRATION));
        self.apply(node, effects);
        if owns {
            let Role::Backup(backup) = &self.nodes[node].role else {
                return;
            };
            // One durable step stores the disks' owner and the protection's primary.
            let primary = Primary::new(MEMBERS[node], backup.known());
            self.nodes[node].stored = Some(primary.record());
            self.nodes[node].role = Role::Primary(primary);
            self.nodes[node].strict = false;
            self.nodes[node].ended = false;
        }
    }

    fn becomes_backup(&mut self, node: usize, planted: Planted) {
        let (mut backup, mut orders) = Backup::new(MEMBERS[node], Grant::FIRST);
        if planted == Planted::KeepsGrant {
            backup.resync();
            orders.clear();
        }
        self.nodes[node].role = Role::Backup(backup);
        self.nodes[node].strict = false;
        self.carry_out(node, orders, planted);
    }

    fn crash(&mut self, node: usize, planted: Planted) {
        self.crashes += 1;
        self.link = Link::Down;
        let it = &mut self.nodes[node];
        it.authority = Authority::new(it.durable);
        (it.storing, it.flushing, it.answer) = (None, false, None);
        // Requests on their way may still arrive. Their answers reach nobody.
        match it.stored {
            Some(record) => {
                let (primary, orders) = Primary::restarted(record);
                it.role = Role::Primary(primary);
                it.strict = !record.alone;
                self.carry_out(node, orders, planted);
            }
            None => {
                // Acknowledged writes that were not durable are lost.
                it.disk = 0;
                self.becomes_backup(node, planted);
            }
        }
    }

    /// Returns true if this primary's backup receives and acknowledges writes.
    fn is_followed(&self, primary: usize) -> bool {
        let backup = self.backup_of(primary);
        backup.is_some_and(|backup| backup.state() == BackupState::Following)
    }

    /// Returns true if one node runs the machine in the end, once both nodes are up, talk, and reach the witness.
    fn resolves(&self) -> bool {
        let mut state = self.clone();
        state.link = Link::Down;
        for _ in 0..12 {
            for node in 0..2 {
                state.take(Step::Notice(node), Planted::Nothing);
                state.take(Step::Retry(node), Planted::Nothing);
                for at in (0..state.asks.len()).rev() {
                    if at < state.asks.len() {
                        state.take(Step::AskArrives(at), Planted::Nothing);
                    }
                }
                state.take(Step::AnswerArrives(node), Planted::Nothing);
                state.take(Step::Flushed(node), Planted::Nothing);
                state.take(Step::Stored(node), Planted::Nothing);
            }
        }
        let runs = |node: &&Node| node.acknowledges() && !node.ended;
        state.nodes.iter().filter(runs).count() == 1
    }
}

impl Model for Pair {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        let primary = Primary::new(Member::First, Grant::FIRST);
        let node = |role, stored, record| Node {
            role,
            stored,
            authority: Authority::new(record),
            durable: record,
            storing: None,
            flushing: false,
            disk: 0,
            strict: false,
            ended: false,
            answer: None,
        };
        let stored = Some(primary.record());
        let first = node(Role::Primary(primary), stored, AuthorityRecord::created());
        let (backup, _) = Backup::new(Member::Second, Grant::FIRST);
        let second = node(Role::Backup(backup), None, AuthorityRecord::vacant());
        vec![State {
            nodes: [first, second],
            link: Link::Down,
            witness: Grant::FIRST,
            asks: Vec::new(),
            written: 0,
            acknowledged: 0,
            crashes: 0,
            cuts: 0,
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        for (node, it) in state.nodes.iter().enumerate() {
            let serves = it.acknowledges() || it.acknowledges_with();
            if serves && !it.ended && state.written < self.writes {
                steps.push(Step::Write(node));
            }
            let backup = state.backup_of(node);
            let follows = state.is_followed(node);
            if it.acknowledges_with() && state.link == Link::InSync && follows {
                steps.push(Step::Receive(node));
            }
            let has = state.nodes[1 - node].disk & it.disk == it.disk && follows;
            if it.acknowledges_with() && (has || self.planted == Planted::AcknowledgesEarly) {
                steps.push(Step::Acknowledge(node));
            }
            let may_sync = backup.is_some_and(|backup| backup.state() != BackupState::Took)
                && state.nodes[1 - node].storing.is_none();
            if it.acknowledges() && state.link == Link::Down && may_sync {
                steps.push(Step::Sync(node));
            }
            if it.strict && state.link == Link::InSync {
                steps.push(Step::HearInSync(node));
            }
            match state.link {
                Link::Down => steps.push(Step::Notice(node)),
                Link::InSync if state.cuts < self.cuts => steps.push(Step::Suspect(node)),
                Link::InSync => {}
            }
            if let Role::Primary(primary) = &it.role {
                if primary.state() == PrimaryState::Paired && state.cuts < self.cuts {
                    steps.push(Step::MachineDies(node));
                }
                if primary.leaves() {
                    // The backup is told, and the primary may give the backup up.
                    steps.extend([Step::Notice(node), Step::Notice(1 - node)]);
                }
            }
            steps.push(Step::Retry(node));
            if it.answer.is_some() {
                steps.push(Step::AnswerArrives(node));
            }
            if it.flushing {
                steps.push(Step::Flushed(node));
            }
            if it.storing.is_some() {
                steps.push(Step::Stored(node));
            }
            let other = &state.nodes[1 - node].durable;
            if it.ended && other.ownership == Ownership::Serving && other.epoch > it.durable.epoch {
                steps.push(Step::Meet(node));
            }
            if state.crashes < self.crashes {
                steps.push(Step::Crash(node));
            }
        }
        if state.link == Link::InSync && state.cuts < self.cuts {
            steps.push(Step::Cut);
        }
        steps.extend((0..state.asks.len()).map(Step::AskArrives));
        if self.planted == Planted::StaleWitness && state.crashes < self.crashes {
            steps.push(Step::PutBack);
        }
    }

    fn next_state(&self, state: &State, step: Step) -> Option<State> {
        let mut next = state.clone();
        next.take(step, self.planted);
        (next != *state).then_some(next)
    }

    fn within_boundary(&self, state: &State) -> bool {
        state.witness.term.0 <= 6
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("at most one node acknowledges", |_, state: &State| {
                let with = |at: &usize| {
                    let follows = state.is_followed(*at);
                    state.nodes[*at].acknowledges_with() && follows
                };
                let alone = |node: &&Node| node.acknowledges() && !node.ended;
                let alone = state.nodes.iter().filter(alone).count();
                alone + (0..2).filter(with).count() <= 1
            }),
            Property::always(
                "an owner has every acknowledged write",
                |_, state: &State| {
                    let mut owners = state.nodes.iter().filter(|node| node.acknowledges());
                    owners.all(|node| state.acknowledged & !node.disk == 0)
                },
            ),
            Property::always("an epoch is served by one node", |_, state: &State| {
                let epoch = |node: &Node| {
                    let serves = node.durable.ownership == Ownership::Serving;
                    serves.then_some(node.durable.epoch)
                };
                let [first, second] = [epoch(&state.nodes[0]), epoch(&state.nodes[1])];
                first.is_none() || first != second || first == Some(Epoch(0))
            }),
            Property::always("the machine runs again in the end", |_, state: &State| {
                state.resolves()
            }),
            Property::sometimes("the machine is protected", |_, state: &State| {
                state.nodes.iter().any(|node| {
                    matches!(&node.role, Role::Primary(primary)
                        if primary.state() == PrimaryState::Paired)
                })
            }),
            Property::sometimes("the backup takes over", |_, state: &State| {
                state.nodes[1].acknowledges()
            }),
            Property::sometimes(
                "the machine is protected the other way",
                |_, state: &State| {
                    matches!(&state.nodes[1].role, Role::Primary(primary)
                    if primary.state() == PrimaryState::Paired)
                },
            ),
            Property::sometimes("the primary goes on alone", |_, state: &State| {
                state.nodes[0].acknowledges() && state.witness.term.0 > 2
            }),
            Property::sometimes("a grant is given back", |_, state: &State| {
                state.witness.owner == Member::First && state.nodes[0].ended
            }),
        ]
    }
}
