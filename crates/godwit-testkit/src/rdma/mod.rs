//! The RDMA test bed: virtual machines with soft-RoCE (`rdma_rxe`) on one network, in QEMU without KVM.
//!
//! `scripts/build-rdma-guest` makes their boot image. The last guest's QEMU is the network's hub, to which the others
//! are connected; guest N has the address 10.0.0.N and the RDMA device rxe0. Commands go through a virtio port of their
//! own, not over the guests' network.

mod bed;
mod guest;
mod moving;
mod nodes;
mod payload;
mod perftest;
mod place;
mod program;

pub use bed::Bed;
pub use guest::{Output, RdmaGuest};
pub use moving::{
    Breakdown, MoveSeen, Moved, detach_container_move, detach_move, move_container,
    move_control_group, move_process, preflight, preflight_container, see_move,
};
pub use nodes::{certificates, kill_node, start_node};
pub use payload::payload;
pub use perftest::{write_bw, write_bw_through_a_move};
pub use place::Place;
pub use program::{
    ALIAS, AtWork, PARTNER_ALIAS, Program, Side, checked_end, clean_up, connected, listening, said,
};
