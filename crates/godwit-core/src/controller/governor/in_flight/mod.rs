//! How many chunks may be in flight, and how long they may be.

pub(in crate::controller) mod busy_window;
pub(in crate::controller) mod idle_window;
mod queueing_ratio;
