//! A model of two nodes that allocate segments of one device step by step, and of the device's memory.

use godwit_memory::pool::device::claim::{Entry, Stage, Verdict, verdict};
use godwit_memory::pool::device::space::{Extent, place};
use stateright::{Model, Property};

/// Records of the table.
const RECORDS: usize = 2;
/// Memory of the device in units. Two segments leave no room for a third.
const SPACE: Extent = Extent {
    offset: 0,
    bytes: 3,
};
/// Most allocations of a node, and most crashes, in one run.
const ALLOCATIONS: u8 = 2;
const CRASHES: u8 = 1;

/// A record in the device. Several nodes write the stage only, by compare-and-swap.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Record {
    stage: Stage,
    whose: usize,
    name: u8,
    extent: Extent,
}

/// The progress of a node's allocation.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Phase {
    Idle,
    Claimed(usize),
    /// The node has chosen a place, and shown nothing yet.
    Chosen(usize, Extent),
    /// The node has announced the place, and has seen these records since.
    Looking(usize, Extent, Vec<Entry<u8>>),
    Taken(usize),
    Wiped(usize),
    /// The node has a segment. The flag tells if the guest has written to all of the memory.
    Held(usize, bool),
    Dead,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct State {
    records: Vec<Record>,
    nodes: Vec<Phase>,
    /// Guest whose data each unit has: the node, and the number of its segment.
    memory: Vec<Option<(usize, u8)>>,
    allocated: [u8; 2],
    crashes: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Step {
    /// Claims this record.
    Claim(usize, usize),
    Choose(usize),
    Announce(usize),
    /// Looks at the next record.
    Look(usize),
    /// Acts on the records seen.
    Decide(usize),
    /// Has waited for long enough.
    LoseHope(usize),
    Wipe(usize),
    Hold(usize),
    /// The node's guest writes.
    Write(usize),
    Free(usize),
    Crash(usize),
    Recover(usize),
}

/// A planted break of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Broken {
    Nothing,
    /// A node looks at the other records before its announcement.
    LooksFirst,
    /// A node ignores announcements, and respects taken parts only.
    MindsOnlyWhatIsTaken,
    /// A node takes a part that another node wants too, because its record comes first.
    TakesInsteadOfWaiting,
    /// The segment exists before the old memory is overwritten.
    HoldsBeforeItWipes,
    /// The memory of earlier guests is not overwritten.
    WipesNothing,
    /// A node that is back frees the other node's claims.
    ClearsWhatIsAnothers,
    /// A node that is back leaves its old claims.
    ClearsNothing,
    /// A record is claimed without a compare-and-swap.
    ClaimsWhatIsNotFree,
}

impl Broken {
    /// All breaks.
    pub(crate) const ALL: [Self; 8] = [
        Self::LooksFirst,
        Self::MindsOnlyWhatIsTaken,
        Self::TakesInsteadOfWaiting,
        Self::HoldsBeforeItWipes,
        Self::WipesNothing,
        Self::ClearsWhatIsAnothers,
        Self::ClearsNothing,
        Self::ClaimsWhatIsNotFree,
    ];
}

/// A world of two VMs, with different names or the same name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Allocations {
    pub(crate) broken: Broken,
    pub(crate) same_name: bool,
    /// Units of each segment.
    pub(crate) size: u64,
}

pub(crate) const APART: &str = "no two segments share memory or a name";
pub(crate) const CLEAN: &str = "no guest finds what another one left";
pub(crate) const TIDY: &str = "a node that is idle has left nothing behind";
pub(crate) const KEPT: &str = "a guest's memory is as it wrote it";
pub(crate) const BOTH: &str = "both nodes have a segment";
pub(crate) const NOT_BOTH: &str = "one node has a segment and the other one none";

impl Allocations {
    fn is(self, broken: Broken) -> bool {
        self.broken == broken
    }

    fn entry(state: &State, index: usize) -> Entry<u8> {
        let record = &state.records[index];
        Entry {
            index,
            stage: record.stage,
            name: record.name,
            extent: record.extent,
        }
    }

    fn name(self, node: usize) -> u8 {
        if self.same_name { 0 } else { node as u8 }
    }

    fn set_stage(state: &mut State, index: usize, stage: Stage) {
        state.records[index].stage = stage;
    }

    /// Writes a node's choice into its record, and shows the record.
    fn announce(self, state: &mut State, node: usize, index: usize, extent: Extent) {
        let record = &mut state.records[index];
        record.name = self.name(node);
        record.extent = extent;
        record.stage = Stage::Announced;
    }

    fn decide(
        self,
        state: &mut State,
        node: usize,
        index: usize,
        seen: &[Entry<u8>],
        extent: Extent,
    ) {
        let own = Entry {
            index,
            stage: Stage::Announced,
            name: self.name(node),
            extent,
        };
        let mut seen = seen.to_vec();
        if self.is(Broken::MindsOnlyWhatIsTaken) {
            seen.retain(|other| other.stage != Stage::Announced);
        }
        if self.is(Broken::LooksFirst) {
            self.announce(state, node, index, extent);
        }
        let mut found = verdict(&own, &seen);
        if self.is(Broken::TakesInsteadOfWaiting) && matches!(found, Verdict::Wait(_)) {
            found = Verdict::Mine;
        }
        state.nodes[node] = match found {
            Verdict::Mine => {
                Self::set_stage(state, index, Stage::Taken);
                match self.broken {
                    Broken::WipesNothing => Phase::Wiped(index),
                    _ => Phase::Taken(index),
                }
            }
            // Looks again from the start.
            Verdict::Wait(_) => Phase::Looking(index, extent, Vec::new()),
            Verdict::Again => {
                Self::set_stage(state, index, Stage::Claimed);
                Phase::Claimed(index)
            }
            Verdict::NameTaken(_) => {
                Self::set_stage(state, index, Stage::Free);
                Phase::Idle
            }
        };
    }

    fn wipe(state: &mut State, index: usize) {
        let extent = state.records[index].extent;
        for unit in extent.offset..extent.end() {
            state.memory[unit as usize] = None;
        }
    }

    fn recover(self, state: &mut State, node: usize) {
        state.nodes[node] = Phase::Idle;
        for index in 0..RECORDS {
            let record = &mut state.records[index];
            let is_own = record.whose == node || self.is(Broken::ClearsWhatIsAnothers);
            if record.stage.is_unfinished() && is_own && !self.is(Broken::ClearsNothing) {
                record.stage = Stage::Free;
            }
            // A finished segment belonged to a forgotten VM: the node frees the segment before using the name.
            if record.stage == Stage::Held && record.whose == node {
                record.stage = Stage::Free;
            }
        }
    }
}

impl Model for Allocations {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        let free = Record {
            stage: Stage::Free,
            whose: 0,
            name: 9,
            extent: Extent {
                offset: 0,
                bytes: 0,
            },
        };
        vec![State {
            records: vec![free; RECORDS],
            nodes: vec![Phase::Idle; 2],
            memory: vec![None; SPACE.bytes as usize],
            allocated: [0; 2],
            crashes: 0,
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        for node in 0..2 {
            let claims = (0..RECORDS).map(|index| Step::Claim(node, index));
            let others = [
                Step::Choose(node),
                Step::Announce(node),
                Step::Look(node),
                Step::Decide(node),
                Step::LoseHope(node),
                Step::Wipe(node),
                Step::Hold(node),
                Step::Write(node),
                Step::Free(node),
                Step::Crash(node),
                Step::Recover(node),
            ];
            let possible = |step: &Step| self.next_state(state, *step).is_some();
            steps.extend(claims.chain(others).filter(possible));
        }
    }

    fn next_state(&self, last: &State, step: Step) -> Option<State> {
        let mut state = last.clone();
        let (Step::Claim(node, _)
        | Step::Choose(node)
        | Step::Announce(node)
        | Step::Look(node)
        | Step::Decide(node)
        | Step::LoseHope(node)
        | Step::Wipe(node)
        | Step::Hold(node)
        | Step::Write(node)
        | Step::Free(node)
        | Step::Crash(node)
        | Step::Recover(node)) = step;
        match (step, last.nodes[node].clone()) {
            (Step::Claim(_, index), Phase::Idle) if last.allocated[node] < ALLOCATIONS => {
                let stage = last.records[index].stage;
                // The broken claim saw a free record a moment ago.
                let taken = self.is(Broken::ClaimsWhatIsNotFree) && stage == Stage::Claimed;
                if stage != Stage::Free && !taken {
                    return None;
                }
                state.allocated[node] += 1;
                state.records[index].stage = Stage::Claimed;
                state.records[index].whose = node;
                state.nodes[node] = Phase::Claimed(index);
            }
            (Step::Choose(_), Phase::Claimed(index)) => {
                let used = (0..RECORDS).map(|other| Self::entry(last, other));
                let used = used.filter(|other| other.stage.has_space());
                let used: Vec<Extent> = used.map(|other| other.extent).collect();
                match place(SPACE, &used, self.size) {
                    Ok(extent) => state.nodes[node] = Phase::Chosen(index, extent),
                    Err(_) => {
                        Self::set_stage(&mut state, index, Stage::Free);
                        state.nodes[node] = Phase::Idle;
                    }
                }
            }
            (Step::Announce(_), Phase::Chosen(index, extent)) => {
                if !self.is(Broken::LooksFirst) {
                    self.announce(&mut state, node, index, extent);
                }
                state.nodes[node] = Phase::Looking(index, extent, Vec::new());
            }
            (Step::Look(_), Phase::Looking(index, extent, mut seen)) if seen.len() < RECORDS => {
                seen.push(Self::entry(last, seen.len()));
                state.nodes[node] = Phase::Looking(index, extent, seen);
            }
            (Step::Decide(_), Phase::Looking(index, extent, seen)) if seen.len() == RECORDS => {
                self.decide(&mut state, node, index, &seen, extent);
            }
            (Step::LoseHope(_), Phase::Looking(index, _, seen)) if seen.is_empty() => {
                Self::set_stage(&mut state, index, Stage::Claimed);
                state.nodes[node] = Phase::Claimed(index);
            }
            (Step::Wipe(_), Phase::Taken(index)) => {
                if self.is(Broken::HoldsBeforeItWipes) {
                    Self::set_stage(&mut state, index, Stage::Held);
                    state.nodes[node] = Phase::Held(index, false);
                    return Some(state);
                }
                Self::wipe(&mut state, index);
                state.nodes[node] = Phase::Wiped(index);
            }
            (Step::Hold(_), Phase::Wiped(index)) => {
                Self::set_stage(&mut state, index, Stage::Held);
                state.nodes[node] = Phase::Held(index, false);
            }
            (Step::Write(_), Phase::Held(index, false)) => {
                let extent = last.records[index].extent;
                for unit in extent.offset..extent.end() {
                    state.memory[unit as usize] = Some((node, last.allocated[node]));
                }
                state.nodes[node] = Phase::Held(index, true);
            }
            (Step::Free(_), Phase::Held(index, _)) => {
                Self::set_stage(&mut state, index, Stage::Free);
                state.nodes[node] = Phase::Idle;
            }
            (Step::Crash(_), phase) if phase != Phase::Dead && last.crashes < CRASHES => {
                state.crashes += 1;
                state.nodes[node] = Phase::Dead;
            }
            (Step::Recover(_), Phase::Dead) => self.recover(&mut state, node),
            _ => return None,
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        fn holds(state: &State, node: usize) -> bool {
            matches!(state.nodes[node], Phase::Held(..))
        }
        vec![
            Property::always(APART, |_, state: &State| {
                let settled = state
                    .records
                    .iter()
                    .filter(|record| matches!(record.stage, Stage::Taken | Stage::Held));
                let settled: Vec<&Record> = settled.collect();
                settled.iter().enumerate().all(|(number, one)| {
                    settled[number + 1..]
                        .iter()
                        .all(|other| other.name != one.name && !other.extent.overlaps(one.extent))
                })
            }),
            Property::always(CLEAN, |_, state: &State| {
                state.nodes.iter().all(|phase| match phase {
                    Phase::Held(index, false) => {
                        let extent = state.records[*index].extent;
                        (extent.offset..extent.end())
                            .all(|unit| state.memory[unit as usize].is_none())
                    }
                    _ => true,
                })
            }),
            Property::always(KEPT, |_, state: &State| {
                state
                    .nodes
                    .iter()
                    .enumerate()
                    .all(|(node, phase)| match phase {
                        Phase::Held(index, true) => {
                            let extent = state.records[*index].extent;
                            let own = Some((node, state.allocated[node]));
                            (extent.offset..extent.end())
                                .all(|unit| state.memory[unit as usize] == own)
                        }
                        _ => true,
                    })
            }),
            Property::always(TIDY, |_, state: &State| {
                let idle = |node: usize| matches!(state.nodes[node], Phase::Idle);
                let left = |record: &Record| record.stage.is_unfinished() && idle(record.whose);
                !state.records.iter().any(left)
            }),
            Property::sometimes(BOTH, |_, state: &State| holds(state, 0) && holds(state, 1)),
            Property::sometimes(NOT_BOTH, |_, state: &State| {
                holds(state, 0) && state.nodes[1] == Phase::Idle && state.allocated[1] > 0
            }),
        ]
    }
}
