//! The RDMA test bed: virtual machines with soft-RoCE (`rdma_rxe`) on one network, in QEMU without KVM.
//!
//! `scripts/build-rdma-guest` makes what they boot. The last guest's QEMU is the network's hub, the
//! others are connected to it; guest N has the address 10.0.0.N and the RDMA device rxe0. Commands
//! go through a virtio port of its own, not over that network.

mod ahead;
mod bed;
mod guest;
mod moving;

pub use bed::Bed;
pub use guest::{Output, RdmaGuest};
pub use moving::{Breakdown, Moved, Place, move_process, preflight};
