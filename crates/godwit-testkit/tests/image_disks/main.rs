//! Disks created from images: usable at once and fetched on reading, even when nodes die meanwhile or the repository is
//! away.

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
