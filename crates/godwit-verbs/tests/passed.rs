//! Verbs with objects that do not move work as without this library: the device gets its own objects, and the process
//! is reported as unable to move.

#![allow(unsafe_op_in_unsafe_fn)]

#[path = "moving/device/mod.rs"]
#[allow(dead_code, unused_imports)]
mod device;

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use device::{Device, OWN, complete_sends, header, with};
use godwit_verbs::abi::*;
use godwit_verbs::shim;

/// An application with a device that has extended verbs.
struct Application {
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    cq: *mut ibv_cq,
    _alone: MutexGuard<'static, ()>,
}

/// The result of the device's own verbs.
const HANDED_OUT: *mut c_void = ptr::without_provenance_mut(0x4000);

/// Returns true for a context of the device, which has other operations than a shadow.
unsafe fn is_of_device(context: *mut ibv_context) -> bool {
    let ours = shim::poll_cq as PollCq;
    !(*context)
        .ops
        .poll_cq
        .is_some_and(|poll| ptr::fn_addr_eq(poll, ours))
}

unsafe extern "C" fn hand_out(context: *mut ibv_context, _: *mut c_void) -> *mut c_void {
    assert!(is_of_device(context));
    HANDED_OUT
}

unsafe extern "C" fn create_qp_ex(
    context: *mut ibv_context,
    wanted: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    assert!(is_of_device(context));
    assert!((*wanted).create_flags != 0, "nothing asks for this");
    (device::functions().create_qp)((*wanted).pd, wanted.cast())
}

impl Application {
    fn start() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        shim::install(device::functions());
        with(|device| {
            *device = Device::default();
            device.verbs = Some(|verbs| {
                verbs.open_xrcd = Some(hand_out);
                verbs.create_counters = Some(hand_out);
                verbs.create_qp_ex = Some(create_qp_ex);
            });
        });
        // SAFETY: the calls are in the order that verbs demand.
        unsafe {
            let context = shim::open_device(ptr::null_mut());
            Self {
                context,
                pd: shim::alloc_pd(context),
                cq: shim::create_cq(context, 16, ptr::null_mut(), ptr::null_mut(), 0),
                _alone: alone,
            }
        }
    }

    fn wanted(&self, qp_type: c_int) -> ibv_qp_init_attr_ex {
        // SAFETY: integers and null pointers.
        let mut wanted: ibv_qp_init_attr_ex = unsafe { std::mem::zeroed() };
        (wanted.send_cq, wanted.recv_cq) = (self.cq, self.cq);
        (wanted.qp_type, wanted.pd) = (qp_type, self.pd);
        (wanted.cap.max_send_wr, wanted.cap.max_recv_wr) = (4, 4);
        wanted.comp_mask = IBV_QP_INIT_ATTR_PD;
        wanted
    }
}

fn obstacles() -> String {
    let all = shim::obstacles().into_iter();
    all.map(|one| one.what).collect::<Vec<_>>().join("; ")
}

#[test]
fn a_connection_manager_asks_for_options_of_its_queue_pair() {
    let application = Application::start();
    // SAFETY: the objects live; librdmacm asks so in `rdma_create_qp`.
    unsafe {
        let mut wanted = application.wanted(IBV_QPT_RC);
        let pair = shim::create_qp(application.pd, (&raw mut wanted).cast());
        let asked = shim::query_ece(pair, ptr::null_mut());
        assert_eq!(asked, libc::EOPNOTSUPP, "what the device says");
        let made = || with(|device| device.events.made.values().copied().collect::<Vec<_>>());
        assert!(made().contains(&with(|device| device.asked)));
        assert!(!obstacles().contains("multicast"));
        assert_eq!(shim::attach_mcast(pair, ptr::null(), 0), 0);
        assert!(made().contains(&with(|device| device.asked)));
        assert!(obstacles().contains("multicast"), "{}", obstacles());
        assert_eq!(shim::destroy_qp(pair), 0);
        assert!(!obstacles().contains("multicast"));
    }
}

#[test]
fn a_queue_pair_that_stays_gets_the_handles_of_the_device() {
    let application = Application::start();
    // SAFETY: the calls are in the order that verbs demand.
    unsafe {
        let mut wanted = application.wanted(IBV_QPT_UD);
        (wanted.create_flags, wanted.comp_mask) =
            (1, wanted.comp_mask | IBV_QP_INIT_ATTR_CREATE_FLAGS);
        let pair = header::create_qp_ex(application.context, &raw mut wanted);
        assert!(!pair.is_null() && (*pair).context == application.context);
        assert!(
            obstacles().contains("what does not move"),
            "{}",
            obstacles()
        );
        let mut to = ibv_ah_attr::default();
        to.grh.dgid.raw = OWN;
        let handle = shim::create_ah(application.pd, &raw mut to);
        let mut request: ibv_send_wr = std::mem::zeroed();
        (request.wr_id, request.opcode) = (7, IBV_WR_SEND);
        request.wr.ud = ibv_ud {
            ah: handle,
            remote_qpn: 5,
            remote_qkey: 0,
        };
        let posted = shim::post_send(pair, &raw mut request, &mut ptr::null_mut());
        assert_eq!(posted, 0);
        assert_eq!(with(|device| device.addresses.sent_to.clone()), [(OWN, 5)]);
        // More than can be recorded for a queue pair that moves.
        for wr_id in 0..20 {
            let mut receive = ibv_recv_wr {
                wr_id,
                next: ptr::null_mut(),
                sg_list: ptr::null_mut(),
                num_sge: 0,
            };
            let posted = shim::post_recv(pair, &raw mut receive, &mut ptr::null_mut());
            assert_eq!(posted, 0);
        }
        complete_sends();
        let mut completion = ibv_wc::default();
        assert_eq!(shim::poll_cq(application.cq, 1, &raw mut completion), 1);
        assert_eq!((completion.wr_id, completion.qp_num), (7, (*pair).qp_num));
        assert_eq!(shim::destroy_ah(handle), 0);
        assert_eq!(shim::destroy_qp(pair), 0);
    }
}

#[test]
fn what_the_device_hands_out_is_named() {
    let application = Application::start();
    // SAFETY: the context lives and carries what its device has.
    unsafe {
        for (place, verb, named) in [
            (
                std::mem::offset_of!(ExtendedVerbs, open_xrcd),
                (|verbs| verbs.open_xrcd) as fn(&ExtendedVerbs) -> _,
                "XRC",
            ),
            (
                std::mem::offset_of!(ExtendedVerbs, create_counters),
                |verbs| verbs.create_counters,
                "counters",
            ),
        ] {
            assert!(!obstacles().contains(named));
            let carried = header::extended(application.context, place).unwrap();
            let made = verb(&(*carried).verbs).unwrap()(application.context, ptr::null_mut());
            assert_eq!(made, HANDED_OUT);
            assert!(obstacles().contains(named), "{}", obstacles());
        }
    }
}

#[test]
fn completions_are_read_by_calls_too() {
    let application = Application::start();
    // SAFETY: the calls are in the order that verbs demand.
    unsafe {
        let place = std::mem::offset_of!(ExtendedVerbs, create_cq_ex);
        let carried = header::extended(application.context, place).unwrap();
        let mut wanted: ibv_cq_init_attr_ex = std::mem::zeroed();
        (wanted.cqe, wanted.wc_flags) = (16, IBV_WC_EX_WITH_QP_NUM);
        let create = (*carried).verbs.create_cq_ex.unwrap();
        let queue = create(application.context, &raw mut wanted);
        let mut init = application.wanted(IBV_QPT_RC);
        (init.send_cq, init.recv_cq) = (queue.cast(), queue.cast());
        let pair = shim::create_qp(application.pd, (&raw mut init).cast());
        for wr_id in [5, 6] {
            let mut request: ibv_send_wr = std::mem::zeroed();
            (request.wr_id, request.opcode) = (wr_id, IBV_WR_SEND);
            let posted = shim::post_send(pair, &raw mut request, &mut ptr::null_mut());
            assert_eq!(posted, 0);
        }
        let polled = &(*queue).polled;
        let start = || polled.start_poll.unwrap()(queue, ptr::null_mut());
        assert_eq!(start(), libc::ENOENT);
        complete_sends();
        assert_eq!((start(), polled.wr_id), (0, 5));
        assert_eq!(polled.read_qp_num.unwrap()(queue), (*pair).qp_num);
        assert!(polled.read_src_qp.is_none(), "nobody asked for that");
        let next = || polled.next_poll.unwrap()(queue);
        assert_eq!((next(), (*queue).polled.wr_id), (0, 6));
        assert_eq!(next(), libc::ENOENT);
        polled.end_poll.unwrap()(queue);
        assert_eq!(start(), libc::ENOENT);
        assert_eq!(shim::destroy_qp(pair), 0);
        assert_eq!(shim::destroy_cq(queue.cast()), 0);
    }
}

#[test]
fn a_queue_is_resized_if_the_device_would_do_that_of_itself() {
    let application = Application::start();
    // SAFETY: the queue lives.
    unsafe {
        assert_eq!(shim::resize_cq(application.cq, 32), 0);
        assert_eq!((*application.cq).cqe, 32);
        with(|device| device.completed.resize(8, ibv_wc::default()));
        assert_eq!(shim::resize_cq(application.cq, 4), libc::EINVAL);
        assert_eq!((*application.cq).cqe, 32);
    }
}

#[test]
fn a_region_that_is_registered_anew_has_what_the_device_says() {
    let application = Application::start();
    // SAFETY: the region lives; nothing but its access changes, so the others may be anything.
    unsafe {
        let region = shim::reg_mr(application.pd, ptr::null_mut(), 8, 0, 0);
        let before = (*region).lkey;
        let anything = ptr::without_provenance_mut(0x3);
        let changed = shim::rereg_mr(region, 4, anything, ptr::null_mut(), 0, 1);
        assert_eq!((changed, (*region).lkey), (0, before + 1));
        assert!(obstacles().contains("registered anew"), "{}", obstacles());
        assert_eq!(shim::dereg_mr(region), 0);
        assert!(!obstacles().contains("registered anew"));
    }
}
