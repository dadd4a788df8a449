//! The invariants, checked after every step.

pub(super) mod authority;
pub(super) mod promise;
mod settle;
