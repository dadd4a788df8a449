//! The disks of a node, their moves, and the images that disks are created from.

pub mod disks;
pub mod images;
pub mod migrations;
