//! Shadow objects: what an application holds in place of the device's.
//!
//! Each begins with the structure of libibverbs that applications see, so that a pointer to one is a
//! pointer to the other. A pointer from an application is one of ours if its context is, and a context
//! is ours if its table of operations is: libibverbs also calls itself through the names that this
//! library takes over, with its own objects.

use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize};
use std::sync::{Mutex, OnceLock};

use crate::abi::*;
use crate::shim::data_path::gate::Gate;
use crate::shim::data_path::lists::RequestList;
use crate::shim::moving::Place;
use crate::shim::verbs::completions_ex::Reading;
use crate::shim::verbs::datagrams::Redirect;
use crate::tables::{ObjectId, ReceiveQueue, RemoteKeys, SharedReceives};

/// Marks the end of a drained send queue; completions with it never reach the application.
pub(super) const MARKER: u64 = 0x6764_7774_6d61_726b;

/// Why an object does not move, in words that follow its name; unset if it does. It stays so for its life.
pub(super) type Stays = OnceLock<&'static str>;

/// The last member of a [`verbs_context`], which is allocated as a whole.
#[repr(C)]
pub(super) struct ShadowContext {
    pub(super) face: ibv_context,
    pub(super) id: ObjectId,
    pub(super) real: AtomicPtr<ibv_context>,
    /// Keeps the description of the device that `face` names.
    pub(super) devices: *mut *mut ibv_device,
    pub(super) device_name: String,
}

#[repr(C)]
pub(super) struct ShadowPd {
    pub(super) face: ibv_pd,
    pub(super) id: ObjectId,
    pub(super) real: AtomicPtr<ibv_pd>,
    /// The last address that a handle was made for: how this process reaches others.
    pub(super) last_route: Mutex<Option<ibv_ah_attr>>,
    pub(super) stays: Stays,
}

#[repr(C)]
pub(super) struct ShadowMr {
    pub(super) face: ibv_mr,
    pub(super) id: ObjectId,
    pub(super) real: AtomicPtr<ibv_mr>,
    /// The key that the device knows now; `face.rkey` is what it was when the region was registered.
    pub(super) physical_rkey: AtomicU32,
    pub(super) stays: Stays,
}

/// What it is bound to is in [`windows`](crate::shim::world::windows).
#[repr(C)]
pub(super) struct ShadowMw {
    /// Its key is the application's to change.
    pub(super) face: ibv_mw,
    pub(super) id: ObjectId,
    pub(super) real: AtomicPtr<ibv_mw>,
}

#[repr(C)]
pub(super) struct ShadowAh {
    pub(super) face: ibv_ah,
    pub(super) id: ObjectId,
    pub(super) real: AtomicPtr<ibv_ah>,
    /// What the application asked for.
    pub(super) attributes: ibv_ah_attr,
    /// Whether `elsewhere` has anything; most handles' peers never move.
    pub(super) has_elsewhere: AtomicBool,
    /// Queue pairs behind this address that have moved.
    pub(super) elsewhere: Mutex<Vec<Elsewhere>>,
}

/// Where the datagrams for one queue pair of an address go.
pub(super) struct Elsewhere {
    pub(super) redirect: Redirect,
    /// Null while the device's objects are released.
    pub(super) real: *mut ibv_ah,
    /// Those that led to where it was before. A datagram that was posted with one may be in a queue.
    pub(super) old: Vec<*mut ibv_ah>,
}

#[repr(C)]
pub(super) struct ShadowChannel {
    /// Its number has [`descriptors`](crate::shim::descriptors) behind it.
    pub(super) face: ibv_comp_channel,
    pub(super) id: ObjectId,
    pub(super) real: AtomicPtr<ibv_comp_channel>,
    /// Readable while there are events that the device's channel does not have.
    pub(super) signal: c_int,
    pub(super) state: Mutex<ChannelState>,
    /// Whether the device's channel was made ahead of this process, so that its events may name shadows.
    pub(super) made_ahead: AtomicBool,
}

/// The state of an event channel.
#[derive(Default)]
pub(super) struct ChannelState {
    /// The descriptor of the device's channel, if there is one behind it.
    pub(super) device: Option<c_int>,
    /// Queues (`*mut ShadowCq`) whose completions were drained while they were armed.
    pub(super) events: VecDeque<usize>,
}

#[repr(C)]
pub(super) struct ShadowCq {
    pub(super) face: ibv_cq,
    /// With `face` an [`ibv_cq_ex`], for queues that are read by calls.
    pub(super) polled: UnsafeCell<ibv_cq_ex_polled>,
    pub(super) reading: Reading,
    pub(super) id: ObjectId,
    pub(super) vector: c_int,
    /// The device's queue, if it was made ahead of this process: its events name this shadow. Its end waits until they
    /// are acknowledged, so whoever has one of them can use this without the lane.
    pub(super) made_ahead: AtomicPtr<ibv_cq>,
    pub(super) lane: Gate<CqLane>,
}

/// How an application asked to be told of the next completion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Armed {
    No,
    Any,
    Solicited,
}

pub(super) struct CqLane {
    /// Null while the device's objects are released.
    pub(super) real: *mut ibv_cq,
    pub(super) poll: PollCq,
    pub(super) notify: ReqNotifyCq,
    /// Queue pairs by the number that the device knows, sorted.
    pub(super) routes: Vec<(u32, *const ShadowQp)>,
    /// The route of the last completion.
    pub(super) last: (u32, *const ShadowQp),
    /// Completions that were drained and not yet polled, with the numbers the application knows.
    pub(super) drained: VecDeque<ibv_wc>,
    /// Whether completions are drained.
    pub(super) suspended: bool,
    /// Whether requests may be kept back of a queue pair whose sends complete here, and which goes on.
    pub(super) backlog: bool,
    /// Markers that have not completed.
    pub(super) markers: u32,
    pub(super) armed: Armed,
}

// SAFETY: the pointers are to objects that live until the application destroys them, which takes them
// out of here first.
unsafe impl Send for CqLane {}

#[repr(C)]
pub(super) struct ShadowQp {
    pub(super) face: ibv_qp,
    /// With `face` an [`ibv_qp_ex`]. Number and flags of the next request are the application's to change.
    pub(super) wr: UnsafeCell<ibv_qp_ex_wr>,
    /// Requests that the application puts together, if the queue pair was made for that.
    pub(super) list: Option<RequestList>,
    pub(super) id: ObjectId,
    pub(super) stays: Stays,
    /// The device's queue pair with its own calls, if the application has asked for that; its address.
    pub(super) with_calls: AtomicUsize,
    /// What the application asked for and what it was told it has.
    pub(super) init: ibv_qp_init_attr,
    /// The number that the device knows.
    pub(super) physical: AtomicU32,
    pub(super) receives: ReceiveQueue,
    /// Whether a request has failed.
    pub(super) failed: AtomicBool,
    /// Whether the application has taken it back to its first state: what its queues and counters held
    /// before is gone, and its partner's counters with it.
    pub(super) was_reset: AtomicBool,
    /// Whether the marker behind the last request has completed.
    pub(super) marker_done: AtomicBool,
    /// The handle that a marker among datagrams is addressed with.
    pub(super) marker_route: AtomicPtr<ibv_ah>,
    /// Where it has been, if it is for datagrams.
    pub(super) places: Mutex<Vec<Place>>,
    pub(super) transitions: Mutex<Vec<Transition>>,
    /// As [`ShadowCq::made_ahead`].
    pub(super) made_ahead: AtomicPtr<ibv_qp>,
    pub(super) lane: Gate<QpLane>,
}

// Applications find what lies beside a face by the header's layout.
const _: () = {
    use std::mem::offset_of;
    let shadow = offset_of!(verbs_context<ShadowContext>, context);
    assert!(shadow == offset_of!(verbs_context, context));
    assert!(offset_of!(ShadowContext, face) == 0);
    assert!(offset_of!(ShadowQp, face) == 0);
    assert!(offset_of!(ShadowQp, wr) == offset_of!(ibv_qp_ex, wr));
    assert!(offset_of!(ShadowCq, face) == 0);
    assert!(offset_of!(ShadowCq, polled) == offset_of!(ibv_cq_ex, polled));
};

/// A change of a queue pair's state that the application asked for.
#[derive(Clone, Copy)]
pub(super) struct Transition {
    pub(super) attributes: ibv_qp_attr,
    pub(super) mask: c_int,
    /// Whether the state was the same before.
    pub(super) stays: bool,
    /// Set if `attributes` permit remote writes, which the application did not ask for.
    pub(super) adds_write: bool,
}

/// Requests that are translated at a time.
pub(super) const BATCH_REQUESTS: usize = 32;
/// Pieces of those requests.
pub(super) const BATCH_PIECES: usize = 256;

pub(super) struct QpLane {
    /// Whose it is.
    pub(super) id: ObjectId,
    /// Null while the device's objects are released.
    pub(super) real: *mut ibv_qp,
    pub(super) post_send: PostSend,
    pub(super) post_recv: PostRecv,
    pub(super) datagrams: bool,
    /// Whether requests say what the device understands: no key, no handle and no window has to be translated.
    pub(super) plain: bool,
    /// Set if receives are noted, to be posted again after a move.
    pub(super) notes: bool,
    /// Whether requests to send are kept back.
    pub(super) suspended: bool,
    /// Whether nothing of it was in flight when it was waited for, since it was suspended.
    pub(super) empty: bool,
    pub(super) kept: VecDeque<KeptSend>,
    pub(super) remote_keys: RemoteKeys,
    /// One that is to take the place of `real`.
    pub(super) prepared: Option<Prepared>,
    /// Those whose place `real` has taken, and that are not destroyed yet.
    pub(super) retired: Vec<*mut ibv_qp>,
    /// Two-sided requests since the queue pair was made (n_sent), modulo 2^32.
    pub(super) sent: u32,
    pub(super) sends: Box<[ibv_send_wr; BATCH_REQUESTS]>,
    pub(super) recvs: Box<[ibv_recv_wr; BATCH_REQUESTS]>,
    pub(super) pieces: Box<[ibv_sge; BATCH_PIECES]>,
}

// SAFETY: as for `CqLane`.
unsafe impl Send for QpLane {}

/// A queue pair of the device that is connected to where the peer will be.
#[derive(Clone, Copy)]
pub(super) struct Prepared {
    pub(super) real: *mut ibv_qp,
}

#[repr(C)]
pub(super) struct ShadowSrq {
    pub(super) face: ibv_srq,
    pub(super) id: ObjectId,
    /// Its receives are noted no more once this is set.
    pub(super) stays: Stays,
    /// What the application was told it has.
    pub(super) init: ibv_srq_init_attr,
    /// The limit below which the application wants an event; 0 for none.
    pub(super) limit: AtomicU32,
    pub(super) receives: SharedReceives,
    /// As [`ShadowCq::made_ahead`].
    pub(super) made_ahead: AtomicPtr<ibv_srq>,
    pub(super) lane: Gate<SrqLane>,
}

pub(super) struct SrqLane {
    /// Null while the device's objects are released.
    pub(super) real: *mut ibv_srq,
    pub(super) post: PostSrqRecv,
    /// As [`QpLane::plain`].
    pub(super) plain: bool,
    pub(super) pieces: Box<[ibv_sge; BATCH_PIECES]>,
}

// SAFETY: as for `CqLane`.
unsafe impl Send for SrqLane {}

/// A request that was posted while its queue pair was suspended.
pub(super) struct KeptSend {
    pub(super) request: ibv_send_wr,
    pub(super) pieces: Vec<ibv_sge>,
    /// Data that was to be taken at once (`IBV_SEND_INLINE`).
    pub(super) inline: Vec<u8>,
    /// The key that the window's structure had, if the request binds one.
    pub(super) window_key: u32,
}

pub(super) unsafe fn context_is_ours(context: *const ibv_context) -> bool {
    let ours = crate::shim::data_path::polling::poll_cq as PollCq;
    !context.is_null()
        && (*context)
            .ops
            .poll_cq
            .is_some_and(|poll| std::ptr::fn_addr_eq(poll, ours))
}

macro_rules! shadow {
    ($find:ident, $face:ident, $shadow:ident) => {
        /// The shadow that the application means, unless this is an object of libibverbs itself.
        pub(super) unsafe fn $find<'a>(face: *mut $face) -> Option<&'a $shadow> {
            (!face.is_null() && context_is_ours((*face).context)).then(|| &*face.cast::<$shadow>())
        }
    };
}

shadow!(pd, ibv_pd, ShadowPd);
shadow!(mr, ibv_mr, ShadowMr);
shadow!(mw, ibv_mw, ShadowMw);
shadow!(ah, ibv_ah, ShadowAh);
shadow!(channel, ibv_comp_channel, ShadowChannel);
shadow!(cq, ibv_cq, ShadowCq);
shadow!(qp, ibv_qp, ShadowQp);
shadow!(srq, ibv_srq, ShadowSrq);

/// As the others, for a context.
pub(super) unsafe fn context<'a>(face: *mut ibv_context) -> Option<&'a ShadowContext> {
    context_is_ours(face).then(|| &*face.cast::<ShadowContext>())
}

/// A shadow as the address that libibverbs carries for us.
pub(super) fn as_cookie<T>(shadow: *const T) -> *mut c_void {
    shadow.cast_mut().cast()
}
