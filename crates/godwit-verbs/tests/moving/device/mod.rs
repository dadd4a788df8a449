//! A device made of a few tables.

mod addresses;
mod events;
pub(crate) mod header;
mod taken;
mod windows;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ffi::{c_char, c_int, c_uint, c_ulong, c_void};
use std::ptr;
use std::sync::{Mutex, PoisonError};

use addresses::Addresses;
pub(crate) use addresses::OWN;
use events::Events;
use godwit_verbs::abi::*;
use godwit_verbs::shim::Real;
pub(crate) use taken::Taken;
use windows::{Local, Windows};
pub(crate) use windows::{Reach, arrive_invalidating};

/// The device. It assigns the smallest free numbers, like a device on a host that is new to the process.
#[derive(Default)]
pub(crate) struct Device {
    pub(crate) numbers: BTreeSet<u32>,
    pub(crate) keys: BTreeSet<u32>,
    /// The smallest key. Each test has its own: the library never forgets a key that was in use at a move.
    pub(crate) first_key: u32,
    /// By queue pair: requests in flight, waiting receives, and the capacity for requests.
    pub(crate) sends: BTreeMap<u32, VecDeque<Sent>>,
    pub(crate) receives: BTreeMap<u32, VecDeque<u64>>,
    pub(crate) room: BTreeMap<u32, usize>,
    pub(crate) completed: VecDeque<ibv_wc>,
    /// True if all requests in flight complete whenever a queue has refused a request.
    pub(crate) completes_when_full: bool,
    /// Queue pairs at which a message arrives just before their end.
    pub(crate) last_moment: BTreeSet<u32>,
    /// Receives of the shared queue.
    pub(crate) shared: VecDeque<u64>,
    /// Receives that the shared queue will refuse.
    pub(crate) shared_refused: usize,
    /// Receives that queue pairs will refuse.
    pub(crate) receives_refused: usize,
    /// Changes of queue pairs' states.
    pub(crate) changes: usize,
    pub(crate) addresses: Addresses,
    pub(crate) windows: Windows,
    pub(crate) events: Events,
    /// The local keys of the last request's pieces, and its remote key or the key that it invalidated.
    pub(crate) local_keys: Vec<u32>,
    pub(crate) remote_key: u32,
    /// The accepted requests.
    pub(crate) taken: Vec<Taken>,
    /// Queue pairs with a failed request, which process no other request until reset.
    pub(crate) broken: BTreeSet<u32>,
    /// True if write(2) to the device's file is refused, as in a process that did not open the file; and the number of
    /// doorbells by ioctl(2).
    pub(crate) write_refused: bool,
    pub(crate) rings: usize,
    /// Sets the device's extended verbs in front of a context.
    pub(crate) verbs: Option<fn(&mut ExtendedVerbs)>,
    /// The queue pair of the last query.
    pub(crate) asked: usize,
}

/// `IBV_WC_WR_FLUSH_ERR`
const FLUSHED: c_int = 5;

/// A request in flight.
pub(crate) struct Sent {
    completion: ibv_wc,
    local: Option<Local>,
}

static DEVICE: Mutex<Option<Device>> = Mutex::new(None);

pub(crate) fn with<T>(act: impl FnOnce(&mut Device) -> T) -> T {
    let mut device = DEVICE.lock().unwrap_or_else(PoisonError::into_inner);
    act(device.get_or_insert_default())
}

fn take(numbers: &mut BTreeSet<u32>, first: u32) -> u32 {
    let free = (first..).find(|number| !numbers.contains(number)).unwrap();
    numbers.insert(free);
    free
}

unsafe fn zeroed<T>() -> *mut T {
    Box::into_raw(Box::new(std::mem::zeroed()))
}

unsafe fn free<T>(object: *mut T) -> c_int {
    drop(Box::from_raw(object));
    0
}

unsafe extern "C" fn list(count: *mut c_int) -> *mut *mut ibv_device {
    *count = 1;
    Box::into_raw(Box::new(zeroed()))
}
unsafe extern "C" fn free_list(list: *mut *mut ibv_device) {
    free(*list);
    free(list);
}
unsafe extern "C" fn name(_: *mut ibv_device) -> *const c_char {
    c"table0".as_ptr()
}
unsafe extern "C" fn open(_: *mut ibv_device) -> *mut ibv_context {
    let whole = zeroed::<verbs_context>();
    let context = &raw mut (*whole).context;
    if let Some(offer) = with(|device| device.verbs) {
        (*context).abi_compat = VERBS_ABI_IS_EXTENDED;
        (*whole).sz = size_of::<verbs_context>();
        offer(&mut (*whole).verbs);
    }
    (*context).async_fd = libc::eventfd(0, libc::EFD_CLOEXEC);
    (*context).cmd_fd = libc::eventfd(0, libc::EFD_CLOEXEC);
    (*context).ops.poll_cq = Some(poll);
    (*context).ops.req_notify_cq = Some(notify);
    (*context).ops.post_send = Some(send);
    (*context).ops.post_recv = Some(receive);
    (*context).ops.post_srq_recv = Some(receive_shared);
    (*context).ops.alloc_mw = Some(windows::alloc);
    (*context).ops.dealloc_mw = Some(windows::dealloc);
    context
}
unsafe extern "C" fn close(context: *mut ibv_context) -> c_int {
    libc::close((*context).async_fd);
    libc::close((*context).cmd_fd);
    let before = std::mem::offset_of!(verbs_context, context);
    free(context.byte_sub(before).cast::<verbs_context>())
}
unsafe extern "C" fn alloc_pd(_: *mut ibv_context) -> *mut ibv_pd {
    zeroed()
}
unsafe extern "C" fn dealloc_pd(pd: *mut ibv_pd) -> c_int {
    free(pd)
}
unsafe extern "C" fn register(
    _: *mut ibv_pd,
    _: *mut c_void,
    _: usize,
    _: u64,
    _: c_uint,
) -> *mut ibv_mr {
    let region = zeroed::<ibv_mr>();
    (*region).rkey = with(|device| take(&mut device.keys, device.first_key));
    (*region).lkey = (*region).rkey;
    region
}
unsafe extern "C" fn deregister(region: *mut ibv_mr) -> c_int {
    if with(|device| device.windows.has_window((*region).lkey)) {
        return libc::EINVAL;
    }
    with(|device| device.keys.remove(&(*region).rkey));
    free(region)
}
unsafe extern "C" fn create_cq(
    _: *mut ibv_context,
    entries: c_int,
    cookie: *mut c_void,
    channel: *mut ibv_comp_channel,
    _: c_int,
) -> *mut ibv_cq {
    let queue = zeroed::<ibv_cq>();
    // For its operations.
    (*queue).context = open(ptr::null_mut());
    ((*queue).cqe, (*queue).channel, (*queue).cq_context) = (entries, channel, cookie);
    with(|device| device.events.made.insert(cookie.addr(), queue.addr()));
    queue
}
unsafe extern "C" fn destroy_cq(queue: *mut ibv_cq) -> c_int {
    events::wait_until_heard(queue.addr());
    with(|device| {
        device.completed.clear();
        device.events.made.retain(|_, made| *made != queue.addr());
    });
    close((*queue).context);
    free(queue)
}
unsafe extern "C" fn create_srq(_: *mut ibv_pd, _: *mut ibv_srq_init_attr) -> *mut ibv_srq {
    let queue = zeroed::<ibv_srq>();
    (*queue).context = open(ptr::null_mut());
    queue
}
unsafe extern "C" fn destroy_srq(queue: *mut ibv_srq) -> c_int {
    with(|device| device.shared.clear());
    close((*queue).context);
    free(queue)
}
unsafe extern "C" fn receive_shared(
    _: *mut ibv_srq,
    request: *mut ibv_recv_wr,
    _: *mut *mut ibv_recv_wr,
) -> c_int {
    with(|device| {
        if device.shared_refused > 0 {
            device.shared_refused -= 1;
            return libc::ENOMEM;
        }
        device.shared.push_back((*request).wr_id);
        0
    })
}
unsafe extern "C" fn create_qp(_: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    let pair = zeroed::<ibv_qp>();
    (*pair).context = open(ptr::null_mut());
    (*pair).qp_context = (*init).qp_context;
    (*pair).qp_type = (*init).qp_type;
    with(|device| {
        device
            .events
            .made
            .insert((*init).qp_context.addr(), pair.addr())
    });
    (*pair).qp_num = with(|device| {
        let number = take(&mut device.numbers, 1);
        let room = (*init).cap.max_send_wr as usize;
        device.room.insert(number, room);
        number
    });
    pair
}
unsafe extern "C" fn destroy_qp(pair: *mut ibv_qp) -> c_int {
    events::wait_until_heard(pair.addr());
    let binds = with(|device| device.windows.binds((*pair).qp_num));
    assert!(!binds, "it ends while windows are bound by it");
    if with(|device| device.last_moment.remove(&(*pair).qp_num)) {
        arrive((*pair).qp_num);
    }
    forget((*pair).qp_num);
    with(|device| device.numbers.remove(&(*pair).qp_num));
    close((*pair).context);
    free(pair)
}
fn forget(number: u32) {
    with(|device| {
        device.sends.remove(&number);
        device.receives.remove(&number);
        device.broken.remove(&number);
    });
}
unsafe extern "C" fn modify(pair: *mut ibv_qp, to: *mut ibv_qp_attr, _: c_int) -> c_int {
    with(|device| device.changes += 1);
    if (*to).qp_state == IBV_QPS_RESET {
        // A working queue pair can invalidate its windows first.
        let binds = with(|device| device.windows.binds((*pair).qp_num));
        let broken = with(|device| device.broken.remove(&(*pair).qp_num));
        assert!(
            broken || !binds,
            "it begins anew while windows are bound by it"
        );
        forget((*pair).qp_num);
    }
    0
}
unsafe extern "C" fn query(
    _: *mut ibv_qp,
    attributes: *mut ibv_qp_attr,
    _: c_int,
    _: *mut ibv_qp_init_attr,
) -> c_int {
    (*attributes).qp_state = IBV_QPS_RTS;
    0
}
unsafe extern "C" fn notify(_: *mut ibv_cq, _: c_int) -> c_int {
    0
}
unsafe extern "C" fn poll(_: *mut ibv_cq, most: c_int, into: *mut ibv_wc) -> c_int {
    let taken: Vec<_> = with(|device| {
        device.complete_local();
        let count = device.completed.len().min(most as usize);
        device.completed.drain(..count).collect()
    });
    for (place, completion) in taken.iter().enumerate() {
        into.add(place).write(*completion);
    }
    taken.len() as c_int
}
unsafe extern "C" fn send(
    pair: *mut ibv_qp,
    request: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    let number = (*pair).qp_num;
    *bad = ptr::null_mut();
    let mut next = request;
    let mut result = 0;
    while !next.is_null() && result == 0 {
        result = send_one(number, (*pair).qp_type, next);
        if result != 0 {
            *bad = next;
            if with(|device| device.completes_when_full) {
                complete_sends();
            }
        }
        next = (*next).next;
    }
    // Rung even after a refusal, like soft-RoCE; the doorbell's error replaces the queue's.
    if with(|device| device.write_refused) {
        return libc::EACCES;
    }
    result
}
unsafe fn send_one(number: u32, pair_type: c_int, request: *mut ibv_send_wr) -> c_int {
    let full = with(|device| {
        device.local_keys = (0..(*request).num_sge as usize)
            .map(|place| (*(*request).sg_list.add(place)).lkey)
            .collect();
        device.remote_key = match (*request).opcode {
            IBV_WR_SEND_WITH_INV => (*request).imm_data,
            _ => (*request).wr.rdma.rkey,
        };
        let to = (*request).wr.ud;
        device.addresses.sent(to.ah.addr(), to.remote_qpn);
        let room = device.room[&number];
        let sends = device.sends.entry(number).or_default();
        if sends.len() == room {
            return true;
        }
        sends.push_back(Sent {
            completion: ibv_wc {
                wr_id: (*request).wr_id,
                qp_num: number,
                ..Default::default()
            },
            local: Local::of(&*request),
        });
        device.taken.push(Taken::of(pair_type, &*request));
        false
    });
    if full { libc::ENOMEM } else { 0 }
}
/// ioctl(2), which rings the device's doorbell.
#[unsafe(no_mangle)]
unsafe extern "C" fn ioctl(file: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    if request == 0xc018_1b01 {
        with(|device| device.rings += 1);
        return 0;
    }
    libc::syscall(libc::SYS_ioctl, file, request, argument) as c_int
}
unsafe extern "C" fn receive(
    pair: *mut ibv_qp,
    request: *mut ibv_recv_wr,
    _: *mut *mut ibv_recv_wr,
) -> c_int {
    with(|device| {
        if device.receives_refused > 0 {
            device.receives_refused -= 1;
            return libc::ENOMEM;
        }
        let receives = device.receives.entry((*pair).qp_num).or_default();
        receives.push_back((*request).wr_id);
        0
    })
}
/// A queue with more completions than the new size cannot shrink.
unsafe extern "C" fn resize_cq(queue: *mut ibv_cq, entries: c_int) -> c_int {
    if (entries as usize) < with(|device| device.completed.len()) {
        return libc::EINVAL;
    }
    (*queue).cqe = entries;
    0
}
unsafe extern "C" fn rereg_mr(
    region: *mut ibv_mr,
    _: c_int,
    pd: *mut ibv_pd,
    _: *mut c_void,
    _: usize,
    _: c_int,
) -> c_int {
    assert!(pd.is_null(), "nobody asks for another one");
    (*region).lkey += 1;
    0
}
unsafe extern "C" fn query_ece(pair: *mut ibv_qp, _: *mut c_void) -> c_int {
    with(|device| device.asked = pair.addr());
    libc::EOPNOTSUPP
}
unsafe extern "C" fn attach_mcast(pair: *mut ibv_qp, _: *const ibv_gid, _: u16) -> c_int {
    with(|device| device.asked = pair.addr());
    0
}
unsafe extern "C" fn not_expected() {
    std::process::abort();
}

/// Delivers all requests in flight.
pub(crate) fn complete_sends() {
    with(|device| {
        for (pair, sent) in std::mem::take(&mut device.sends) {
            sent.into_iter().for_each(|one| device.complete(pair, one));
        }
    });
}

/// Delivers a message at queue pair `number`.
pub(crate) fn arrive(number: u32) {
    with(|device| {
        let receives = device.receives.get_mut(&number).unwrap();
        let wr_id = receives.pop_front().unwrap();
        device.received(wr_id, number);
    });
}

/// Delivers a message at queue pair `number`, into the receive at `place` of the shared queue.
pub(crate) fn arrive_shared(place: usize, number: u32) {
    with(|device| {
        let wr_id = device.shared.remove(place).unwrap();
        device.received(wr_id, number);
    });
}

impl Device {
    fn complete(&mut self, pair: u32, sent: Sent) {
        let mut completion = sent.completion;
        if self.broken.contains(&pair) {
            completion.status = FLUSHED;
        } else if let Some(local) = &sent.local {
            completion.status = self.windows.carry_out(pair, local, &self.keys);
            if completion.status != IBV_WC_SUCCESS {
                self.broken.insert(pair);
            }
        }
        self.completed.push_back(completion);
    }

    /// Completes requests without a peer once all earlier requests are done.
    fn complete_local(&mut self) {
        let pairs: Vec<u32> = self.sends.keys().copied().collect();
        for pair in pairs {
            while let Some(sends) = self.sends.get_mut(&pair)
                && sends.front().is_some_and(|sent| sent.local.is_some())
                && let Some(sent) = sends.pop_front()
            {
                self.complete(pair, sent);
            }
        }
    }

    fn received(&mut self, wr_id: u64, qp_num: u32) {
        self.completed.push_back(ibv_wc {
            wr_id,
            opcode: IBV_WC_RECV,
            qp_num,
            ..Default::default()
        });
    }
}

/// Returns the device's functions.
pub(crate) fn functions() -> Real {
    // SAFETY: `Real` is pointers to functions and nothing else.
    let mut real: Real = unsafe {
        std::mem::transmute(
            [not_expected as unsafe extern "C" fn(); size_of::<Real>() / size_of::<usize>()],
        )
    };
    real.get_device_list = list;
    real.free_device_list = free_list;
    real.get_device_name = name;
    real.open_device = open;
    real.close_device = close;
    real.alloc_pd = alloc_pd;
    real.dealloc_pd = dealloc_pd;
    real.reg_mr_iova2 = register;
    real.dereg_mr = deregister;
    real.create_cq = create_cq;
    real.destroy_cq = destroy_cq;
    real.create_comp_channel = events::create_channel;
    real.destroy_comp_channel = events::destroy_channel;
    real.get_cq_event = events::get_cq_event;
    real.ack_cq_events = events::ack_cq_events;
    real.get_async_event = events::get_async_event;
    real.ack_async_event = events::ack_async_event;
    real.create_srq = create_srq;
    real.destroy_srq = destroy_srq;
    real.create_qp = create_qp;
    real.destroy_qp = destroy_qp;
    real.modify_qp = modify;
    real.query_qp = query;
    real.create_ah = addresses::create_ah;
    real.destroy_ah = addresses::destroy_ah;
    real.query_gid = addresses::query_gid;
    real.query_ece = Some(query_ece);
    real.attach_mcast = attach_mcast;
    real.resize_cq = resize_cq;
    real.rereg_mr = rereg_mr;
    real
}
