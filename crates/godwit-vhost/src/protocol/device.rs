//! The protocol's requirements of a device.

use crate::features::MOST_RINGS;
use crate::protocol::session::{FrontEndCommand, FrontEndError};

/// Gets the result of a step of the protocol: a ring's index if the step was to stop the ring, otherwise a number
/// without meaning.
pub type FrontEndReply = Box<dyn FnOnce(Result<u16, FrontEndError>) + Send>;

/// A device with rings: a disk, a NIC. The protocol's thread calls the device; another thread serves the rings.
pub trait Device: Clone + Send + 'static {
    /// Returns the name for logs and threads.
    fn name(&self) -> &str;

    /// Returns the features offered beside [`TRANSPORT`](super::features::TRANSPORT).
    fn features(&self) -> u64;

    /// Returns the number of queues offered: rings of a disk, ring pairs of a NIC.
    fn queues(&self) -> u64 {
        u64::from(MOST_RINGS)
    }

    /// Returns true if the device announces the machine to the network when a front end asks
    /// ([`FrontEndCommand::Announce`]).
    fn announces(&self) -> bool {
        false
    }

    /// Returns true if the device has a configuration for the front end to read.
    fn has_configuration(&self) -> bool {
        true
    }

    /// Returns `size` bytes of the configuration, from `offset`; `None` if the range ends past the longest possible
    /// configuration.
    fn configuration(&self, offset: u32, size: u32) -> Option<Vec<u8>>;

    /// Carries out a step of the protocol, and replies once the step has taken effect. Must not block.
    fn front_end(&self, command: FrontEndCommand, reply: FrontEndReply);
}
