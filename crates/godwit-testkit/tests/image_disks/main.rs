//! Disks created from images: usable at once and fetched on reading, even when nodes die meanwhile or the repository is
//! away.

mod fetching;
mod fixture;
mod known;
mod leaving;
mod machines;
mod monitors;
mod moving;
mod repository;
mod waiting;
