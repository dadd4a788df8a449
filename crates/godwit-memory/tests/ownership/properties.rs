//! Properties that must hold whatever crashes, and outcomes that must be possible for the model to be meaningful.

use stateright::Property;

use super::{Disks, Move, NODES, PARTS, State, Stored};

pub(crate) const ONCE: &str = "the guest runs once at most";
pub(crate) const OWNER: &str = "who runs the guest owns its memory";
pub(crate) const WHOLE: &str = "who runs the guest has all of its memory";
pub(crate) const DISKS: &str = "who runs the guest has its disks";
pub(crate) const ENDS: &str = "who gives a move up says so to the destination";
pub(crate) const KEPT: &str = "who owns the memory knows of the machine";

/// Returns the properties of a VM with disks, or without.
pub(crate) fn all(has_disks: bool) -> Vec<Property<Move>> {
    let mut all = vec![
        Property::always(ONCE, |_, state: &State| running(state).count() <= 1),
        Property::always(OWNER, |_, state: &State| {
            running(state).all(|node| state.title.owner == NODES[node])
        }),
        Property::always(WHOLE, |_, state: &State| {
            running(state).all(|node| state.nodes[1 - node].local == 0)
        }),
        Property::always(ENDS, |_, state: &State| {
            (0..2).all(|node| match state.nodes[node].stored {
                Stored::Incoming(offered) => {
                    let other = state.nodes[1 - node];
                    other.stored != Stored::Here || state.title.epoch > offered
                }
                _ => true,
            })
        }),
        Property::always(KEPT, |_, state: &State| {
            let owner = usize::from(state.title.owner != NODES[0]);
            state.nodes[owner].stored != Stored::Nothing
        }),
        Property::sometimes("the guest runs at the other node", |_, state: &State| {
            state.nodes[1].runs
        }),
        Property::sometimes("it comes back", |_, state: &State| {
            state.nodes[0].runs && state.title.epoch > 2 && state.nodes[0].stored == Stored::Here
        }),
        Property::sometimes("its memory follows it there", |_, state: &State| {
            state.nodes[1].runs && state.nodes[1].local == PARTS
        }),
        Property::sometimes(
            "memory is half moved when its node starts again",
            |_, state: &State| {
                let node = state.nodes[0];
                state.crashes > 0 && node.up && node.local == 1 && node.remembered == 0
            },
        ),
        Property::sometimes("what was local is offered later", |_, state: &State| {
            state.moves > 1 && matches!(state.nodes[0].stored, Stored::Outgoing(_))
        }),
    ];
    if has_disks {
        all.push(Property::always(DISKS, |_, state: &State| {
            running(state).all(|node| state.disks == Disks::At(node))
        }));
    }
    all
}

/// Returns the nodes whose QEMU runs the guest.
fn running(state: &State) -> impl Iterator<Item = usize> {
    (0..2).filter(|node| state.nodes[*node].runs)
}
