//! What of a disk the destination does not have already: in an image that stayed there, or in the image that the disk was
//! created from.

pub(in crate::controller) mod base;
pub(in crate::controller) mod on_image;
pub(in crate::controller) mod written;
