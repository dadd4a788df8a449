//! Removal of images, and of chunks without an image.

pub(crate) mod collect;
pub(in crate::repository) mod lease;
pub(crate) mod uses;
