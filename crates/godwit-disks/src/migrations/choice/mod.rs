//! Choices that a migration makes by itself: its policy, and a move without the base image.

pub(super) mod auto;
pub(super) mod base;
pub(super) mod pace;
