//! The part of a disk already at the destination: in an image left there, or in the image that the disk was created
//! from.

pub(in crate::controller) mod base;
pub(in crate::controller) mod on_image;
pub(in crate::controller) mod written;
