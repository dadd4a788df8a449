//! Explores the grant of two nodes that fence each other: every order of requests, late and lost ones, of crashes, fences
//! and restarts.

use godwit_protect::{Grant, Member, Term};
use stateright::{Checker, Model, Property};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Planted {
    Nothing,
    /// A node that has started fences before the other one has answered.
    FencesUnmet,
    /// A host that starts again during its fence gets an answer.
    Answers,
    /// The first node stores its own changes only, and asks nobody.
    Alone,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Wish {
    Swap(u8, u8),
    Meet(u8),
}

/// The step of a node's request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Step {
    Idle,
    /// Waits for an answer.
    Swaps {
        expected: u8,
        wanted: u8,
    },
    /// Waits for an answer; `wanted` is 0 if the node only meets.
    Meets {
        expected: u8,
        wanted: u8,
    },
    Fences {
        expected: u8,
        wanted: u8,
        killed: bool,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Node {
    alive: bool,
    met: bool,
    known: u8,
    store: u8,
    step: Step,
    /// Number of the connection that the node waits for.
    waits: u8,
    answer: Option<u8>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    nodes: [Node; 2],
    /// Sender, connection and question.
    requests: Vec<(usize, u8, Wish)>,
    /// Grants given, with the grants that they replaced.
    done: Vec<(u8, u8)>,
    crashes: u8,
    connections: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Event {
    Begins(usize, u8),
    /// Reads the own store: a node that may take the machine needs nobody.
    Looks(usize),
    Arrives(usize),
    Lost(usize),
    Answered(usize),
    Silent(usize),
    Kills(usize),
    Fenced(usize),
    Crash(usize),
    Starts(usize),
}

struct Fences {
    planted: Planted,
    crashes: u8,
    terms: u64,
}

/// Grants as numbers: term, owner, paired.
fn code(grant: Grant) -> u8 {
    (grant.term.0 as u8) << 2
        | u8::from(grant.owner == Member::Second) << 1
        | u8::from(grant.paired)
}

fn term(grant: u8) -> u8 {
    grant >> 2
}

fn may_take(node: usize, grant: u8) -> bool {
    grant & 1 == 1 && usize::from((grant >> 1) & 1) != node
}

/// The grant that both nodes store after a meeting.
fn merge(first: u8, second: u8) -> u8 {
    if term(first) > term(second) {
        first
    } else {
        second
    }
}

fn adopt(node: usize, own: u8, theirs: u8) -> u8 {
    if node == 0 {
        merge(own, theirs)
    } else {
        merge(theirs, own)
    }
}

impl State {
    fn send(&mut self, node: usize, wish: Wish) {
        self.connections += 1;
        self.nodes[node].waits = self.connections;
        self.nodes[node].answer = None;
        self.requests.push((node, self.connections, wish));
    }

    fn meet(&mut self, node: usize, expected: u8, wanted: u8) {
        self.nodes[node].step = Step::Meets { expected, wanted };
        let own = self.nodes[node].store;
        self.send(node, Wish::Meet(own));
    }

    fn ends(&mut self, node: usize, expected: u8, wanted: u8, grant: u8) {
        let it = &mut self.nodes[node];
        it.known = grant;
        it.step = Step::Idle;
        if grant == wanted && wanted != 0 && !self.done.contains(&(expected, wanted)) {
            self.done.push((expected, wanted));
            self.done.sort_unstable();
        }
    }

    fn begins(&mut self, node: usize, wanted: u8, planted: Planted) {
        let it = &self.nodes[node];
        let expected = it.known;
        if !it.met && planted != Planted::FencesUnmet {
            return self.meet(node, 0, 0);
        }
        match node {
            0 => {
                if self.nodes[0].store == expected {
                    self.nodes[0].store = wanted;
                }
                let stored = self.nodes[0].store == wanted;
                if planted == Planted::Alone && stored {
                    return self.ends(0, expected, wanted, wanted);
                }
                self.meet(0, expected, wanted);
            }
            _ => {
                self.nodes[1].step = Step::Swaps { expected, wanted };
                self.send(1, Wish::Swap(expected, wanted));
            }
        }
    }

    fn arrives(&mut self, at: usize, planted: Planted) {
        let (from, connection, wish) = self.requests.remove(at);
        let to = 1 - from;
        if !self.nodes[to].alive {
            return;
        }
        let fences = matches!(self.nodes[to].step, Step::Fences { .. });
        if fences && planted != Planted::Answers {
            return;
        }
        let store = &mut self.nodes[to].store;
        match wish {
            Wish::Swap(expected, wanted) if *store == expected => *store = wanted,
            Wish::Swap(..) => {}
            Wish::Meet(theirs) => *store = adopt(to, *store, theirs),
        }
        let afterwards = *store;
        if self.nodes[from].alive && self.nodes[from].waits == connection {
            self.nodes[from].answer = Some(afterwards);
        }
    }

    fn answered(&mut self, node: usize) {
        let Some(theirs) = self.nodes[node].answer.take() else {
            return;
        };
        self.nodes[node].waits = 0;
        match self.nodes[node].step {
            Step::Swaps { expected, wanted } if theirs == wanted => {
                let agreed = adopt(node, self.nodes[node].store, theirs);
                self.nodes[node].store = agreed;
                self.ends(node, expected, wanted, agreed);
            }
            Step::Swaps { expected, wanted } => self.meet(node, expected, wanted),
            Step::Meets { expected, wanted } => {
                let agreed = adopt(node, self.nodes[node].store, theirs);
                self.nodes[node].store = agreed;
                if agreed == theirs {
                    self.nodes[node].met = true;
                    self.ends(node, expected, wanted, agreed);
                } else {
                    self.meet(node, expected, wanted);
                }
            }
            Step::Idle | Step::Fences { .. } => {}
        }
    }

    fn silent(&mut self, node: usize) {
        self.nodes[node].waits = 0;
        self.nodes[node].answer = None;
        self.nodes[node].step = match self.nodes[node].step {
            Step::Swaps { expected, wanted } | Step::Meets { expected, wanted }
                if wanted != 0 && wanted & 1 == 0 && usize::from((wanted >> 1) & 1) == node =>
            {
                Step::Fences {
                    expected,
                    wanted,
                    killed: false,
                }
            }
            _ => Step::Idle,
        };
    }

    fn dies(&mut self, node: usize) {
        let it = &mut self.nodes[node];
        (it.alive, it.met, it.step, it.waits, it.answer) = (false, false, Step::Idle, 0, None);
    }

    fn fenced(&mut self, node: usize) {
        let Step::Fences {
            expected, wanted, ..
        } = self.nodes[node].step
        else {
            return;
        };
        if self.nodes[node].store == expected {
            self.nodes[node].store = wanted;
        }
        let grant = self.nodes[node].store;
        self.ends(node, expected, wanted, grant);
    }

    /// Gives connections the lowest numbers.
    fn tidy(&mut self) {
        self.requests
            .sort_unstable_by_key(|&(from, connection, wish)| (from, wish, connection));
        let mut numbers = vec![];
        for (_, connection, _) in &mut self.requests {
            if self.nodes.iter().any(|node| node.waits == *connection) {
                numbers.push(*connection);
            } else {
                *connection = 0;
            }
        }
        for node in &mut self.nodes {
            let at = numbers.iter().position(|&number| number == node.waits);
            node.waits = match (node.waits, at) {
                (0, _) => 0,
                (_, Some(at)) => at as u8 + 1,
                (_, None) => 99,
            };
        }
        for (_, connection, _) in &mut self.requests {
            if let Some(at) = numbers.iter().position(|number| number == connection) {
                *connection = at as u8 + 1;
            }
        }
        self.requests.dedup();
        self.connections = numbers.len() as u8;
    }
}

impl Model for Fences {
    type State = State;
    type Action = Event;

    fn init_states(&self) -> Vec<State> {
        let paired = code(Grant {
            term: Term(2),
            owner: Member::First,
            paired: true,
        });
        let node = || Node {
            alive: true,
            met: true,
            known: paired,
            store: paired,
            step: Step::Idle,
            waits: 0,
            answer: None,
        };
        vec![State {
            nodes: [node(), node()],
            requests: vec![],
            done: vec![(0, paired)],
            crashes: 0,
            connections: 0,
        }]
    }

    fn actions(&self, state: &State, events: &mut Vec<Event>) {
        for (at, node) in state.nodes.iter().enumerate() {
            if !node.alive {
                events.push(Event::Starts(at));
                continue;
            }
            if state.crashes < self.crashes {
                events.push(Event::Crash(at));
            }
            if node.met && node.step == Step::Idle && may_take(at, node.store) {
                events.push(Event::Looks(at));
            }
            match node.step {
                Step::Idle if u64::from(term(node.known)) < self.terms => {
                    for (owner, paired) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                        let mine = owner == at as u8;
                        let owned = (node.known >> 1) & 1 == at as u8;
                        // An owner pairs or goes on alone; the other node takes a paired machine; each gives back.
                        let takes = owned || (node.known & 1 == 1 && paired == 0);
                        let asks = if mine { takes } else { paired == 0 };
                        if asks {
                            let wanted = (term(node.known) + 1) << 2 | owner << 1 | paired;
                            events.push(Event::Begins(at, wanted));
                        }
                    }
                }
                Step::Idle => {}
                Step::Fences { killed: true, .. } => events.push(Event::Fenced(at)),
                Step::Fences { killed: false, .. } => {
                    events.push(Event::Kills(at));
                    events.push(Event::Silent(at));
                }
                Step::Swaps { .. } | Step::Meets { .. } => {
                    events.push(Event::Silent(at));
                    if node.answer.is_some() {
                        events.push(Event::Answered(at));
                    }
                }
            }
        }
        for at in 0..state.requests.len() {
            events.push(Event::Arrives(at));
            events.push(Event::Lost(at));
        }
    }

    fn next_state(&self, state: &State, event: Event) -> Option<State> {
        let mut next = state.clone();
        match event {
            Event::Begins(node, wanted) => next.begins(node, wanted, self.planted),
            Event::Looks(node) => next.nodes[node].known = next.nodes[node].store,
            Event::Arrives(at) => next.arrives(at, self.planted),
            Event::Lost(at) => {
                next.requests.remove(at);
            }
            Event::Answered(node) => next.answered(node),
            Event::Silent(node) => next.silent(node),
            Event::Kills(node) => {
                next.dies(1 - node);
                if let Step::Fences { killed, .. } = &mut next.nodes[node].step {
                    *killed = true;
                }
            }
            Event::Fenced(node) => next.fenced(node),
            Event::Crash(node) => {
                next.crashes += 1;
                next.dies(node);
            }
            Event::Starts(node) => {
                next.nodes[node].alive = true;
                next.nodes[node].known = next.nodes[node].store;
            }
        }
        next.tidy();
        (next != *state).then_some(next)
    }

    fn within_boundary(&self, state: &State) -> bool {
        state.requests.len() <= 2
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("a term is given once", |_, state: &State| {
                let pairs = || {
                    state
                        .done
                        .iter()
                        .flat_map(|one| state.done.iter().map(move |two| (one, two)))
                };
                pairs().all(|(one, two)| {
                    (term(one.1) != term(two.1) || one.1 == two.1)
                        && (two.0 == 0 || term(one.1) != term(two.0) || one.1 == two.0)
                })
            }),
            Property::sometimes(
                "the second node takes over by a fence",
                |_, state: &State| !state.nodes[0].alive && state.nodes[1].known == 3 << 2 | 2,
            ),
        ]
    }
}

fn check(planted: Planted, crashes: u8, terms: u64) -> impl Checker<Fences> {
    let checker = Fences {
        planted,
        crashes,
        terms,
    }
    .checker()
    .threads(2)
    .spawn_bfs()
    .join();
    println!(
        "{planted:?}: {} states, depth {}",
        checker.unique_state_count(),
        checker.max_depth()
    );
    checker
}

#[test]
fn a_grant_is_given_once() {
    for (crashes, terms) in [(0, 4), (1, 3)] {
        check(Planted::Nothing, crashes, terms).assert_properties();
    }
}

#[test]
fn planted_defects_are_found() {
    for planted in [Planted::FencesUnmet, Planted::Answers, Planted::Alone] {
        let found = check(planted, 0, 5).discovery("a term is given once");
        assert!(found.is_some(), "{planted:?}");
    }
}
