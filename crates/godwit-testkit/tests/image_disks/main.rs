//! Disks that are created from images: usable at once, fetched as they are read, whoever dies meanwhile and whether
//! or not the repository is there.

mod away;
mod bad;
mod fetching;
mod fixture;
mod known;
mod leaving;
mod machines;
mod monitors;
mod moving;
mod odd_node;
mod peers;
mod s3;
mod waiting;
