//! The steps of a move against a device that is a few tables: what applications see, and what the device is asked.

#![allow(unsafe_op_in_unsafe_fn)]

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use godwit_verbs::abi::*;
use godwit_verbs::shim::{self, Connection, Real};
use godwit_verbs::tables::Gid;

/// The device: it hands out the smallest free numbers, as one does on a host that is new to the process.
#[derive(Default)]
struct Device {
    numbers: BTreeSet<u32>,
    keys: BTreeSet<u32>,
    /// By queue pair: requests that are in flight, receives that wait, and how many requests fit.
    sends: BTreeMap<u32, VecDeque<ibv_wc>>,
    receives: BTreeMap<u32, VecDeque<u64>>,
    room: BTreeMap<u32, usize>,
    completed: VecDeque<ibv_wc>,
}

static DEVICE: Mutex<Option<Device>> = Mutex::new(None);

fn with<T>(act: impl FnOnce(&mut Device) -> T) -> T {
    let mut device = DEVICE.lock().unwrap_or_else(PoisonError::into_inner);
    act(device.get_or_insert_default())
}

fn take(numbers: &mut BTreeSet<u32>) -> u32 {
    let free = (1..).find(|number| !numbers.contains(number)).unwrap();
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
    let context = zeroed::<ibv_context>();
    (*context).async_fd = libc::eventfd(0, libc::EFD_CLOEXEC);
    (*context).ops.poll_cq = Some(poll);
    (*context).ops.req_notify_cq = Some(notify);
    (*context).ops.post_send = Some(send);
    (*context).ops.post_recv = Some(receive);
    context
}
unsafe extern "C" fn close(context: *mut ibv_context) -> c_int {
    libc::close((*context).async_fd);
    free(context)
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
    (*region).rkey = with(|device| take(&mut device.keys));
    (*region).lkey = (*region).rkey;
    region
}
unsafe extern "C" fn deregister(region: *mut ibv_mr) -> c_int {
    with(|device| device.keys.remove(&(*region).rkey));
    free(region)
}
unsafe extern "C" fn create_cq(
    _: *mut ibv_context,
    entries: c_int,
    _: *mut c_void,
    _: *mut ibv_comp_channel,
    _: c_int,
) -> *mut ibv_cq {
    let queue = zeroed::<ibv_cq>();
    (*queue).cqe = entries;
    queue
}
unsafe extern "C" fn destroy_cq(queue: *mut ibv_cq) -> c_int {
    with(|device| device.completed.clear());
    free(queue)
}
unsafe extern "C" fn create_qp(_: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    let pair = zeroed::<ibv_qp>();
    (*pair).context = open(ptr::null_mut());
    (*pair).qp_num = with(|device| {
        let number = take(&mut device.numbers);
        let room = (*init).cap.max_send_wr as usize;
        device.room.insert(number, room);
        number
    });
    pair
}
unsafe extern "C" fn destroy_qp(pair: *mut ibv_qp) -> c_int {
    forget((*pair).qp_num);
    with(|device| device.numbers.remove(&(*pair).qp_num));
    close((*pair).context);
    free(pair)
}
fn forget(number: u32) {
    with(|device| {
        device.sends.remove(&number);
        device.receives.remove(&number);
    });
}
unsafe extern "C" fn modify(pair: *mut ibv_qp, to: *mut ibv_qp_attr, _: c_int) -> c_int {
    if (*to).qp_state == IBV_QPS_RESET {
        forget((*pair).qp_num);
    }
    0
}
unsafe extern "C" fn query(
    _: *mut ibv_qp,
    _: *mut ibv_qp_attr,
    _: c_int,
    _: *mut ibv_qp_init_attr,
) -> c_int {
    libc::EINVAL
}
unsafe extern "C" fn notify(_: *mut ibv_cq, _: c_int) -> c_int {
    0
}
unsafe extern "C" fn poll(_: *mut ibv_cq, most: c_int, into: *mut ibv_wc) -> c_int {
    let taken: Vec<_> = with(|device| {
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
    let full = with(|device| {
        let room = device.room[&number];
        let sends = device.sends.entry(number).or_default();
        if sends.len() == room {
            return true;
        }
        sends.push_back(ibv_wc {
            wr_id: (*request).wr_id,
            qp_num: number,
            ..Default::default()
        });
        false
    });
    if full {
        *bad = request;
        return libc::ENOMEM;
    }
    0
}
unsafe extern "C" fn receive(
    pair: *mut ibv_qp,
    request: *mut ibv_recv_wr,
    _: *mut *mut ibv_recv_wr,
) -> c_int {
    with(|device| {
        let receives = device.receives.entry((*pair).qp_num).or_default();
        receives.push_back((*request).wr_id);
    });
    0
}
unsafe extern "C" fn not_expected() {
    std::process::abort();
}

/// Everything that was sent arrives.
fn complete_sends() {
    with(|device| {
        let sends = std::mem::take(&mut device.sends);
        device.completed.extend(sends.into_values().flatten());
    });
}

/// A message arrives at queue pair `number`.
fn arrive(number: u32) {
    with(|device| {
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
            ..Default::default()
        });
    });
}

/// An application with one connected queue pair that two requests and four receives fit into.
struct Application {
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    cq: *mut ibv_cq,
    pair: *mut ibv_qp,
    _alone: MutexGuard<'static, ()>,
}

impl Application {
    fn start() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
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
        real.create_qp = create_qp;
        real.destroy_qp = destroy_qp;
        real.modify_qp = modify;
        real.query_qp = query;
        shim::install(real);
        // SAFETY: the calls are in the order that verbs demand.
        unsafe {
            let context = shim::open_device(ptr::null_mut());
            let pd = shim::alloc_pd(context);
            let cq = shim::create_cq(context, 16, ptr::null_mut(), ptr::null_mut(), 0);
            let mut application = Self {
                context,
                pd,
                cq,
                pair: ptr::null_mut(),
                _alone: alone,
            };
            application.pair = application.create_pair();
            for state in [IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS] {
                assert_eq!(application.change(state), 0);
            }
            application
        }
    }

    fn create_pair(&self) -> *mut ibv_qp {
        // SAFETY: integers and null pointers; the objects are this application's.
        unsafe {
            let mut init: ibv_qp_init_attr = std::mem::zeroed();
            (init.send_cq, init.recv_cq, init.qp_type) = (self.cq, self.cq, IBV_QPT_RC);
            (init.cap.max_send_wr, init.cap.max_recv_wr) = (2, 4);
            shim::create_qp(self.pd, &raw mut init)
        }
    }

    fn change(&self, state: c_int) -> c_int {
        let mut to = ibv_qp_attr {
            qp_state: state,
            ..Default::default()
        };
        // SAFETY: the pair is this application's.
        unsafe { shim::modify_qp(self.pair, &raw mut to, IBV_QP_STATE) }
    }

    fn number(&self) -> u32 {
        // SAFETY: the pair is this application's.
        unsafe { (*self.pair).qp_num }
    }

    fn register(&self) -> *mut ibv_mr {
        // SAFETY: the device of this test touches no memory.
        unsafe { shim::reg_mr(self.pd, ptr::null_mut(), 8, 0, 0) }
    }

    fn send(&self, wr_id: u64) -> c_int {
        // SAFETY: integers, null pointers and a union of both.
        unsafe {
            let mut request: ibv_send_wr = std::mem::zeroed();
            (request.wr_id, request.opcode) = (wr_id, IBV_WR_SEND);
            shim::post_send(self.pair, &raw mut request, &mut ptr::null_mut())
        }
    }

    fn receive(&self, wr_id: u64) -> c_int {
        let mut request = ibv_recv_wr {
            wr_id,
            next: ptr::null_mut(),
            sg_list: ptr::null_mut(),
            num_sge: 0,
        };
        // SAFETY: the request has no pieces.
        unsafe { shim::post_recv(self.pair, &raw mut request, &mut ptr::null_mut()) }
    }

    fn poll(&self) -> Vec<u64> {
        let mut into = [ibv_wc::default(); 16];
        // SAFETY: there is room for as many as are asked for.
        let count = unsafe { shim::poll_cq(self.cq, 16, into.as_mut_ptr()) };
        let polled = &into[..count as usize];
        assert!(polled.iter().all(|one| one.qp_num == self.number()));
        polled.iter().map(|one| one.wr_id).collect()
    }

    fn wait(&self, peer_sent: u32) -> Result<Duration, String> {
        let peer_sent = BTreeMap::from([(self.number(), peer_sent)]);
        shim::drain(&peer_sent, Duration::from_millis(5))
    }

    fn connection(&self) -> Connection {
        Connection {
            number: self.number(),
            remote: Gid([0; 16]),
            remote_physical: 99,
            remote_keys: None,
        }
    }
}

impl Drop for Application {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // In the middle of a move these calls would wait for its end.
            std::process::abort();
        }
        // SAFETY: as verbs demand, and nothing is used after it.
        unsafe {
            assert_eq!(shim::destroy_qp(self.pair), 0);
            assert_eq!(shim::destroy_cq(self.cq), 0);
            assert_eq!(shim::close_device(self.context), 0);
        }
        with(|device| *device = Device::default());
    }
}

fn suspend_and_release(application: &Application, peer_sent: u32) {
    shim::suspend(None).unwrap();
    complete_sends();
    application.wait(peer_sent).unwrap();
    shim::release().unwrap();
}

#[test]
fn no_key_and_no_number_means_another_object_after_a_move() {
    let application = Application::start();
    let known = [application.register(), application.register()];
    // SAFETY: the regions live.
    let keys = known.map(|region| unsafe { (*region).rkey });
    assert_eq!(keys, [1, 2]);
    suspend_and_release(&application, 0);
    // At the new place others have the first key and the first number.
    with(|device| (device.keys.insert(1), device.numbers.insert(1)));
    let made = shim::recreate(None).unwrap();
    let moved: BTreeMap<u32, u32> = made.remote_keys.into_iter().collect();
    assert_ne!(
        moved[&1], 2,
        "a partner without a table would write into the other region"
    );
    shim::connect(&[application.connection()]).unwrap();
    shim::resume(None).unwrap();
    with(|device| (device.keys.remove(&1), device.numbers.remove(&1)));
    let later = application.register();
    // SAFETY: the region lives.
    let key = unsafe { (*later).rkey };
    assert!(
        !moved.contains_key(&key),
        "partners translate {key} to another region"
    );
    let pair = application.create_pair();
    // SAFETY: the pair lives.
    assert_ne!(unsafe { (*pair).qp_num }, application.number());
    assert_eq!(application.change(IBV_QPS_RESET), 0);
    assert_eq!(application.change(IBV_QPS_INIT), libc::EOPNOTSUPP);
    // SAFETY: the pair lives.
    unsafe { shim::destroy_qp(pair) };
}

#[test]
fn receives_and_completions_come_once() {
    let application = Application::start();
    for wr_id in 1..=3 {
        assert_eq!(application.receive(wr_id), 0);
    }
    arrive(application.number());
    assert_eq!(application.send(10), 0);
    suspend_and_release(&application, 1);
    // While there is no device, too: as many as fit, and no more.
    assert_eq!(
        [4, 5, 6].map(|wr_id| application.receive(wr_id)),
        [0, 0, libc::ENOMEM]
    );
    assert_eq!(application.send(11), 0);
    assert_eq!(application.poll(), [1, 10]);
    shim::recreate(None).unwrap();
    shim::connect(&[application.connection()]).unwrap();
    // A second time, as after a failure at the partner.
    shim::connect(&[application.connection()]).unwrap();
    shim::resume(None).unwrap();
    let waiting = with(|device| {
        device
            .receives
            .values()
            .flatten()
            .copied()
            .collect::<Vec<_>>()
    });
    assert_eq!(waiting, [2, 3, 4, 5]);
    complete_sends();
    assert_eq!(application.poll(), [11]);
    assert!(application.poll().is_empty());
}

#[test]
fn a_move_that_is_given_up_loses_nothing() {
    let application = Application::start();
    assert_eq!([1, 2].map(|wr_id| application.send(wr_id)), [0, 0]);
    shim::suspend(None).unwrap();
    assert_eq!(
        [3, 4, 5].map(|wr_id| application.send(wr_id)),
        [0, 0, libc::ENOMEM]
    );
    assert!(application.wait(0).unwrap_err().contains("in flight"));
    assert!(shim::release().unwrap_err().contains("not been waited for"));
    assert!(
        shim::connect(&[application.connection()])
            .unwrap_err()
            .contains("not been waited for")
    );
    // The device's queue is full of what is in flight.
    shim::resume(None).unwrap();
    complete_sends();
    assert_eq!(application.poll(), [1, 2]);
    complete_sends();
    assert_eq!(application.poll(), [3, 4]);
    assert_eq!(application.send(5), 0);
    complete_sends();
    assert_eq!(application.poll(), [5]);
    // And it can be moved later.
    suspend_and_release(&application, 0);
    assert!(shim::resume(None).is_err());
    shim::recreate(None).unwrap();
    shim::connect(&[application.connection()]).unwrap();
    shim::resume(None).unwrap();
}

#[test]
fn two_moves_do_not_share_a_queue_pair() {
    let application = Application::start();
    let only = [application.number()];
    shim::suspend(Some(&only)).unwrap();
    assert!(
        shim::suspend(Some(&only))
            .unwrap_err()
            .contains("suspended already")
    );
    shim::resume(Some(&only)).unwrap();
    complete_sends();
    assert!(application.poll().is_empty());
    assert_eq!(application.change(IBV_QPS_RESET), 0);
    assert!(shim::suspend(None).unwrap_err().contains("was reset"));
    assert!(
        shim::suspend(Some(&only))
            .unwrap_err()
            .contains("was reset")
    );
}
