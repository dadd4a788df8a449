//! The measurements of one machine.

mod moving;
mod steady;
mod timeline;

pub(crate) use moving::{Moved, moving};
pub(crate) use steady::{Steady, steady};
pub(crate) use timeline::Sample;
