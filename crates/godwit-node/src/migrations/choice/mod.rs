//! What a migration chooses for itself: its policy, and whether the disk leaves its image behind.

pub(super) mod auto;
pub(super) mod base;
pub(super) mod pace;
