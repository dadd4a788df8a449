//! The checkpoints of a backup: which one is whole.

use crate::checkpoints::Checkpoint;

/// The parts of checkpoints that have come to a backup. Parts of one kind come in order; parts of different kinds, the
/// memory and each disk, come on different connections.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Gathering {
    /// The last checkpoint whose memory and device state are here.
    memory: Checkpoint,
    /// The last checkpoint with which each disk is here.
    disks: Vec<Checkpoint>,
    whole: Checkpoint,
}

impl Gathering {
    /// Starts a session of a machine with this many disks, before the first checkpoint.
    pub fn new(disks: usize) -> Self {
        Self {
            memory: Checkpoint(0),
            disks: vec![Checkpoint(0); disks],
            whole: Checkpoint(0),
        }
    }

    /// Notes that the memory and the device state of a checkpoint are here. Returns the checkpoint that became whole:
    /// the backup keeps it, and acknowledges it.
    ///
    /// # Errors
    /// The checkpoint does not follow the last one.
    pub fn memory_came(&mut self, number: Checkpoint) -> Result<Option<Checkpoint>, OutOfOrder> {
        if number != self.memory.next() {
            return Err(OutOfOrder(number));
        }
        self.memory = number;
        Ok(self.whole_now())
    }

    /// Notes that all writes of a disk up to a checkpoint are here, as [`Self::memory_came`].
    ///
    /// # Errors
    /// There is no such disk, or the checkpoint does not follow the disk's last one.
    pub fn disk_came(
        &mut self,
        disk: usize,
        number: Checkpoint,
    ) -> Result<Option<Checkpoint>, OutOfOrder> {
        let known = self.disks.get_mut(disk).ok_or(OutOfOrder(number))?;
        if number != known.next() {
            return Err(OutOfOrder(number));
        }
        *known = number;
        Ok(self.whole_now())
    }

    /// Returns the last whole checkpoint, from which a takeover goes on. `None` before the first.
    pub fn whole(&self) -> Option<Checkpoint> {
        (self.whole > Checkpoint(0)).then_some(self.whole)
    }

    fn whole_now(&mut self) -> Option<Checkpoint> {
        let least = self.disks.iter().copied().fold(self.memory, Ord::min);
        let grows = least > self.whole;
        self.whole = self.whole.max(least);
        grows.then_some(least)
    }
}

/// A part of a checkpoint that does not follow the last one of its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfOrder(pub Checkpoint);

impl core::fmt::Display for OutOfOrder {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "checkpoint {} does not follow the last one", self.0)
    }
}

impl core::error::Error for OutOfOrder {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_is_whole_once_every_part_is_here() {
        let mut backup = Gathering::new(2);
        assert_eq!(backup.whole(), None);
        assert_eq!(backup.memory_came(Checkpoint(1)), Ok(None));
        assert_eq!(backup.disk_came(1, Checkpoint(1)), Ok(None));
        assert_eq!(backup.memory_came(Checkpoint(2)), Ok(None));
        assert_eq!(backup.disk_came(0, Checkpoint(1)), Ok(Some(Checkpoint(1))));
        assert_eq!(backup.disk_came(0, Checkpoint(2)), Ok(None));
        assert_eq!(backup.whole(), Some(Checkpoint(1)));
        assert_eq!(backup.disk_came(1, Checkpoint(2)), Ok(Some(Checkpoint(2))));
    }

    #[test]
    fn the_memory_of_a_machine_without_disks_is_all_of_its_checkpoint() {
        let mut backup = Gathering::new(0);
        assert_eq!(backup.memory_came(Checkpoint(1)), Ok(Some(Checkpoint(1))));
    }

    #[test]
    fn a_part_that_skips_or_repeats_a_checkpoint_is_refused() {
        let mut backup = Gathering::new(1);
        let skipped = backup.memory_came(Checkpoint(2));
        assert_eq!(skipped, Err(OutOfOrder(Checkpoint(2))));
        assert_eq!(backup.disk_came(0, Checkpoint(1)), Ok(None));
        let repeated = backup.disk_came(0, Checkpoint(1));
        assert_eq!(repeated, Err(OutOfOrder(Checkpoint(1))));
        let foreign = backup.disk_came(1, Checkpoint(1));
        assert_eq!(foreign, Err(OutOfOrder(Checkpoint(1))));
        assert_eq!(backup.whole(), None);
    }
}
