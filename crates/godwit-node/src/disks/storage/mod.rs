//! The storage of disks: images, their placement, and the space that images may still need.

pub(crate) mod image;
pub(crate) mod placement;
pub(crate) mod promised;
