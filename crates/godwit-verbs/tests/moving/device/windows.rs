//! Memory windows of the device made of tables. Windows behave as in soft-RoCE before Linux 6.0, the stricter version.
//! A test fails where soft-RoCE would wait forever or leave a window bound to nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_int, c_uint};

use godwit_verbs::abi::*;

use super::{free, take, with, zeroed};

/// `IBV_WC_LOC_QP_OP_ERR`, `IBV_WC_MW_BIND_ERR`
const INVALIDATION_FAILED: c_int = 2;
const BINDING_FAILED: c_int = 6;

/// The windows of the device.
#[derive(Default)]
pub(crate) struct Windows {
    /// By the upper bits of their keys.
    all: BTreeMap<u32, Window>,
    /// The upper bits in use.
    pub(crate) names: BTreeSet<u32>,
    /// Number of windows made so far.
    made: u32,
}

struct Window {
    key: u32,
    kind: c_int,
    bound: Option<Bound>,
}

struct Bound {
    pair: u32,
    reaches: Reach,
}

/// The part of a region that a window exposes to peers; the region has this local key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Reach {
    pub(crate) region: u32,
    pub(crate) address: u64,
    pub(crate) length: u64,
}

/// The operation of a request on a window.
pub(crate) enum Local {
    Bind {
        has: u32,
        wanted: u32,
        reaches: Reach,
    },
    Invalidate(u32),
}

impl Local {
    /// Returns the data that the device's library reads from the request at posting.
    pub(super) unsafe fn of(request: &ibv_send_wr) -> Option<Self> {
        match request.opcode {
            IBV_WR_LOCAL_INV => Some(Self::Invalidate(request.imm_data)),
            IBV_WR_BIND_MW => {
                let bind = &request.bind_mw;
                Some(Self::Bind {
                    has: (*bind.mw).rkey,
                    wanted: bind.rkey,
                    reaches: Reach {
                        region: (*bind.bind_info.mr).lkey,
                        address: bind.bind_info.addr,
                        length: bind.bind_info.length,
                    },
                })
            }
            _ => None,
        }
    }
}

pub(super) unsafe extern "C" fn alloc(pd: *mut ibv_pd, kind: c_int) -> *mut ibv_mw {
    let window = zeroed::<ibv_mw>();
    ((*window).pd, (*window).type_) = (pd, kind);
    (*window).rkey = with(|device| {
        let windows = &mut device.windows;
        let name = take(&mut windows.names, device.first_key << 8);
        windows.made += 1;
        let key = name << 8 | (windows.made * 37) & 0xff;
        let bound = None;
        windows.all.insert(name, Window { key, kind, bound });
        key
    });
    window
}

pub(super) unsafe extern "C" fn dealloc(window: *mut ibv_mw) -> c_int {
    with(|device| {
        let name = (*window).rkey >> 8;
        device.windows.names.remove(&name);
        assert!(device.windows.all.remove(&name).is_some(), "it is none");
    });
    free(window)
}

impl Windows {
    /// Carries out the operation, in the order of the queue pair's requests. Returns the status of its completion.
    pub(super) fn carry_out(&mut self, pair: u32, local: &Local, regions: &BTreeSet<u32>) -> c_int {
        match local {
            Local::Invalidate(key) => self.invalidate(*key),
            Local::Bind {
                has,
                wanted,
                reaches,
            } => {
                let Some(window) = self.all.get_mut(&(has >> 8)) else {
                    return BINDING_FAILED;
                };
                let is_free = window.kind == IBV_MW_TYPE_1 || window.bound.is_none();
                let binds = reaches.length > 0;
                if window.key != *has
                    || window.key & 0xff == wanted & 0xff
                    || !is_free
                    || (window.kind == IBV_MW_TYPE_2 && !binds)
                    || (binds && !regions.contains(&reaches.region))
                {
                    return BINDING_FAILED;
                }
                window.key = window.key & !0xff | wanted & 0xff;
                window.bound = binds.then_some(Bound {
                    pair,
                    reaches: *reaches,
                });
                IBV_WC_SUCCESS
            }
        }
    }

    fn invalidate(&mut self, key: u32) -> c_int {
        match self.all.get_mut(&(key >> 8)) {
            Some(window) if window.key == key && window.kind == IBV_MW_TYPE_2 => {
                window.bound = None;
                IBV_WC_SUCCESS
            }
            _ => INVALIDATION_FAILED,
        }
    }

    /// Returns the memory that a peer of queue pair `pair` reaches with this key.
    pub(crate) fn reach(&self, pair: u32, key: u32) -> Option<Reach> {
        let window = self
            .all
            .get(&(key >> 8))
            .filter(|window| window.key == key)?;
        let bound = window.bound.as_ref()?;
        (window.kind == IBV_MW_TYPE_1 || bound.pair == pair).then_some(bound.reaches)
    }

    /// Returns true if the queue pair has bound windows of type 2.
    pub(super) fn binds(&self, pair: u32) -> bool {
        let mut all = self.all.values();
        all.any(|window| {
            window.kind == IBV_MW_TYPE_2
                && window
                    .bound
                    .as_ref()
                    .is_some_and(|bound| bound.pair == pair)
        })
    }

    /// Returns true if a window is bound to the region.
    pub(super) fn has_window(&self, region: u32) -> bool {
        let mut bound = self.all.values().filter_map(|window| window.bound.as_ref());
        bound.any(|bound| bound.reaches.region == region)
    }
}

/// Delivers a message at queue pair `number` that invalidates this key. The completion has these flags.
pub(crate) fn arrive_invalidating(number: u32, key: u32, wc_flags: c_uint) {
    with(|device| {
        assert_eq!(device.windows.invalidate(key), IBV_WC_SUCCESS);
        let wr_id = device
            .receives
            .get_mut(&number)
            .unwrap()
            .pop_front()
            .unwrap();
        device.completed.push_back(ibv_wc {
            wr_id,
            opcode: IBV_WC_RECV,
            qp_num: number,
            wc_flags,
            imm_data: key,
            ..Default::default()
        });
    });
}
