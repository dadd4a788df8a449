//! The number and length of chunks in flight.

pub(in crate::controller) mod busy_window;
pub(in crate::controller) mod idle_window;
