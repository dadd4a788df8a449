//! Transfers: changed on the way, compared, delta, holes, images and policies.

#[path = "../support/acknowledge.rs"]
mod acknowledge;
mod activity;
mod changes;
mod chunk_lengths;
mod comparing;
mod deltas;
mod long_holes;
mod on_image;
mod policies;
#[path = "../support/mod.rs"]
mod support;
