//! Queue pairs with requests that are built by calls (`ibv_wr_*`).

mod lists;
mod moved;

use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::ptr;

use godwit_verbs::abi::*;
use godwit_verbs::shim;

use crate::device::header::{self, Calls};
use crate::device::{Taken, complete_sends, with};
use crate::{Application, make_ready};

/// The library's operations for reliable connections: `IBV_QP_EX_WITH_*` up to `IBV_QP_EX_WITH_SEND_WITH_INV`.
const ALL: u64 = 0x3ff;

/// Bytes of inline data that the queue pairs of these tests take.
const INLINE: u32 = 16;

/// A connected queue pair of an application, with room for three requests of up to two pieces each.
struct Extended<'a> {
    application: &'a Application,
    pair: *mut ibv_qp,
    calls: Calls,
}

impl<'a> Extended<'a> {
    fn start(application: &'a Application, qp_type: c_int, operations: u64) -> Self {
        let pair = create(application, qp_type, |wanted| {
            wanted.send_ops_flags = operations;
        });
        assert!(!pair.is_null());
        make_ready(pair);
        // SAFETY: the pair lives.
        let calls = Calls(unsafe { shim::qp_to_qp_ex(pair) });
        assert_eq!(calls.0.cast(), pair);
        Self {
            application,
            pair,
            calls,
        }
    }

    fn number(&self) -> u32 {
        // SAFETY: the pair lives.
        unsafe { (*self.pair).qp_num }
    }

    /// Posts a request by `ibv_post_send`.
    fn post(&self, opcode: c_int, more: impl FnOnce(&mut ibv_send_wr)) -> c_int {
        // SAFETY: integers, null pointers and a union of both; the pair lives.
        unsafe {
            let mut request: ibv_send_wr = std::mem::zeroed();
            (request.wr_id, request.opcode) = (7, opcode);
            request.send_flags = IBV_SEND_SIGNALED;
            more(&mut request);
            shim::post_send(self.pair, &raw mut request, &mut ptr::null_mut())
        }
    }

    /// Posts a list.
    fn list(&self, put_together: impl FnOnce(Calls)) -> c_int {
        // SAFETY: the pair lives.
        unsafe {
            self.calls.start();
            self.calls.next(7, IBV_SEND_SIGNALED);
            put_together(self.calls);
            self.calls.complete()
        }
    }

    /// Posts a list of requests without data.
    fn send_empty(&self, numbers: Range<u64>) -> c_int {
        self.list(|calls| {
            for wr_id in numbers {
                // SAFETY: the pair lives.
                unsafe { calls.send_empty(wr_id) };
            }
        })
    }

    fn poll(&self) -> Vec<u64> {
        let mut into = [ibv_wc::default(); 16];
        // SAFETY: there is room for as many as are asked for.
        let count = unsafe { shim::poll_cq(self.application.cq, 16, into.as_mut_ptr()) };
        let polled = &into[..count as usize];
        assert!(polled.iter().all(|one| one.qp_num == self.number()));
        polled.iter().map(|one| one.wr_id).collect()
    }
}

impl Drop for Extended<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: nothing uses the pair any more.
            assert_eq!(unsafe { shim::destroy_qp(self.pair) }, 0);
        }
    }
}

/// `ibv_create_qp_ex`, with the arguments set by `more`.
fn create(
    application: &Application,
    qp_type: c_int,
    more: impl FnOnce(&mut ibv_qp_init_attr_ex),
) -> *mut ibv_qp {
    // SAFETY: integers and null pointers; the objects are the application's.
    unsafe {
        let mut wanted: ibv_qp_init_attr_ex = std::mem::zeroed();
        (wanted.send_cq, wanted.recv_cq) = (application.cq, application.cq);
        (wanted.qp_type, wanted.pd) = (qp_type, application.pd);
        (wanted.cap.max_send_wr, wanted.cap.max_recv_wr) = (3, 4);
        (wanted.cap.max_send_sge, wanted.cap.max_inline_data) = (2, INLINE);
        wanted.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
        more(&mut wanted);
        header::create_qp_ex(application.context, &raw mut wanted)
    }
}

/// Returns the requests that have reached the device since the last call.
fn taken() -> Vec<Taken> {
    with(|device| std::mem::take(&mut device.taken))
}

fn numbers_of(taken: &[Taken]) -> Vec<u64> {
    taken.iter().map(|one| one.wr_id).collect()
}

/// Checks that a request of a list and one put together by calls have reached the device, and are the same. Returns the
/// request.
fn assert_same(extended: &Extended<'_>, by_list: c_int, by_calls: c_int) -> Taken {
    assert_eq!((by_list, by_calls), (0, 0));
    let taken = taken();
    let [expected, found] = &taken[..] else {
        panic!("another number of requests");
    };
    assert_eq!(expected, found);
    complete_sends();
    assert_eq!(extended.poll(), [7, 7]);
    found.clone()
}

const fn piece(lkey: u32, addr: u64) -> ibv_sge {
    ibv_sge {
        addr,
        length: 8,
        lkey,
    }
}

#[test]
fn each_operation_reaches_the_device_as_the_same_request_of_a_list_does() {
    let application = Application::start();
    let extended = Extended::start(&application, IBV_QPT_RC, ALL);
    // SAFETY: the region lives.
    let lkey = unsafe { (*application.register()).lkey };
    let same = |by_list, by_calls| _ = assert_same(&extended, by_list, by_calls);
    let rdma = ibv_rdma {
        remote_addr: 0x70,
        rkey: 5,
    };
    let mut one = [piece(lkey, 16)];
    let mut post = |opcode, more: &dyn Fn(&mut ibv_send_wr)| {
        extended.post(opcode, |request| {
            (request.sg_list, request.num_sge) = (one.as_mut_ptr(), 1);
            more(request);
        })
    };
    let list = |more: &dyn Fn(Calls)| {
        extended.list(|calls| {
            more(calls);
            // SAFETY: the pair lives.
            unsafe { calls.set_sge(lkey, 16, 8) };
        })
    };
    // SAFETY: the pair lives.
    unsafe {
        same(
            post(IBV_WR_RDMA_WRITE, &|request| request.wr.rdma = rdma),
            list(&|calls| calls.write(5, 0x70)),
        );
        same(
            post(IBV_WR_RDMA_WRITE_WITH_IMM, &|request| {
                (request.wr.rdma, request.imm_data) = (rdma, 9);
            }),
            list(&|calls| calls.write_imm(5, 0x70, 9)),
        );
        same(
            post(IBV_WR_RDMA_READ, &|request| request.wr.rdma = rdma),
            list(&|calls| calls.read(5, 0x70)),
        );
        same(post(IBV_WR_SEND, &|_| {}), list(&|calls| calls.send()));
        same(
            post(IBV_WR_SEND_WITH_IMM, &|request| request.imm_data = 9),
            list(&|calls| calls.send_imm(9)),
        );
        same(
            post(IBV_WR_SEND_WITH_INV, &|request| request.imm_data = 5),
            list(&|calls| calls.send_inv(5)),
        );
        let atomic = ibv_atomic {
            remote_addr: 0x70,
            compare_add: 1,
            swap: 2,
            rkey: 5,
        };
        let mut post_atomic = |opcode| post(opcode, &|request| request.wr.atomic = atomic);
        same(
            post_atomic(IBV_WR_ATOMIC_CMP_AND_SWP),
            list(&|calls| calls.compare(5, 0x70, 1, 2)),
        );
        same(
            post_atomic(IBV_WR_ATOMIC_FETCH_AND_ADD),
            list(&|calls| calls.fetch_add(5, 0x70, 1)),
        );
    }
}

#[test]
fn several_pieces_replace_the_pieces_attached_first() {
    let application = Application::start();
    let extended = Extended::start(&application, IBV_QPT_RC, ALL);
    // SAFETY: the region lives.
    let lkey = unsafe { (*application.register()).lkey };
    let mut two = [piece(lkey, 32), piece(lkey, 48)];
    let posted = extended.post(IBV_WR_SEND, |request| {
        (request.sg_list, request.num_sge) = (two.as_mut_ptr(), 2);
    });
    // SAFETY: the pair lives.
    let listed = extended.list(|calls| unsafe {
        calls.send();
        calls.set_sge(lkey, 16, 8);
        calls.set_sge_list(2, two.as_ptr());
    });
    assert_same(&extended, posted, listed);
}

#[test]
fn datagrams_are_put_together_with_their_address() {
    let application = Application::start();
    let extended = Extended::start(&application, IBV_QPT_UD, 0b1100);
    let mut attributes = ibv_ah_attr::default();
    // SAFETY: the domain is the application's.
    let ah = unsafe { shim::create_ah(application.pd, &raw mut attributes) };
    for imm_data in [None, Some(9)] {
        let opcode = if imm_data.is_some() {
            IBV_WR_SEND_WITH_IMM
        } else {
            IBV_WR_SEND
        };
        let posted = extended.post(opcode, |request| {
            request.imm_data = imm_data.unwrap_or(0);
            request.wr.ud = ibv_ud {
                ah,
                remote_qpn: 5,
                remote_qkey: 6,
            };
        });
        // SAFETY: the pair and the handle live.
        let listed = extended.list(|calls| unsafe {
            match imm_data {
                Some(data) => calls.send_imm(data),
                None => calls.send(),
            }
            calls.set_ud_addr(ah, 5, 6);
        });
        let to = assert_same(&extended, posted, listed).to;
        assert!(with(|device| device.addresses.routes.contains_key(&to.0)));
        assert_eq!((to.1, to.2), (5, 6));
    }
    // SAFETY: nothing uses the handle any more.
    assert_eq!(unsafe { shim::destroy_ah(ah) }, 0);
}

#[test]
fn data_that_is_taken_at_once_may_change_before_the_list_is_complete() {
    let application = Application::start();
    let extended = Extended::start(&application, IBV_QPT_RC, ALL);
    let (mut first, mut second) = (*b"first", *b"second");
    let at = |bytes: &mut [u8]| bytes.as_mut_ptr().cast::<c_void>();
    // SAFETY: the pair and the buffers live.
    let result = extended.list(|calls| unsafe {
        calls.send();
        calls.set_inline_data(at(&mut first), 5);
        calls.write(5, 0x70);
        let parts = [
            (at(&mut first), 2),
            (ptr::null_mut(), 0),
            (at(&mut second), 6),
        ]
        .map(|(addr, length)| ibv_data_buf { addr, length });
        calls.set_inline_data_list(3, parts.as_ptr());
        calls.send();
        calls.set_inline_data(ptr::null_mut(), 0);
        (first, second) = (*b"-----", *b"------");
    });
    assert_eq!(result, 0);
    let sent: Vec<_> = taken()
        .into_iter()
        .map(|one| (one.flags, one.data))
        .collect();
    let flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE;
    let data = [&b"first"[..], b"fisecond", b""];
    assert_eq!(sent, data.map(|data| (flags, data.to_vec())));
    complete_sends();
    assert_eq!(extended.poll(), [7, 7, 7]);
    // The flag alone has no effect: the way of attaching counts. The last attachment holds.
    // SAFETY: as above.
    let result = extended.list(|calls| unsafe {
        calls.next(8, IBV_SEND_INLINE);
        calls.send();
        calls.set_inline_data(at(&mut first), 5);
        calls.set_sge(0, 0, 8);
        calls.send();
    });
    let sent = taken();
    assert_eq!((result, sent[0].flags, sent[1].flags), (0, 0, 0));
    assert_eq!(sent[0].pieces.len(), 1);
    complete_sends();
    assert_eq!(extended.poll(), [8, 8]);
    assert_eq!((first, second), (*b"-----", *b"------"));
}

#[test]
fn what_is_not_offered_is_refused_and_leaves_nothing() {
    let application = Application::start();
    let before = with(|device| device.numbers.clone());
    let refused = |qp_type, more: &dyn Fn(&mut ibv_qp_init_attr_ex)| {
        // SAFETY: the thread's own errno.
        unsafe { *libc::__errno_location() = 0 };
        let pair = create(&application, qp_type, more);
        let errno = std::io::Error::last_os_error().raw_os_error();
        assert_eq!((pair, errno), (ptr::null_mut(), Some(libc::EOPNOTSUPP)));
    };
    // `IBV_QP_EX_WITH_TSO`, `IBV_QP_EX_WITH_ATOMIC_WRITE`
    for operation in [10, 12] {
        refused(IBV_QPT_RC, &|wanted| wanted.send_ops_flags = 1 << operation);
    }
    for operation in (0..10).filter(|operation| !matches!(operation, 2 | 3)) {
        refused(IBV_QPT_UD, &|wanted| wanted.send_ops_flags = 1 << operation);
    }
    // `IBV_QPT_UC`
    refused(3, &|wanted| wanted.send_ops_flags = 1);
    // Two of the bits request nothing, since their fields are 0.
    for bit in (1..32).filter(|bit| !matches!(bit, 2 | 3 | 6)) {
        refused(IBV_QPT_RC, &|wanted| wanted.comp_mask |= 1 << bit);
    }
    refused(IBV_QPT_RC, &|wanted| {
        wanted.comp_mask = IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    });
    // More than the available memory.
    let too_much = create(&application, IBV_QPT_RC, |wanted| {
        wanted.send_ops_flags = ALL;
        (wanted.cap.max_send_wr, wanted.cap.max_inline_data) = (u32::MAX - 1, u32::MAX);
    });
    assert!(too_much.is_null());
    assert_eq!(with(|device| device.numbers.clone()), before);
    assert_eq!(shim::queue_pairs().len(), 1);
    // Calls that were not requested are absent.
    let extended = Extended::start(&application, IBV_QPT_RC, 1);
    // SAFETY: the pair lives.
    let calls = unsafe { &(*extended.calls.0).wr };
    assert!(calls.wr_rdma_write.is_some() && calls.wr_set_sge.is_some());
    assert!(calls.wr_send.is_none() && calls.wr_bind_mw.is_none());
    assert!(calls.wr_set_ud_addr.is_none() && calls.wr_send_tso.is_none());
    // Other queue pairs have no calls.
    // SAFETY: the pairs live.
    unsafe { assert!(shim::qp_to_qp_ex(application.pair).is_null()) };
    let plain = create(&application, IBV_QPT_RC, |wanted| {
        wanted.comp_mask = IBV_QP_INIT_ATTR_PD;
    });
    // SAFETY: as above.
    unsafe {
        assert!(shim::qp_to_qp_ex(plain).is_null());
        assert_eq!(shim::destroy_qp(plain), 0);
    }
}
