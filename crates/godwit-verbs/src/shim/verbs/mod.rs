//! Making, changing and destroying objects: a file for each kind.

pub(super) mod completions;
pub(super) mod completions_ex;
pub(super) mod contexts;
pub(super) mod datagrams;
pub(super) mod extended;
pub(super) mod passed;
pub(super) mod queue_pairs;
pub(super) mod shared_receives;
pub(super) mod windows;
