//! The planes of a VM's move: its disks, its memory and its NICs. Each moves in its own way until all of them switch
//! over together.

pub(in crate::vms) mod convergence;
pub(super) mod disks;
pub(super) mod memory;
pub(crate) mod nics;
pub(in crate::vms) mod rollback;

use godwit_api::ErrorBody;
use godwit_qemu::inspect::Facts;
use godwit_qemu::machine::Machine;

use crate::vms::outgoing::departure::{Departure, SourceLink};

/// A plane at the source. The coordinator calls `start`, `converged` and `freeze` in this order, unless the steps of the
/// move have no such step for the plane. The coordinator may drop any of these calls to cancel the move, and then calls
/// `take_back` of the planes, and after that `clear` of all. A plane records its progress in the table of the VMs' moves.
///
/// A waiting method returns an error once its own plane cannot go on; [`Self::broken`] reports the same to a
/// coordinator that waits for another plane.
pub(super) trait Plane {
    /// Returns the blockers at this node, a sentence each.
    fn preflight(of: &Departure, machine: &Machine, facts: &Facts) -> Vec<String>;

    /// Begins to move the plane, beside the running guest.
    ///
    /// # Errors
    /// The plane cannot move.
    fn start(&mut self, _: &Departure) -> impl Future<Output = Result<(), ErrorBody>> + Send {
        async { Ok(()) }
    }

    /// Waits until only later changes of the guest are left to move, and the parts that need a stopped guest.
    ///
    /// # Errors
    /// The plane cannot go on.
    fn converged(&mut self, _: &Departure) -> impl Future<Output = Result<(), ErrorBody>> + Send {
        async { Ok(()) }
    }

    /// Waits until a started plane cannot go on, and returns the reason.
    fn broken(&self, _: &Departure) -> impl Future<Output = ErrorBody> + Send {
        std::future::pending()
    }

    /// Sends the destination the state that the guest needs to run, once the guest stands still.
    ///
    /// # Errors
    /// The destination does not get the state.
    fn freeze(
        &mut self,
        _: &Departure,
        _: &mut SourceLink,
    ) -> impl Future<Output = Result<(), ErrorBody>> + Send {
        async { Ok(()) }
    }

    /// Restores the guest's view of the plane after a move cancelled before the handover.
    fn take_back(&mut self, of: &Departure) -> impl Future<Output = ()> + Send;

    /// Ends the rest of the move's work once the guest goes on.
    fn clear(&mut self, of: &Departure) -> impl Future<Output = ()> + Send;
}
