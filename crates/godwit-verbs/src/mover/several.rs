//! A model of several simultaneous moves of connected processes. The model tries every order in which the moves claim,
//! wait, are cancelled and end.

use std::collections::{BTreeMap, BTreeSet};

use super::{Claims, Link, Party, Taking, Wanted};

/// Each node has one process, with the node's number.
fn node(pid: u32) -> String {
    format!("n{pid}")
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Mover {
    /// The move makes its claims.
    Takes(Taking),
    /// The move gives back its claims one by one, and will then wait for the claim in the second field.
    GivesBack(Vec<Wanted>, Wanted),
    /// The move has no claim and waits for this one.
    Waits(Wanted),
    /// The move has all claims and moves the process.
    Moves,
    Ended,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Several {
    claims: BTreeMap<String, Claims>,
    movers: Vec<Mover>,
}

/// The kind of a mover's step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Did {
    /// The mover made, gave back or asked for a claim.
    Asked,
    /// The mover got its last claim or ended.
    CameOn,
    /// The mover was cancelled, or its node died.
    GaveUp,
}

struct Graph {
    /// The processes that move, each with its partners.
    moves: Vec<(u32, Vec<u32>)>,
    /// True if all moves claim in one order; otherwise each move claims its own process first.
    one_order: bool,
}

impl Graph {
    fn taking(&self, mover: usize) -> Taking {
        let (pid, partners) = &self.moves[mover];
        let party = |pid: &u32| {
            let link = Link { ours: 1, theirs: 1 };
            let links = vec![link];
            (node(*pid), Party { pid: *pid, links })
        };
        let partners: Vec<_> = partners.iter().map(party).collect();
        // A name that sorts before all others puts the own process first.
        let own = if self.one_order {
            node(*pid)
        } else {
            format!("0-{}", node(*pid))
        };
        Taking::new(&own, *pid, &partners)
    }

    fn begin(&self) -> Several {
        let pids = self
            .moves
            .iter()
            .flat_map(|(pid, partners)| partners.iter().chain([pid]));
        Several {
            claims: pids.map(|pid| (node(*pid), Claims::default())).collect(),
            movers: (0..self.moves.len())
                .map(|mover| Mover::Takes(self.taking(mover)))
                .collect(),
        }
    }

    fn claim(world: &mut Several, mover: usize, wanted: &Wanted) -> bool {
        let claims = world.claims.get_mut(&node(wanted.pid)).unwrap();
        let id = mover.to_string();
        if wanted.moves {
            claims.to_move(wanted.pid, &id).is_ok()
        } else {
            claims.to_hold(wanted.pid, &id).is_ok()
        }
    }

    fn give_back(world: &mut Several, mover: usize, taken: &[Wanted]) {
        for wanted in taken {
            let claims = world.claims.get_mut(&node(wanted.pid)).unwrap();
            claims.give_back(wanted.pid, &mover.to_string());
        }
    }

    fn everything(&self, mover: usize) -> Vec<Wanted> {
        let mut taking = self.taking(mover);
        while taking.next().is_some() {
            taking.took();
        }
        taking.give_back().to_vec()
    }

    /// Returns the mover's next step, and then the steps that can be forced on the mover.
    fn steps(&self, world: &Several, mover: usize) -> Vec<(Did, Several)> {
        let mut steps = Vec::new();
        let mut next = world.clone();
        let did = match world.movers[mover].clone() {
            Mover::Ended => return steps,
            Mover::Moves => {
                Self::give_back(&mut next, mover, &self.everything(mover));
                next.movers[mover] = Mover::Ended;
                steps.push((Did::CameOn, next));
                return steps;
            }
            Mover::Takes(mut taking) => {
                let wanted = taking.next().unwrap().clone();
                if Self::claim(&mut next, mover, &wanted) {
                    taking.took();
                    let all = taking.next().is_none();
                    next.movers[mover] = if all {
                        Mover::Moves
                    } else {
                        Mover::Takes(taking)
                    };
                    if all { Did::CameOn } else { Did::Asked }
                } else {
                    next.movers[mover] = Mover::GivesBack(taking.give_back().to_vec(), wanted);
                    Did::Asked
                }
            }
            Mover::GivesBack(mut rest, wanted) => {
                next.movers[mover] = match rest.pop() {
                    Some(one) => {
                        Self::give_back(&mut next, mover, &[one]);
                        Mover::GivesBack(rest, wanted)
                    }
                    None => Mover::Waits(wanted),
                };
                Did::Asked
            }
            Mover::Waits(wanted) => {
                if Self::claim(&mut next, mover, &wanted) {
                    Self::give_back(&mut next, mover, &[wanted]);
                    next.movers[mover] = Mover::Takes(self.taking(mover));
                }
                Did::Asked
            }
        };
        steps.push((did, next));
        let mut gives_up = world.clone();
        // Giving back a claim that was never taken has no effect.
        Self::give_back(&mut gives_up, mover, &self.everything(mover));
        gives_up.movers[mover] = Mover::Ended;
        steps.push((Did::GaveUp, gives_up));
        steps
    }

    fn no_process_is_moved_and_held(&self, world: &Several) {
        let moving = (0..self.moves.len()).filter(|mover| world.movers[*mover] == Mover::Moves);
        let moving: Vec<usize> = moving.collect();
        for mover in &moving {
            let (pid, partners) = &self.moves[*mover];
            assert!(world.claims[&node(*pid)].is_moved(*pid), "{world:?}");
            for partner in partners {
                assert!(
                    world.claims[&node(*partner)].holder(*partner).is_some(),
                    "{world:?}"
                );
                let both = moving.iter().any(|other| self.moves[*other].0 == *partner);
                assert!(!both, "a process and its partner move at once: {world:?}");
            }
        }
    }

    /// Returns true if some order lets all waiting movers ask forever without progress of any mover.
    fn can_go_round_for_ever(&self) -> bool {
        let mut states: Vec<Several> = vec![self.begin()];
        let mut known: BTreeMap<Several, usize> = [(self.begin(), 0)].into();
        // For each state: the asking movers and the resulting states.
        let mut asks: Vec<Vec<(usize, usize)>> = Vec::new();
        let mut at = 0;
        while at < states.len() {
            let world = states[at].clone();
            self.no_process_is_moved_and_held(&world);
            let mut asked = Vec::new();
            for mover in 0..world.movers.len() {
                for (did, next) in self.steps(&world, mover) {
                    let place = *known.entry(next.clone()).or_insert_with(|| {
                        states.push(next);
                        states.len() - 1
                    });
                    if did == Did::Asked {
                        asked.push((mover, place));
                    }
                }
            }
            asks.push(asked);
            at += 1;
        }
        let reached = |from: usize| {
            let (mut seen, mut open) = (BTreeSet::new(), vec![from]);
            while let Some(place) = open.pop() {
                let next = asks[place].iter().map(|(_, to)| *to);
                open.extend(next.filter(|to| seen.insert(*to)));
            }
            seen
        };
        let all: Vec<BTreeSet<usize>> = (0..states.len()).map(reached).collect();
        (0..states.len()).any(|start| {
            let round = |place: &usize| all[*place].contains(&start);
            let inside: BTreeSet<usize> = all[start].iter().copied().filter(round).collect();
            let who = inside.iter().flat_map(|place| {
                let asked = asks[*place].iter();
                asked
                    .filter(|(_, to)| inside.contains(to))
                    .map(|(mover, _)| *mover)
            });
            let who: BTreeSet<usize> = who.collect();
            let open = states[start].movers.iter();
            let open = open.filter(|mover| **mover != Mover::Ended).count();
            !inside.is_empty() && who.len() == open
        })
    }
}

fn graphs() -> Vec<Vec<(u32, Vec<u32>)>> {
    vec![
        // Both ends of a connection.
        vec![(1, vec![2]), (2, vec![1])],
        // Three in a circle, all connected to each other.
        vec![(1, vec![2, 3]), (2, vec![1, 3]), (3, vec![1, 2])],
        // A row of three, and a stationary process between two moving ones.
        vec![(1, vec![2]), (2, vec![1, 3]), (3, vec![2])],
        vec![(1, vec![2]), (3, vec![2])],
    ]
}

#[test]
fn moves_of_processes_that_are_connected_to_each_other_all_come_to_their_turn() {
    for moves in graphs() {
        let graph = Graph {
            moves,
            one_order: true,
        };
        assert!(!graph.can_go_round_for_ever(), "{:?}", graph.moves);
    }
}

#[test]
fn without_one_order_two_moves_could_stop_each_other_for_ever() {
    let graph = Graph {
        moves: graphs().swap_remove(0),
        one_order: false,
    };
    assert!(graph.can_go_round_for_ever());
}

#[test]
fn moves_with_one_partner_do_not_wait_for_each_other() {
    let graph = Graph {
        moves: vec![(1, vec![2]), (3, vec![2])],
        one_order: true,
    };
    let mut world = graph.begin();
    for mover in [0, 0, 1, 1] {
        world = graph.steps(&world, mover).swap_remove(0).1;
    }
    assert_eq!(world.movers, [Mover::Moves, Mover::Moves]);
}
