//! The seam between a transfer and its policy: the reach of a guest's write, the window's next extent, and the rest
//! allowed at the switchover.

use crate::controller::PushOptions;
use crate::controller::block_set::BlockSet;
use crate::controller::transfer::pass::Pass;
#[cfg(feature = "planted-bugs")]
use crate::planted::PlantedBug;
use crate::units::{Extent, Lba, Sectors, Time};

/// Route of a guest's write that waits for no chunk. The local disk gets the write in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::controller) enum Route {
    /// To the local disk; a copy brings the data to the destination.
    Local,
    /// Remembered, and sent to the destination later.
    Later,
    /// To both nodes now.
    Both,
}

/// Method by which the destination gets the disk.
///
/// The source calls a policy at each of the events below. The defaults are a policy that sends the whole disk in one
/// pass, remembers nothing, and leaves nothing behind.
pub(in crate::controller) trait Policy {
    // Writes of the guest. These calls are on the path of each request.

    /// Returns true if a write has to reach the destination in a pass, now or later. `behind` is true if the write
    /// begins behind the read head.
    fn reaches(&self, pass: Pass, behind: bool) -> bool;

    /// Returns true if writes of this pass are only remembered: a later round, or a pull, sends the data.
    fn only_marks(&self, _: Pass) -> bool {
        false
    }

    /// Marks a write of the guest that the destination does not receive. Returns true if the policy remembers the
    /// write.
    fn mark(&mut self, _: Pass, _: Extent) -> bool {
        false
    }

    /// Returns true if writes usually go to both nodes, so that keeping back writes to hot places pays.
    fn doubles(&self) -> bool {
        false
    }

    /// Returns true if every write goes to both nodes.
    fn mirrors(&self) -> bool {
        false
    }

    /// Returns true if writes never wait for a chunk in flight, because their blocks are copied again; `None` if the
    /// promise to the guest decides.
    fn lets_writes_through(&self, _: Pass) -> Option<bool> {
        None
    }

    // Copying passes.

    /// Begins a copying pass at the start of the disk; returns the bytes of the pass.
    fn begin_round(&mut self, _: Pass, capacity: Sectors) -> u64 {
        capacity.bytes().0
    }

    /// Returns the next extent of a copying pass at or behind `head`, limited to `limit` sectors.
    fn next(&self, _: Pass, head: Lba, limit: u32, capacity: Sectors) -> Option<Extent> {
        next_of_all(head, limit, capacity)
    }

    /// Notes that a chunk of a copying pass is locked: later writes are not part of the chunk.
    fn locked(&mut self, _: Pass, _: Extent) {}

    /// Notes that the window was given up: these chunks of a copying pass, and the rest of the last chunk's block, have
    /// not been copied.
    fn give_up(&mut self, _: Pass, _: impl Iterator<Item = Extent>, _head: Lba) {}

    /// Returns true if this pass is one of the rounds that may not converge: blocks written meanwhile are sent by the
    /// next round. The round in which writes go to both nodes is not.
    fn sends_again(&self, _: Pass) -> bool {
        false
    }

    /// Returns true if a round follows `round`, which has just ended. `compares` is true if the disks are compared
    /// next.
    fn goes_on(&mut self, _: Pass, _round: u32, _compares: bool) -> bool {
        false
    }

    /// Returns true if enough was written for another round while the switchover waits.
    fn is_due_again(&self, _: Pass) -> bool {
        false
    }

    /// Hands over the rest before the disks are compared; the caller remembers the rest from then on.
    fn take_rest(&mut self, _: impl FnMut(Extent)) {}

    // The switchover.

    /// Returns the bytes written since their copy, to be copied while the guest is held.
    fn rest(&self) -> u64 {
        0
    }

    /// Returns true if the disk may change hands without a part, which the destination pulls. Such a policy itself keeps
    /// the blocks that the destination lacks, and is to leave too soon for a comparison of the disks.
    fn pulls(&self) -> bool {
        false
    }

    /// Returns the bytes that stay at the source if the disk changes hands now.
    fn owes(&self) -> u64 {
        0
    }

    /// Visits the blocks that stay at the source, in runs of equal heat.
    fn each_owed(&self, _: impl FnMut(Lba, u32, u8)) {}

    /// Notes that the destination has the whole disk except these blocks, before anything is sent.
    fn lacks_only(&mut self, _: &BlockSet) {}

    /// Notes a hole: blocks of these sectors that are not in `sent` are zeroes at both nodes.
    fn is_hole(&mut self, _start: Lba, _end: Lba, _sent: &BlockSet) {}

    /// Returns the time at which the disk is handed over, whatever the destination lacks; `None` once the time has
    /// come.
    fn leaves_at(&self) -> Option<Time> {
        None
    }

    /// Advances the clock. Returns true once that time has come.
    fn pass_time(&mut self, _: Time) -> bool {
        false
    }

    /// Returns true if the disk is handed over before the end of a pass, because the handover was `ordered` or its time
    /// has come.
    fn leaves(&self, _ordered: bool) -> bool {
        false
    }

    // A change of a running migration.

    /// Applies new options of push and pull. Returns false if the migration has another policy.
    fn change(&mut self, _: PushOptions, _: Time) -> bool {
        false
    }

    /// Hands over all that the policy remembers, because another policy takes over. No chunk is in flight.
    fn step_aside(&mut self, _head: Lba, _: impl FnMut(Extent)) {}

    /// Plants a defect of this policy.
    #[cfg(feature = "planted-bugs")]
    fn plant(&mut self, _: PlantedBug) {}
}

/// Returns the next extent of a pass over the whole disk.
pub(super) fn next_of_all(head: Lba, limit: u32, capacity: Sectors) -> Option<Extent> {
    let left = capacity.0.saturating_sub(head.0);
    Extent::new(head, left.min(u64::from(limit)) as u32)
}
