//! The planes of a machine's move: its disks, its memory and its NICs, which move each in a way of their own until all of
//! them change hands together.

pub(in crate::vms) mod convergence;
pub(super) mod disks;
pub(super) mod memory;
pub(in crate::vms) mod nics;
pub(in crate::vms) mod rollback;

use godwit_api::ErrorBody;
use godwit_qemu::inspect::Facts;
use godwit_qemu::machine::Machine;

use crate::vms::outgoing::departure::{Departure, SourceLink};

/// One plane, at the source. The coordinator calls `start`, `converged`, `freeze` and `hand_over` in this order, and
/// may drop any of these calls to give the move up: then it calls `take_back` of all planes, and after that `clear`
/// of all. How far it is a plane tells the table of the machines' moves.
///
/// A method that waits ends with an error once its own plane cannot go on; [`Self::broken`] is for who waits for
/// something else.
pub(super) trait Plane {
    /// What stands in its way at this node, a sentence each.
    fn preflight(of: &Departure, machine: &Machine, facts: &Facts) -> Vec<String>;

    /// Begins to move, beside the guest that runs.
    ///
    /// # Errors
    /// It cannot.
    fn start(&mut self, of: &Departure) -> impl Future<Output = Result<(), ErrorBody>> + Send;

    /// Ready when nothing is left to move but what the guest changes from now on, and what a guest that stands still
    /// waits for.
    ///
    /// # Errors
    /// It does not move any more.
    fn converged(&mut self, of: &Departure) -> impl Future<Output = Result<(), ErrorBody>> + Send;

    /// Ready, with the reason, when a plane that was started cannot go on.
    fn broken(&self, of: &Departure) -> impl Future<Output = ErrorBody> + Send;

    /// The guest stands still: the destination gets what it cannot run the guest without.
    ///
    /// # Errors
    /// It does not get it.
    fn freeze(
        &mut self,
        of: &Departure,
        destination: &mut SourceLink,
    ) -> impl Future<Output = Result<(), ErrorBody>> + Send;

    /// Every plane is frozen: gives the plane to the destination, for good.
    ///
    /// # Errors
    /// It was not given away.
    fn hand_over(&mut self, of: &Departure) -> impl Future<Output = Result<(), ErrorBody>> + Send;

    /// The move is given up before anything was given away: what the guest has of the plane is as it was before.
    fn take_back(&mut self, of: &Departure) -> impl Future<Output = ()> + Send;

    /// The guest goes on: ends what is still under way on behalf of the move.
    fn clear(&mut self, of: &Departure) -> impl Future<Output = ()> + Send;
}
