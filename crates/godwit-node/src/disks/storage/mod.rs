//! What disks are kept in: their images, where those are put, and what they may come to need.

pub(crate) mod image;
pub(crate) mod placement;
pub(crate) mod promised;
