//! Both ends of a disk's move: the data sent to the other node, and the time of sending.

pub(super) mod differences;
pub(super) mod double_write;
pub(super) mod follow;
pub(super) mod heat;
pub(super) mod outgoing;
pub(super) mod pass;
pub(super) mod pause;
pub(super) mod receive;
pub(super) mod remainder;
pub(super) mod verify_hole;
pub(super) mod window;
