//! Addresses of the device's host, and of its peers.

use std::collections::BTreeMap;
use std::ffi::c_int;

use godwit_verbs::abi::*;

use super::{free, with, zeroed};

/// Addresses, and the handles that lead to them.
#[derive(Default)]
pub(crate) struct Addresses {
    /// Address handles with their destinations.
    pub(crate) routes: BTreeMap<usize, [u8; 16]>,
    /// The address of the device's host; [`OWN`] at first.
    pub(crate) own: Option<[u8; 16]>,
    /// Queries for an address of the host.
    pub(crate) asked: usize,
    /// Destinations of datagrams: addresses and numbers of queue pairs.
    pub(crate) sent_to: Vec<([u8; 16], u32)>,
}

impl Addresses {
    /// Notes a datagram to queue pair `number` at the destination of a handle.
    pub(super) fn sent(&mut self, handle: usize, number: u32) {
        if let Some(address) = self.routes.get(&handle) {
            self.sent_to.push((*address, number));
        }
    }
}

pub(super) unsafe extern "C" fn create_ah(_: *mut ibv_pd, to: *mut ibv_ah_attr) -> *mut ibv_ah {
    let handle = zeroed::<ibv_ah>();
    with(|device| {
        device
            .addresses
            .routes
            .insert(handle.addr(), (*to).grh.dgid.raw)
    });
    handle
}
pub(super) unsafe extern "C" fn destroy_ah(handle: *mut ibv_ah) -> c_int {
    with(|device| device.addresses.routes.remove(&handle.addr()));
    free(handle)
}
/// The address of this host.
pub(crate) const OWN: [u8; 16] = [9; 16];
pub(super) unsafe extern "C" fn query_gid(
    _: *mut ibv_context,
    _: u8,
    place: c_int,
    into: *mut ibv_gid,
) -> c_int {
    (*into).raw = with(|device| {
        device.addresses.asked += 1;
        device.addresses.own.unwrap_or(OWN)
    });
    if place == 0 { 0 } else { libc::ENODATA }
}
