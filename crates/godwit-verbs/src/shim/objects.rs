//! Shadow objects, which an application holds in place of the device's objects.
//!
//! Each begins with the structure of libibverbs that applications see, so that both have the same address. A pointer
//! from an application is a shadow if its context is, and a context is a shadow if its table of operations is this
//! library's: libibverbs also calls itself through the names that this library takes over, with its own objects.

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

/// Marks the end of a drained send queue. Completions with this number never reach the application.
pub(super) const MARKER: u64 = 0x6764_7774_6d61_726b;

/// The reason why an object does not move, in words that follow the object's name; unset if the object moves. Final
/// once set.
pub(super) type Stays = OnceLock<&'static str>;

/// The last member of a [`verbs_context`], which is allocated as a whole.
#[repr(C)]
pub(super) struct ShadowContext {
    pub(super) face: ibv_context,
    pub(super) id: ObjectId,
    pub(super) real: AtomicPtr<ibv_context>,
    /// Keeps alive the device's description, to which `face` points.
    pub(super) devices: *mut *mut ibv_device,
    pub(super) device_name: String,
}

#[repr(C)]
pub(super) struct ShadowPd {
    pub(super) face: ibv_pd,
    pub(super) id: ObjectId,
    pub(super) real: AtomicPtr<ibv_pd>,
    /// The last address that a handle was made for: this process's route to others.
    pub(super) last_route: Mutex<Option<ibv_ah_attr>>,
    pub(super) stays: Stays,
}

#[repr(C)]
pub(super) struct ShadowMr {
    pub(super) face: ibv_mr,
    pub(super) id: ObjectId,
    pub(super) real: AtomicPtr<ibv_mr>,
    /// The device's current key; `face.rkey` is the key at registration.
    pub(super) physical_rkey: AtomicU32,
    pub(super) stays: Stays,
}

/// A window. The binding is in [`windows`](crate::shim::world::windows).
#[repr(C)]
pub(super) struct ShadowMw {
    /// The application may change the key.
    pub(super) face: ibv_mw,
    pub(super) id: ObjectId,
    pub(super) real: AtomicPtr<ibv_mw>,
}

#[repr(C)]
pub(super) struct ShadowAh {
    pub(super) face: ibv_ah,
    pub(super) id: ObjectId,
    pub(super) real: AtomicPtr<ibv_ah>,
    /// The attributes from the application.
    pub(super) attributes: ibv_ah_attr,
    /// True if `elsewhere` is not empty; most handles' peers never move.
    pub(super) has_elsewhere: AtomicBool,
    /// Queue pairs behind this address that have moved.
    pub(super) elsewhere: Mutex<Vec<Elsewhere>>,
}

/// The destination of datagrams for one queue pair of an address.
pub(super) struct Elsewhere {
    pub(super) redirect: Redirect,
    /// Null while the device's objects are released.
    pub(super) real: *mut ibv_ah,
    /// Handles for the queue pair's former places. A queued datagram may still use one.
    pub(super) old: Vec<*mut ibv_ah>,
}

#[repr(C)]
pub(super) struct ShadowChannel {
    /// Its number is a descriptor of [`descriptors`](crate::shim::descriptors).
    pub(super) face: ibv_comp_channel,
    pub(super) id: ObjectId,
    pub(super) real: AtomicPtr<ibv_comp_channel>,
    /// Readable while there are events that the device's channel does not have.
    pub(super) signal: c_int,
    pub(super) state: Mutex<ChannelState>,
    /// True if the device's channel was made ahead of this process, so that its events may name shadows.
    pub(super) made_ahead: AtomicBool,
}

/// The state of an event channel.
#[derive(Default)]
pub(super) struct ChannelState {
    /// The descriptor of the device's channel, if any.
    pub(super) device: Option<c_int>,
    /// Queues (`*mut ShadowCq`) whose completions were drained while armed.
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
    /// The device's queue, if made ahead of this process: its events then name this shadow. The queue's end waits until
    /// its events are acknowledged, so a holder of an event can use this pointer without the lane.
    pub(super) made_ahead: AtomicPtr<ibv_cq>,
    pub(super) lane: Gate<CqLane>,
}

/// The application's request for a notification of the next completion.
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
    /// Queue pairs by the device's number, sorted.
    pub(super) routes: Vec<(u32, *const ShadowQp)>,
    /// The route of the last completion.
    pub(super) last: (u32, *const ShadowQp),
    /// Completions that were drained and not yet polled, with the application's numbers.
    pub(super) drained: VecDeque<ibv_wc>,
    /// True while completions are drained.
    pub(super) suspended: bool,
    /// True if a resumed queue pair whose sends complete here may have kept requests.
    pub(super) backlog: bool,
    /// Markers that have not completed.
    pub(super) markers: u32,
    pub(super) armed: Armed,
}

// SAFETY: the pointers are to objects that live until the application destroys them, which removes the pointers first.
unsafe impl Send for CqLane {}

#[repr(C)]
pub(super) struct ShadowQp {
    pub(super) face: ibv_qp,
    /// With `face` an [`ibv_qp_ex`]. The application may change number and flags of the next request.
    pub(super) wr: UnsafeCell<ibv_qp_ex_wr>,
    /// Requests that the application builds by calls, if the queue pair was made for such requests.
    pub(super) list: Option<RequestList>,
    pub(super) id: ObjectId,
    pub(super) stays: Stays,
    /// Address of the device's queue pair with its own calls, if the application has asked for the calls.
    pub(super) with_calls: AtomicUsize,
    /// The application's arguments, with the granted capacities.
    pub(super) init: ibv_qp_init_attr,
    /// The device's number.
    pub(super) physical: AtomicU32,
    pub(super) receives: ReceiveQueue,
    /// True once a request has failed.
    pub(super) failed: AtomicBool,
    /// True once the application has reset the queue pair, which empties its queues and counters and invalidates the
    /// partner's counters.
    pub(super) was_reset: AtomicBool,
    /// True once the marker behind the last request has completed.
    pub(super) marker_done: AtomicBool,
    /// The handle that addresses a marker among datagrams.
    pub(super) marker_route: AtomicPtr<ibv_ah>,
    /// Former places of a queue pair for datagrams.
    pub(super) places: Mutex<Vec<Place>>,
    pub(super) transitions: Mutex<Vec<Transition>>,
    /// As [`ShadowCq::made_ahead`].
    pub(super) made_ahead: AtomicPtr<ibv_qp>,
    pub(super) lane: Gate<QpLane>,
}

// Applications find the data beside a face by the header's layout.
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

/// A change of a queue pair's state that the application requested.
#[derive(Clone, Copy)]
pub(super) struct Transition {
    pub(super) attributes: ibv_qp_attr,
    pub(super) mask: c_int,
    /// True if the state was the same before.
    pub(super) stays: bool,
    /// True if `attributes` permit remote writes that the application did not request.
    pub(super) adds_write: bool,
}

/// Requests that are translated at a time.
pub(super) const BATCH_REQUESTS: usize = 32;
/// Pieces of these requests.
pub(super) const BATCH_PIECES: usize = 256;

pub(super) struct QpLane {
    /// The owner.
    pub(super) id: ObjectId,
    /// Null while the device's objects are released.
    pub(super) real: *mut ibv_qp,
    pub(super) post_send: PostSend,
    pub(super) post_recv: PostRecv,
    pub(super) datagrams: bool,
    /// True if the device understands requests as they are: no key, handle or window has to be translated.
    pub(super) plain: bool,
    /// True if receives are recorded, to be posted again after a move.
    pub(super) notes: bool,
    /// True while requests to send are kept back.
    pub(super) suspended: bool,
    /// True if a drain since the suspension has found nothing in flight.
    pub(super) empty: bool,
    pub(super) kept: VecDeque<KeptSend>,
    pub(super) remote_keys: RemoteKeys,
    /// The replacement of `real`, if prepared.
    pub(super) prepared: Option<Prepared>,
    /// Replaced queue pairs that are not destroyed yet.
    pub(super) retired: Vec<*mut ibv_qp>,
    /// Two-sided requests since the queue pair was made (n_sent), modulo 2^32.
    pub(super) sent: u32,
    pub(super) sends: Box<[ibv_send_wr; BATCH_REQUESTS]>,
    pub(super) recvs: Box<[ibv_recv_wr; BATCH_REQUESTS]>,
    pub(super) pieces: Box<[ibv_sge; BATCH_PIECES]>,
}

// SAFETY: as for `CqLane`.
unsafe impl Send for QpLane {}

/// A queue pair of the device, connected to the peer's future place.
#[derive(Clone, Copy)]
pub(super) struct Prepared {
    pub(super) real: *mut ibv_qp,
}

#[repr(C)]
pub(super) struct ShadowSrq {
    pub(super) face: ibv_srq,
    pub(super) id: ObjectId,
    /// Once set, receives are recorded no more.
    pub(super) stays: Stays,
    /// The granted capacities.
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
    /// Data to be copied at posting (`IBV_SEND_INLINE`).
    pub(super) inline: Vec<u8>,
    /// The key in the window's structure, if the request binds a window.
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
        /// Returns the shadow of an object; none for an object of libibverbs itself.
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

/// Returns the shadow of a context; none for a context of libibverbs itself.
pub(super) unsafe fn context<'a>(face: *mut ibv_context) -> Option<&'a ShadowContext> {
    context_is_ours(face).then(|| &*face.cast::<ShadowContext>())
}

/// Returns a shadow as the cookie that libibverbs carries.
pub(super) fn as_cookie<T>(shadow: *const T) -> *mut c_void {
    shadow.cast_mut().cast()
}
