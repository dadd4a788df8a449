//! What the protocol asks of a device.

use crate::features::MOST_RINGS;
use crate::protocol::session::{FrontEndCommand, FrontEndError};

/// Gets the result of a step of the protocol: a ring's index when the step was to stop it, otherwise
/// nothing of interest.
pub type FrontEndReply = Box<dyn FnOnce(Result<u16, FrontEndError>) + Send>;

/// A device whose rings somebody serves: a disk, a NIC. The protocol's thread calls it; the rings are
/// served elsewhere.
pub trait Device: Clone + Send + 'static {
    /// What logs and threads call it.
    fn name(&self) -> &str;

    /// What it offers beside [`TRANSPORT`](super::features::TRANSPORT).
    fn features(&self) -> u64;

    /// How many queues it says it has: rings of a disk, pairs of rings of a NIC.
    fn queues(&self) -> u64 {
        u64::from(MOST_RINGS)
    }

    /// Whether it tells the network where its machine is when a front end asks for that
    /// ([`FrontEndCommand::Announce`]).
    fn announces(&self) -> bool {
        false
    }

    /// Whether it has a configuration that the front end asks for.
    fn has_configuration(&self) -> bool {
        true
    }

    /// The `size` bytes from `offset` of its configuration; `None` when they end past the longest there
    /// can be.
    fn configuration(&self, offset: u32, size: u32) -> Option<Vec<u8>>;

    /// Carries out a step of the protocol, and answers it when it has taken effect. Must not block.
    fn front_end(&self, command: FrontEndCommand, reply: FrontEndReply);
}
