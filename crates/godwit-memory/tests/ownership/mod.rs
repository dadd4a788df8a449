//! A model of two nodes, one guest, its segment's title, and the places of its memory and disks.

pub(crate) mod properties;

use godwit_memory::ownership::{Arrival, Title};
use stateright::{Model, Property};

/// Names of the nodes.
pub(crate) const NODES: [&str; 2] = ["a", "b"];
/// Most offers, crashes of nodes, and moves of half of the memory, in one run.
const OFFERS: u8 = 4;
const CRASHES: u8 = 4;
const MOVES: u8 = 4;
/// Parts of the memory, for a memory that is half moved.
const PARTS: u8 = 2;

/// A node's durable record of the VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Stored {
    Nothing,
    /// The VM belongs to the node.
    Here,
    /// The VM belongs to the node, and is offered in this epoch.
    Outgoing(u64),
    /// The VM is given away; the title of this epoch has to say so.
    Given(u64),
    /// The VM was offered to the node in this epoch.
    Incoming(u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Node {
    pub(crate) stored: Stored,
    /// True if the node's QEMU runs the guest. QEMU outlives the node.
    pub(crate) runs: bool,
    /// True if the node's QEMU has the state of the devices.
    pub(crate) loaded: bool,
    pub(crate) up: bool,
    /// Parts of the memory in QEMU's own memory instead of the pool.
    pub(crate) local: u8,
    /// Value of `local` that the node remembers since its start.
    remembered: u8,
}

/// Place of the disks. A VM without disks leaves the place unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Disks {
    At(usize),
    /// The disks were given to this node, which has not heard of the transfer.
    On(usize),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct State {
    pub(crate) title: Title,
    pub(crate) nodes: [Node; 2],
    pub(crate) disks: Disks,
    offers: u8,
    crashes: u8,
    moves: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Step {
    /// A part of the memory leaves the pool while the guest runs. The step may follow a crash of the node, because the
    /// agent in QEMU finishes its request.
    MoveOut(usize),
    /// A part of the memory goes back.
    MoveBack(usize),
    Offer(usize),
    /// The guest is paused at the source, and the destination loads its devices.
    Freeze(usize),
    /// The VM and its disks, in one transaction.
    StoreGiven(usize),
    WriteGiven(usize),
    /// The destination hears from the source that it owns the disks.
    DisksCome(usize),
    GiveUp(usize),
    Arrive(usize),
    Crash(usize),
    /// The node starts again, and finishes or undoes its moves.
    Recover(usize),
}

/// A planted break of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Broken {
    Nothing,
    /// The source offers without a check of where the memory is.
    OffersWhatIsHalfMoved,
    /// The source checks its own record, lost in a crash, instead of asking QEMU.
    ForgetsWhatMoved,
    /// Memory leaves the pool during an offer.
    MovesWhileOffered,
    /// The source gives the VM away before the guest is paused.
    GivesWhatStillRuns,
    /// The title is given before the durable record.
    TitleFirst,
    /// The disks are given before the VM, in a transaction of their own.
    DisksFirst,
    /// The source resumes the guest after the durable record of giving the VM away.
    TakesBackWhatIsGiven,
    /// The source cancels without writing the title.
    GivesUpSilently,
    /// The destination runs the guest as soon as the devices are loaded.
    RunsWhenLoaded,
    /// The destination has the disks, and does not wait for the memory's title.
    RunsWithDisksAlone,
    /// The destination has the memory's title, and does not wait for the disks.
    RunsWithMemoryAlone,
    /// The destination forgets the VM before the decision.
    LeavesBeforeItIsDecided,
    /// A restarted source claims a VM that was given away.
    RecoversWhatIsGiven,
}

impl Broken {
    /// All breaks.
    pub(crate) const ALL: [Self; 13] = [
        Self::OffersWhatIsHalfMoved,
        Self::ForgetsWhatMoved,
        Self::MovesWhileOffered,
        Self::GivesWhatStillRuns,
        Self::TitleFirst,
        Self::DisksFirst,
        Self::TakesBackWhatIsGiven,
        Self::GivesUpSilently,
        Self::RunsWhenLoaded,
        Self::RunsWithDisksAlone,
        Self::RunsWithMemoryAlone,
        Self::LeavesBeforeItIsDecided,
        Self::RecoversWhatIsGiven,
    ];
}

/// The model of one VM.
pub(crate) struct Move {
    pub(crate) broken: Broken,
    pub(crate) has_disks: bool,
}

impl Move {
    fn is(&self, broken: Broken) -> bool {
        self.broken == broken
    }

    /// The source keeps the VM offered in this epoch.
    fn give_up(&self, state: &mut State, node: usize, offered: u64) {
        if !self.is(Broken::GivesUpSilently)
            && let Ok(title) = state.title.decided(NODES[node], offered, NODES[node])
        {
            state.title = title;
        }
        state.nodes[node].stored = Stored::Here;
        // The node decides by the same rule; a broken step skips the check.
        let may_run = state.title.may_run(NODES[node], false);
        if may_run || self.broken != Broken::Nothing {
            state.nodes[node].runs = true;
        }
    }

    /// The destination checks for the VM's arrival. Returns `None` if the destination has to wait.
    fn arrive(&self, state: &mut State, at: usize, offered: u64) -> Option<()> {
        let node = state.nodes[at];
        let arrival = state.title.arrival(NODES[at], offered);
        let has_memory = arrival == Arrival::Given || self.is(Broken::RunsWithDisksAlone);
        let has_disks =
            !self.has_disks || state.disks == Disks::At(at) || self.is(Broken::RunsWithMemoryAlone);
        let runs = has_memory && has_disks || self.is(Broken::RunsWhenLoaded);
        if runs && node.loaded {
            state.nodes[at].stored = Stored::Here;
            state.nodes[at].runs = true;
            return Some(());
        }
        let leaves = arrival == Arrival::Elsewhere || self.is(Broken::LeavesBeforeItIsDecided);
        leaves.then(|| {
            state.nodes[at].stored = Stored::Nothing;
            state.nodes[at].loaded = false;
        })
    }

    fn recover(&self, state: &mut State, at: usize) {
        state.nodes[at].up = true;
        match state.nodes[at].stored {
            Stored::Outgoing(offered) => self.give_up(state, at, offered),
            Stored::Given(_) if self.is(Broken::RecoversWhatIsGiven) => {
                state.nodes[at].runs = true;
            }
            Stored::Given(_) => state.nodes[at].runs = false,
            _ => {}
        }
    }

    /// Returns true if the place of the memory allows an offer.
    fn is_in_pool(&self, node: Node) -> bool {
        match self.broken {
            Broken::OffersWhatIsHalfMoved => true,
            Broken::ForgetsWhatMoved => node.remembered == 0,
            _ => node.local == 0,
        }
    }

    fn moves_memory(&self, last: &State, at: usize) -> bool {
        let node = last.nodes[at];
        let idle = match node.stored {
            Stored::Here => true,
            Stored::Outgoing(_) => self.is(Broken::MovesWhileOffered),
            _ => false,
        };
        idle && node.runs && last.moves < MOVES
    }
}

impl Model for Move {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        let node = |stored, runs| Node {
            stored,
            runs,
            loaded: false,
            up: true,
            local: 0,
            remembered: 0,
        };
        vec![State {
            title: Title::new("a"),
            nodes: [node(Stored::Here, true), node(Stored::Nothing, false)],
            disks: Disks::At(0),
            offers: 0,
            crashes: 0,
            moves: 0,
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        for node in 0..2 {
            let all = [
                Step::MoveOut(node),
                Step::MoveBack(node),
                Step::Offer(node),
                Step::Freeze(node),
                Step::StoreGiven(node),
                Step::WriteGiven(node),
                Step::DisksCome(node),
                Step::GiveUp(node),
                Step::Arrive(node),
                Step::Crash(node),
                Step::Recover(node),
            ];
            let possible = |step: &Step| self.next_state(state, *step).is_some();
            steps.extend(all.into_iter().filter(possible));
        }
    }

    fn next_state(&self, last: &State, step: Step) -> Option<State> {
        let mut state = last.clone();
        let (Step::MoveOut(at)
        | Step::MoveBack(at)
        | Step::Offer(at)
        | Step::Freeze(at)
        | Step::StoreGiven(at)
        | Step::WriteGiven(at)
        | Step::DisksCome(at)
        | Step::GiveUp(at)
        | Step::Arrive(at)
        | Step::Crash(at)
        | Step::Recover(at)) = step;
        let (node, other) = (last.nodes[at], last.nodes[1 - at]);
        match (step, node.stored) {
            (Step::Crash(_), _) if node.up && last.crashes < CRASHES => {
                state.crashes += 1;
                state.nodes[at].up = false;
                state.nodes[at].remembered = 0;
            }
            (Step::Recover(_), _) if !node.up => self.recover(&mut state, at),
            (Step::MoveOut(_), _) if self.moves_memory(last, at) && node.local < PARTS => {
                state.moves += 1;
                state.nodes[at].local += 1;
                if node.up {
                    state.nodes[at].remembered = node.local + 1;
                }
            }
            _ if !node.up => return None,
            (Step::MoveBack(_), _) if self.moves_memory(last, at) && node.local > 0 => {
                state.moves += 1;
                state.nodes[at].local -= 1;
                state.nodes[at].remembered = node.local - 1;
            }
            (Step::Offer(_), Stored::Here)
                if other.up
                    && matches!(other.stored, Stored::Nothing | Stored::Given(_))
                    && last.offers < OFFERS
                    && last.title.owner == NODES[at]
                    && self.is_in_pool(node) =>
            {
                state.offers += 1;
                state.nodes[at].stored = Stored::Outgoing(last.title.epoch);
                state.nodes[1 - at].stored = Stored::Incoming(last.title.epoch);
                state.nodes[1 - at].loaded = false;
            }
            (Step::Freeze(_), Stored::Outgoing(offered))
                if node.runs && other.up && other.stored == Stored::Incoming(offered) =>
            {
                state.nodes[at].runs = self.is(Broken::GivesWhatStillRuns);
                state.nodes[1 - at].loaded = true;
            }
            (Step::StoreGiven(_), Stored::Outgoing(offered))
                if other.loaded && (!node.runs || self.is(Broken::GivesWhatStillRuns)) =>
            {
                if self.is(Broken::TitleFirst) {
                    state.title = last.title.decided(NODES[at], offered, NODES[1 - at]).ok()?;
                    return Some(state);
                }
                if self.has_disks {
                    state.disks = Disks::On(1 - at);
                }
                // In the broken model, the VM follows in the next transaction.
                if !self.is(Broken::DisksFirst) || last.disks == state.disks {
                    state.nodes[at].stored = Stored::Given(offered);
                }
            }
            (Step::WriteGiven(_), Stored::Given(offered)) => {
                state.title = last.title.decided(NODES[at], offered, NODES[1 - at]).ok()?;
            }
            (Step::DisksCome(_), _) if other.up && last.disks == Disks::On(at) => {
                state.disks = Disks::At(at);
            }
            (Step::GiveUp(_), Stored::Outgoing(offered)) => self.give_up(&mut state, at, offered),
            (Step::GiveUp(_), Stored::Given(offered)) if self.is(Broken::TakesBackWhatIsGiven) => {
                self.give_up(&mut state, at, offered);
            }
            (Step::Arrive(_), Stored::Incoming(offered)) => {
                self.arrive(&mut state, at, offered)?;
            }
            _ => return None,
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        properties::all(self.has_disks)
    }
}
