//! The storage of disks: images, their placement, and the space that images may still need.

pub mod image;
pub mod placement;
pub mod promised;
