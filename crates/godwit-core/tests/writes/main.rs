//! Guest writes during a move.

#[path = "../support/acknowledge.rs"]
mod acknowledge;
mod checkpoints;
mod combined_writes;
mod following;
mod hot_writes;
mod late_requests;
mod posted_writes;
mod receiving;
mod stopped_machine;
#[path = "../support/mod.rs"]
mod support;
mod taking;
