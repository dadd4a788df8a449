//! Every order of the steps of a move and of crashes, in bounds: the guest of a segment never runs twice, and the
//! model can fail: with one step broken it does.

use godwit_memory::ownership::{Arrival, Title};
use stateright::{Checker, Model, Property};

const NODES: [&str; 2] = ["a", "b"];
/// Offers, and crashes of nodes, in one run.
const OFFERS: u8 = 4;
const CRASHES: u8 = 4;

const ONCE: &str = "the guest runs once at most";
const OWNER: &str = "who runs the guest owns its memory";

/// What a node has stored about the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Stored {
    Nothing,
    /// It is the node's.
    Here,
    /// It is the node's, and is offered in this epoch.
    Outgoing(u64),
    /// It is given away; the title of this epoch has to say so.
    Given(u64),
    /// It was offered to the node in this epoch.
    Incoming(u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Node {
    stored: Stored,
    /// Its QEMU runs the guest; it outlives the node.
    runs: bool,
    /// Its QEMU has the state of the devices.
    loaded: bool,
    up: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    title: Title,
    nodes: [Node; 2],
    offers: u8,
    crashes: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Step {
    Offer(usize),
    /// The guest stops at the source and the destination loads its devices.
    Freeze(usize),
    StoreGiven(usize),
    WriteGiven(usize),
    GiveUp(usize),
    Arrive(usize),
    Crash(usize),
    /// The node starts again and finishes or undoes what it finds.
    Recover(usize),
}

/// What is wrong with a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Broken {
    Nothing,
    /// The destination runs the guest as soon as it has its devices.
    RunsWhenLoaded,
    /// The source lets the guest go on although it has stored that the machine is given away.
    TakesBackWhatIsGiven,
    /// The title is given before that is stored.
    TitleFirst,
}

struct Move {
    broken: Broken,
}

impl Move {
    fn give_up(&self, state: &mut State, node: usize, offered: u64) {
        if let Ok(title) = state.title.decided(NODES[node], offered, NODES[node]) {
            state.title = title;
        }
        state.nodes[node].stored = Stored::Here;
        // What decides in the node as well; a broken step does not look.
        let may_run = state.title.may_run(NODES[node], false);
        if may_run || self.broken != Broken::Nothing {
            state.nodes[node].runs = true;
        }
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
        };
        vec![State {
            title: Title::new("a"),
            nodes: [node(Stored::Here, true), node(Stored::Nothing, false)],
            offers: 0,
            crashes: 0,
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        for node in 0..2 {
            let all = [
                Step::Offer(node),
                Step::Freeze(node),
                Step::StoreGiven(node),
                Step::WriteGiven(node),
                Step::GiveUp(node),
                Step::Arrive(node),
                Step::Crash(node),
                Step::Recover(node),
            ];
            steps.extend(
                all.into_iter()
                    .filter(|step| self.next_state(state, *step).is_some()),
            );
        }
    }

    fn next_state(&self, last: &State, step: Step) -> Option<State> {
        let mut state = last.clone();
        let (Step::Offer(at)
        | Step::Freeze(at)
        | Step::StoreGiven(at)
        | Step::WriteGiven(at)
        | Step::GiveUp(at)
        | Step::Arrive(at)
        | Step::Crash(at)
        | Step::Recover(at)) = step;
        let (node, other) = (last.nodes[at], last.nodes[1 - at]);
        match (step, node.stored) {
            (Step::Crash(_), _) if node.up && last.crashes < CRASHES => {
                state.crashes += 1;
                state.nodes[at].up = false;
            }
            (Step::Recover(_), stored) if !node.up => {
                state.nodes[at].up = true;
                match stored {
                    Stored::Outgoing(offered) => self.give_up(&mut state, at, offered),
                    Stored::Given(_) => state.nodes[at].runs = false,
                    _ => {}
                }
            }
            _ if !node.up => return None,
            (Step::Offer(_), Stored::Here)
                if other.up
                    && matches!(other.stored, Stored::Nothing | Stored::Given(_))
                    && last.offers < OFFERS =>
            {
                if last.title.owner != NODES[at] {
                    return None;
                }
                state.offers += 1;
                state.nodes[at].stored = Stored::Outgoing(last.title.epoch);
                state.nodes[1 - at].stored = Stored::Incoming(last.title.epoch);
                state.nodes[1 - at].loaded = false;
            }
            (Step::Freeze(_), Stored::Outgoing(offered))
                if node.runs && other.up && other.stored == Stored::Incoming(offered) =>
            {
                state.nodes[at].runs = false;
                state.nodes[1 - at].loaded = true;
            }
            (Step::StoreGiven(_), Stored::Outgoing(offered)) if !node.runs && other.loaded => {
                if self.broken == Broken::TitleFirst {
                    state.title = last.title.decided(NODES[at], offered, NODES[1 - at]).ok()?;
                    if last.title == state.title {
                        return None;
                    }
                } else {
                    state.nodes[at].stored = Stored::Given(offered);
                }
            }
            (Step::WriteGiven(_), Stored::Given(offered)) => {
                state.title = last.title.decided(NODES[at], offered, NODES[1 - at]).ok()?;
            }
            (Step::GiveUp(_), Stored::Outgoing(offered)) => self.give_up(&mut state, at, offered),
            (Step::GiveUp(_), Stored::Given(offered))
                if self.broken == Broken::TakesBackWhatIsGiven =>
            {
                self.give_up(&mut state, at, offered);
            }
            (Step::Arrive(_), Stored::Incoming(offered)) => {
                let arrival = last.title.arrival(NODES[at], offered);
                let runs = arrival == Arrival::Given
                    || self.broken == Broken::RunsWhenLoaded && node.loaded;
                if runs && node.loaded {
                    state.nodes[at].stored = Stored::Here;
                    state.nodes[at].runs = true;
                } else if arrival == Arrival::Elsewhere {
                    state.nodes[at].stored = Stored::Nothing;
                    state.nodes[at].loaded = false;
                } else {
                    return None;
                }
            }
            _ => return None,
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(ONCE, |_, state: &State| {
                state.nodes.iter().filter(|node| node.runs).count() <= 1
            }),
            Property::always(OWNER, |_, state: &State| {
                let running = state.nodes.iter().position(|node| node.runs);
                running.is_none_or(|node| state.title.owner == NODES[node])
            }),
            Property::sometimes("the guest runs at the other node", |_, state: &State| {
                state.nodes[1].runs
            }),
            Property::sometimes("it comes back", |_, state: &State| {
                state.nodes[0].runs
                    && state.title.epoch > 2
                    && state.nodes[0].stored == Stored::Here
            }),
        ]
    }
}

fn check(broken: Broken) -> impl Checker<Move> {
    Move { broken }.checker().spawn_bfs().join()
}

#[test]
fn a_guest_never_runs_twice_on_one_memory() {
    let checker = check(Broken::Nothing);
    println!("{} states", checker.unique_state_count());
    assert!(
        checker.unique_state_count() > 500,
        "the bounds allow too little"
    );
    checker.assert_properties();
}

#[test]
fn each_broken_step_is_noticed() {
    for broken in [
        Broken::RunsWhenLoaded,
        Broken::TakesBackWhatIsGiven,
        Broken::TitleFirst,
    ] {
        let checker = check(broken);
        assert!(
            checker
                .discoveries()
                .keys()
                .any(|name| *name == ONCE || *name == OWNER),
            "{broken:?} goes unnoticed"
        );
    }
}
