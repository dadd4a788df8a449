//! Two nodes, their connections, the witness, and all possible events.

use godwit_protect::checkpoints::{Checkpoint, Step as Next};
use godwit_protect::{Ask, Backup, BackupState, Grant, Member, Order, Primary, PrimaryState};
use stateright::{Model, Property};

use crate::node::{DiskFrame, NOW, Node, Role, Session, Standby, WRITES, Works};
use crate::{NOTHING_MISSES, OF_ONE_CHECKPOINT, ONE_RELEASES, RUNS_AGAIN};

/// A defect of both nodes, or of the witness.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Planted {
    Nothing,
    /// The packets of an epoch leave once its checkpoint is captured.
    ReleasesEarly,
    /// Packets leave at once until the witness has paired the nodes.
    HoldsLate,
    /// A capture does not wait for the answers to the guest's requests.
    CapturesOpen,
    /// A process that has started again beside its machine lets the packets leave.
    RestartReleases,
    /// Both nodes count as in sync once the disk is followed.
    PairsEarly,
    /// A backup goes on from the newest memory, whether or not the disk's part is here.
    MemoryAhead,
    /// A backup writes to its disk at once.
    DiskAhead,
    /// A backup drops the kept writes of later epochs together with those of a whole checkpoint.
    DropsEarly,
    /// A primary lets its machine run after the end.
    IgnoresEnd,
    /// A primary without a backup goes on before the witness answers.
    GoesOn,
    /// The witness can be put back to its first grant.
    StaleWitness,
}

#[derive(Clone, Copy)]
pub(crate) struct Pair {
    pub(crate) works: u8,
    pub(crate) captures: u8,
    pub(crate) crashes: u8,
    /// Number of times that the link ends while both nodes live.
    pub(crate) cuts: u8,
    pub(crate) planted: Planted,
}

/// The connections of a session. After their end, parts on their way may still arrive.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Link {
    up: bool,
    memory: Vec<(Checkpoint, Works)>,
    disk: Vec<DiskFrame>,
    acknowledged: Option<Checkpoint>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct State {
    nodes: [Node; 2],
    link: Link,
    witness: Grant,
    /// Requests to the witness, which may arrive at any time and any number of times.
    asks: Vec<(usize, Ask)>,
    worked: u8,
    captured: u8,
    /// The works that clients have seen a packet of.
    seen: Works,
    /// The works that an owner's power loss undid, as any power loss does.
    undone: Works,
    crashes: u8,
    cuts: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Step {
    /// The guest computes or writes, and sends a packet afterwards.
    Work(usize),
    AnswerWrite(usize),
    /// The backup's disk is made equal, and followed from now on.
    Sync(usize),
    /// The guest is stopped, and goes on.
    Capture(usize),
    MemoryComes(usize),
    DiskComes(usize),
    AcknowledgementComes(usize),
    Cut,
    /// A node notices that the link is down.
    Notice(usize),
    /// A node takes a link that is up for one that is down.
    Suspect(usize),
    Retry(usize),
    AskArrives(usize),
    AnswerArrives(usize),
    /// A backup durably owns the machine, and runs it.
    Taken(usize),
    /// A primary that has ended hears from the other node that it runs the machine.
    Meet(usize),
    /// A host dies, and its machine with it.
    Crash(usize),
    /// A node's process dies, and starts again beside its machine.
    Restart(usize),
    PutBack,
}

const MEMBERS: [Member; 2] = [Member::First, Member::Second];

impl State {
    fn carry_out(&mut self, node: usize, orders: Vec<Order>, planted: Planted) {
        if let Role::Primary(primary) = &self.nodes[node].role {
            self.nodes[node].stored = Some(primary.record());
        }
        for order in orders {
            match order {
                Order::Ask(ask) => self.ask(node, ask),
                Order::GoAlone => self.go_alone(node, planted),
                Order::End if planted == Planted::IgnoresEnd => self.go_alone(node, planted),
                Order::End => self.nodes[node].end(),
                Order::Sever => {
                    if let Some(standby) = &mut self.nodes[node].standby {
                        standby.severed = true;
                    }
                }
                Order::Take(_) => self.nodes[node].taking = true,
                Order::Hold if planted == Planted::GoesOn => self.go_alone(node, planted),
                Order::Hold | Order::Protected => {}
            }
        }
    }

    fn ask(&mut self, node: usize, ask: Ask) {
        self.nodes[node].answer = None;
        // A request that can change nothing is answered by the present grant.
        if self.witness.term > ask.expected.term {
            self.nodes[node].answer = Some((ask, self.witness));
        } else if !self.asks.contains(&(node, ask)) {
            self.asks.push((node, ask));
            let key = |(node, ask): &(usize, Ask)| {
                let wanted = ask.wanted;
                let owner = wanted.owner as u8;
                (*node, wanted.term, owner, wanted.paired, ask.expected.term)
            };
            self.asks.sort_by_key(key);
        }
    }

    /// Goes on without the backup. A machine that has died starts again from its disk.
    fn go_alone(&mut self, node: usize, planted: Planted) {
        self.seen |= self.nodes[node].go_alone(planted);
        let it = &mut self.nodes[node];
        if it.memory.is_none() {
            it.memory = Some(it.disk);
            self.undone = ((1 << self.worked) - 1) & !WRITES;
        }
    }

    fn take(&mut self, step: Step, planted: Planted) {
        match step {
            Step::Work(node) => self.work(node, planted),
            Step::AnswerWrite(node) => self.seen |= self.nodes[node].answer_write(planted),
            Step::Sync(node) => self.sync(node, planted),
            Step::Capture(node) => self.capture(node, planted),
            Step::MemoryComes(node) => {
                let part = self.link.memory.remove(0);
                let whole = self.nodes[1 - node].memory_came(part, planted);
                self.whole(1 - node, whole);
            }
            Step::DiskComes(node) => {
                let frame = self.link.disk.remove(0);
                let whole = self.nodes[1 - node].disk_came(frame, planted);
                self.whole(1 - node, whole);
            }
            Step::AcknowledgementComes(node) => self.acknowledged(node, planted),
            Step::Cut => {
                self.cuts += 1;
                self.link.up = false;
            }
            Step::Notice(node) => self.notice(node, planted),
            Step::Suspect(node) => {
                self.cuts += 1;
                self.notice(node, planted);
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
            Step::Taken(node) => self.nodes[node].takes_over(MEMBERS[node]),
            Step::Meet(node) => {
                self.nodes[node].stored = None;
                self.becomes_backup(node, planted);
            }
            Step::Crash(node) => {
                self.nodes[node].end();
                self.restart(node, planted);
            }
            Step::Restart(node) => self.restart(node, planted),
            Step::PutBack => {
                self.crashes += 1;
                self.witness = Grant {
                    paired: true,
                    ..Grant::FIRST
                };
            }
        }
    }

    fn work(&mut self, node: usize, planted: Planted) {
        let work = 1 << self.worked;
        self.worked += 1;
        let it = &mut self.nodes[node];
        it.open = work;
        let writes = work & WRITES != 0;
        if writes {
            it.disk |= work;
            if it.session.is_some() && self.link.up {
                self.link.disk.push(DiskFrame::Write(work));
            }
        }
        if it.session.is_none() || !writes {
            self.seen |= it.answer_write(planted);
        }
    }

    fn sync(&mut self, node: usize, planted: Planted) {
        let disk = self.nodes[node].disk;
        let backup = &mut self.nodes[1 - node];
        if let Role::Backup(backup) = &mut backup.role {
            backup.resync();
        }
        backup.disk = disk;
        backup.standby = Some(Standby::new());
        self.nodes[node].session = Some(Session::new());
        self.link = Link {
            up: true,
            ..Link::default()
        };
        if planted == Planted::PairsEarly {
            self.whole(1 - node, Some(Checkpoint(0)));
            self.link.acknowledged = None;
            self.in_sync(node, planted);
        }
    }

    fn in_sync(&mut self, node: usize, planted: Planted) {
        let Role::Primary(primary) = &mut self.nodes[node].role else {
            return;
        };
        let orders = primary.in_sync();
        self.carry_out(node, orders, planted);
    }

    fn capture(&mut self, node: usize, planted: Planted) {
        let it = &mut self.nodes[node];
        let (Some(session), Some(memory)) = (&mut it.session, it.memory) else {
            return;
        };
        self.captured += 1;
        session.last = session.checkpoints.captured(NOW);
        if planted == Planted::ReleasesEarly {
            self.seen |= session.release(session.last);
        }
        if self.link.up {
            self.link.memory.push((session.last, memory));
            self.link.disk.push(DiskFrame::Mark(session.last));
        }
    }

    /// Acknowledges a checkpoint that became whole.
    fn whole(&mut self, node: usize, whole: Option<Checkpoint>) {
        if let (Some(number), Role::Backup(backup)) = (whole, &mut self.nodes[node].role) {
            backup.in_sync();
            if self.link.up {
                self.link.acknowledged = Some(number);
            }
        }
    }

    fn acknowledged(&mut self, node: usize, planted: Planted) {
        let number = self.link.acknowledged.take();
        let (Some(session), Some(number)) = (&mut self.nodes[node].session, number) else {
            return;
        };
        if let Some(acknowledged) = session.checkpoints.acknowledged(number, NOW) {
            self.seen |= session.release(acknowledged.release);
            self.in_sync(node, planted);
        }
    }

    fn notice(&mut self, node: usize, planted: Planted) {
        match &mut self.nodes[node].role {
            Role::Primary(primary) => {
                let orders = primary.backup_lost();
                let alone = primary.state() == PrimaryState::Alone;
                // Before the pairing nothing depends on the backup.
                if alone && self.nodes[node].session.is_some() {
                    self.link.up = false;
                    self.go_alone(node, planted);
                }
                self.carry_out(node, orders, planted);
            }
            Role::Backup(backup) => {
                let orders = backup.primary_lost();
                if backup.state() == BackupState::Syncing {
                    self.nodes[node].standby = None;
                }
                self.carry_out(node, orders, planted);
            }
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

    fn becomes_backup(&mut self, node: usize, planted: Planted) {
        let (backup, orders) = Backup::new(MEMBERS[node], Grant::FIRST);
        self.nodes[node].role = Role::Backup(backup);
        self.carry_out(node, orders, planted);
    }

    fn restart(&mut self, node: usize, planted: Planted) {
        self.crashes += 1;
        self.link.up = false;
        let it = &mut self.nodes[node];
        // Requests on their way may still arrive. Their answers reach nobody.
        (it.standby, it.taking, it.answer) = (None, false, None);
        // Packets that were held are lost with the process.
        let holds = planted != Planted::RestartReleases;
        it.session = it.memory.filter(|_| holds).map(|_| Session::lost());
        match it.stored {
            Some(record) => {
                let (primary, orders) = Primary::restarted(record);
                it.role = Role::Primary(primary);
                if record.alone {
                    self.go_alone(node, planted);
                }
                self.carry_out(node, orders, planted);
            }
            None => {
                // The disk may be of no moment at all.
                it.disk = 0;
                self.becomes_backup(node, planted);
            }
        }
    }

    /// Returns the running machine's node, if the witness gave the machine to that node.
    fn owner(&self) -> Option<&Node> {
        let owner = &self.nodes[self.witness.owner as usize];
        Some(owner).filter(|node| node.memory.is_some())
    }

    /// Returns true if one node runs the machine in the end, once both nodes are up, talk, and reach the witness.
    fn resolves(&self) -> bool {
        let mut state = self.clone();
        state.link.up = false;
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
                if state.nodes[node].taking {
                    state.take(Step::Taken(node), Planted::Nothing);
                }
            }
        }
        let runs = state.nodes.iter().filter(|node| node.memory.is_some());
        runs.count() == 1 && state.owner().is_some_and(Node::releases_unasked)
    }
}

impl Pair {
    /// Adds the steps of a node's machine and of its session.
    fn steps_of_session(self, state: &State, node: usize, steps: &mut Vec<Step>) {
        let (it, other) = (&state.nodes[node], &state.nodes[1 - node]);
        let runs = it.memory.is_some() && it.open == 0;
        if runs && state.worked < self.works {
            steps.push(Step::Work(node));
        }
        if it.open != 0 && it.awaits_backup() && other.has(it.open) {
            steps.push(Step::AnswerWrite(node));
        }
        let may_sync = other
            .backup()
            .is_some_and(|backup| backup.state() != BackupState::Took);
        let alone = it.primary().map(Primary::state) == Some(PrimaryState::Alone);
        if alone && it.releases_unasked() && may_sync && state.captured < self.captures {
            steps.push(Step::Sync(node));
        }
        if let Some(session) = &it.session
            && let Next::Capture(_) = session.checkpoints.step(NOW)
            // A stop waits for the answers to all requests.
            && (runs || self.planted == Planted::CapturesOpen)
            && it.awaits_backup()
            && state.captured < self.captures
        {
            steps.push(Step::Capture(node));
        }
        if other
            .standby
            .as_ref()
            .is_some_and(|standby| !standby.severed)
        {
            if !state.link.memory.is_empty() {
                steps.push(Step::MemoryComes(node));
            }
            if !state.link.disk.is_empty() {
                steps.push(Step::DiskComes(node));
            }
        }
        if state.link.acknowledged.is_some() && it.awaits_backup() {
            steps.push(Step::AcknowledgementComes(node));
        }
    }
}

impl Model for Pair {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        let primary = Primary::new(Member::First, Grant::FIRST);
        let stored = Some(primary.record());
        let mut first = Node::new(Role::Primary(primary), stored);
        first.memory = Some(0);
        let (backup, _) = Backup::new(Member::Second, Grant::FIRST);
        vec![State {
            nodes: [first, Node::new(Role::Backup(backup), None)],
            link: Link::default(),
            witness: Grant::FIRST,
            asks: Vec::new(),
            worked: 0,
            captured: 0,
            seen: 0,
            undone: 0,
            crashes: 0,
            cuts: 0,
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        for (node, it) in state.nodes.iter().enumerate() {
            self.steps_of_session(state, node, steps);
            match state.link.up {
                false => steps.push(Step::Notice(node)),
                true if state.cuts < self.cuts => steps.push(Step::Suspect(node)),
                true => {}
            }
            steps.push(Step::Retry(node));
            if it.answer.is_some() {
                steps.push(Step::AnswerArrives(node));
            }
            if it.taking {
                steps.push(Step::Taken(node));
            }
            let ended = it.primary().map(Primary::state) == Some(PrimaryState::Ended);
            if ended && state.nodes[1 - node].primary().is_some() {
                steps.push(Step::Meet(node));
            }
            if state.crashes < self.crashes {
                steps.push(Step::Crash(node));
                if it.memory.is_some() {
                    steps.push(Step::Restart(node));
                }
            }
        }
        if state.link.up && state.cuts < self.cuts {
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
        state.witness.term.0 <= 5
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(ONE_RELEASES, |_, state: &State| {
                let nodes = state.nodes.iter();
                nodes.filter(|node| node.releases_unasked()).count() <= 1
            }),
            Property::always(NOTHING_MISSES, |_, state: &State| {
                let memory = state.owner().and_then(|owner| owner.memory);
                memory.is_none_or(|memory| state.seen & !state.undone & !memory == 0)
            }),
            Property::always(OF_ONE_CHECKPOINT, |_, state: &State| {
                let mut owner = state.owner().into_iter();
                owner.all(|it| it.memory.map(|memory| memory & WRITES) == Some(it.disk & !it.open))
            }),
            Property::always(RUNS_AGAIN, |_, state: &State| state.resolves()),
            Property::sometimes("the machine is protected", |_, state: &State| {
                let primaries = state.nodes.iter().filter_map(Node::primary);
                primaries
                    .map(Primary::state)
                    .any(|it| it == PrimaryState::Paired)
            }),
            Property::sometimes("the backup takes over", |_, state: &State| {
                state.nodes[1].memory.is_some()
            }),
            Property::sometimes("work that nobody has seen is lost", |_, state: &State| {
                let memory = state.nodes[1].memory;
                memory.is_some_and(|memory| memory & 1 == 0) && state.worked > 1
            }),
            Property::sometimes(
                "packets leave after an acknowledgement",
                |_, state: &State| {
                    state.nodes[0].awaits_backup() && state.captured > 1 && state.seen != 0
                },
            ),
            Property::sometimes(
                "the machine is protected the other way",
                |_, state: &State| {
                    let primary = state.nodes[1].primary();
                    primary.map(Primary::state) == Some(PrimaryState::Paired)
                },
            ),
            Property::sometimes("the primary goes on alone", |_, state: &State| {
                state.nodes[0].releases_unasked() && state.witness.term.0 > 2
            }),
            Property::sometimes("a grant is given back", |_, state: &State| {
                let primary = state.nodes[0].primary();
                let ended = primary.map(Primary::state) == Some(PrimaryState::Ended);
                state.witness.owner == Member::First && ended
            }),
        ]
    }
}
