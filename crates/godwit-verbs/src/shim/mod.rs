//! The functions that applications call instead of libibverbs.
//!
//! Every function here takes pointers that an application got from this library, with the same requirements as the
//! function of libibverbs in its place. Therefore these functions are `unsafe`, and most of the unsafe code has no
//! other reason.

#![allow(unsafe_op_in_unsafe_fn, clippy::missing_safety_doc)]

mod data_path;
mod descriptors;
mod exports;
mod moving;
mod objects;
mod presetup;
mod real;
mod verbs;
mod world;

pub use data_path::polling::{poll_cq, req_notify_cq};
pub use data_path::posting::{post_recv, post_send};
pub use moving::{
    Attached, Connection, Obstacle, PreparedPair, QueuePairState, Recreated, abandon, attach,
    connect, drain, mark_written, needs, obstacles, prepare, queue_pairs, recreate, redirects,
    release, resume, suspend, switch, tidy, track_written,
};
pub use presetup::{
    HandedOver, HeldPair, Plan, Planned, connect_held, hand_over, hold, is_holder, plan,
    serve_as_holder,
};
pub use real::{Real, install};
pub use verbs::completions::{
    ack_cq_events, create_comp_channel, create_cq, destroy_comp_channel, destroy_cq, get_cq_event,
    resize_cq,
};
pub use verbs::contexts::{
    alloc_pd, close_device, dealloc_pd, dereg_mr, open_device, reg_mr, rereg_mr,
};
pub use verbs::datagrams::{Redirect, create_ah, destroy_ah, redirect};
pub use verbs::extended::qp_to_qp_ex;
pub use verbs::queue_pairs::{attach_mcast, create_qp, destroy_qp, modify_qp, query_ece, query_qp};
pub use verbs::shared_receives::{create_srq, destroy_srq, modify_srq, post_srq_recv, query_srq};
