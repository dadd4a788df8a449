//! Disks that are created from images: usable at once, fetched as they are read, whoever dies meanwhile and whether
//! or not the repository is there.

mod bad;
mod fetching;
mod fixture;
mod leaving;
mod machines;
mod moving;
mod peers;
mod waiting;
