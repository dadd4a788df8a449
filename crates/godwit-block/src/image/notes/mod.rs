//! Files beside an image: missing blocks, and written blocks.

pub mod missing;
pub mod written;
