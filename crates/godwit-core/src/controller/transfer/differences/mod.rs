//! The part of a disk already at the destination: in an image left there, or in the image that the disk was created
//! from.

pub(in crate::controller) mod base;
pub(in crate::controller) mod on_image;
pub(in crate::controller) mod written;

use self::base::BecomingBase;
use self::on_image::OnImage;
use self::written::Written;

/// Differences of this node's disk from images elsewhere, as far as they are known.
#[derive(Debug, Default)]
pub(in crate::controller) struct Differences {
    /// Blocks written since a migration brought the disk here, if this process knows all such blocks.
    pub(in crate::controller) written: Option<Written>,
    /// The image of a disk that has left.
    pub(in crate::controller) base: BecomingBase,
    /// Blocks that are as in the disk's image; present once needed.
    pub(in crate::controller) on_image: Option<Box<OnImage>>,
}
