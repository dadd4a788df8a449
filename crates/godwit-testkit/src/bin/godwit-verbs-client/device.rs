//! The device's objects, made once and kept to the end.

use std::ffi::{CStr, c_int, c_void};
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use std::time::Duration;

use godwit_verbs::abi::*;
use rustix::mm::{MapFlags, ProtFlags};

use super::Arguments;
use super::content::ledger::MESSAGE;
use super::exchange::Reach;
use super::verbs::Verbs;

/// Requests of a queue pair in flight at most.
pub(crate) const SENDS: u64 = 8;
/// Waiting receives of a queue pair at most.
pub(crate) const RECEIVES: u64 = 16;

/// `IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ`
const ACCESS: c_int = 7;
/// `IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND`: peers reach memory through windows alone.
const ACCESS_BY_WINDOWS: c_int = 17;
/// Masks of the three changes to connect a queue pair (ibv_modify_qp(3)).
const TO_INIT: c_int = 1 | 1 << 4 | 1 << 5 | 1 << 3;
const TO_RTR: c_int = 1 | 1 << 7 | 1 << 8 | 1 << 20 | 1 << 12 | 1 << 17 | 1 << 15;
const TO_RTS: c_int = 1 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 16 | 1 << 13;
/// The same masks for a queue pair for datagrams.
const DATAGRAMS_TO_INIT: c_int = 1 | 1 << 4 | 1 << 5 | IBV_QP_QKEY;
const DATAGRAMS_TO_RTR: c_int = IBV_QP_STATE;
const DATAGRAMS_TO_RTS: c_int = IBV_QP_STATE | 1 << 16;
/// The key by which datagrams are accepted.
pub(crate) const DATAGRAM_KEY: u32 = 0x1234;
/// `IBV_MTU_1024`
const MTU: c_int = 3;

/// Bytes in front of a received datagram, written by the device (`struct ibv_grh`).
const HEADER: usize = 40;
/// Bytes of a slot.
const SLOT: usize = MESSAGE + 64;

/// Slots of one message each, with room for a header in front. Every queue pair has slots to send and to receive,
/// landing slots for the peer's writes (one, or one for each of two windows), and a slot for data read back.
#[derive(Clone, Copy)]
pub(crate) enum Slot {
    Send(usize, u64),
    Receive(usize, u64),
    Landing(usize, usize),
    ReadBack(usize),
}

pub(crate) struct Device {
    pub(crate) verbs: Verbs,
    channel: *mut ibv_comp_channel,
    /// The epoll(7) instance to wait at, which watches the channel.
    instance: Option<OwnedFd>,
    pub(crate) queue: *mut ibv_cq,
    pub(crate) shared: *mut ibv_srq,
    pub(crate) pairs: Vec<*mut ibv_qp>,
    pub(crate) domain: *mut ibv_pd,
    /// Bytes in front of a received message.
    header: usize,
    pub(crate) region: *mut ibv_mr,
    /// The type of the windows through which peers reach memory; 0 if they use the region's key.
    pub(crate) windows: c_int,
    memory: *mut u8,
    gid: ibv_gid,
    gid_index: u8,
}

pub(crate) fn made<T>(object: *mut T, what: &str) -> io::Result<*mut T> {
    if object.is_null() {
        let error = io::Error::last_os_error();
        return Err(io::Error::other(format!("{what}: {error}")));
    }
    Ok(object)
}

pub(crate) fn done(result: c_int, what: &str) -> io::Result<()> {
    if result == 0 {
        return Ok(());
    }
    let error = io::Error::from_raw_os_error(result.abs());
    Err(io::Error::other(format!("{what}: {error}")))
}

/// Maps shared memory, for as long as the process runs.
fn shared_memory(length: usize) -> io::Result<*mut u8> {
    // SAFETY: new memory at a place of the kernel's choice.
    let mapped = unsafe {
        rustix::mm::mmap_anonymous(
            ptr::null_mut(),
            length,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED,
        )
    };
    Ok(mapped?.cast())
}

impl Device {
    pub(crate) fn open(arguments: &Arguments) -> io::Result<Self> {
        let verbs = Verbs::load()?;
        let count = arguments.peers() * usize::from(arguments.pairs);
        // SAFETY: the calls are in the order that verbs demand, with the objects made before.
        unsafe {
            let mut devices = 0;
            let list = made(
                (verbs.ibv_get_device_list)(&raw mut devices),
                "ibv_get_device_list",
            )?;
            let device = (0..devices as usize)
                .map(|place| *list.add(place))
                .find(|device| {
                    CStr::from_ptr((verbs.ibv_get_device_name)(*device)).to_bytes()
                        == arguments.device.as_bytes()
                })
                .ok_or_else(|| io::Error::other(format!("no device {}", arguments.device)))?;
            let context = made((verbs.ibv_open_device)(device), "ibv_open_device")?;
            let mut gid = ibv_gid::default();
            let index = c_int::from(arguments.gid_index);
            done(
                (verbs.ibv_query_gid)(context, 1, index, &raw mut gid),
                "ibv_query_gid",
            )?;
            let pd = made((verbs.ibv_alloc_pd)(context), "ibv_alloc_pd")?;
            let length = slots(count) * SLOT;
            let memory = if arguments.memory > 0 {
                shared_memory(length)?
            } else {
                Box::leak(vec![0u8; length].into_boxed_slice()).as_mut_ptr()
            };
            let access = arguments.windows.map_or(ACCESS, |_| ACCESS_BY_WINDOWS);
            let region = made(
                (verbs.ibv_reg_mr)(pd, memory.cast(), length, access),
                "ibv_reg_mr",
            )?;
            let channel = if arguments.events {
                made(
                    (verbs.ibv_create_comp_channel)(context),
                    "ibv_create_comp_channel",
                )?
            } else {
                ptr::null_mut()
            };
            let instance = if arguments.epoll {
                Some(epoll_of((*channel).fd)?)
            } else {
                None
            };
            let entries = (count as u64 * (SENDS + RECEIVES)) as c_int;
            let queue = made(
                (verbs.ibv_create_cq)(context, entries, ptr::null_mut::<c_void>(), channel, 0),
                "ibv_create_cq",
            )?;
            let shared = if arguments.shared_receives {
                let mut wanted = ibv_srq_init_attr {
                    srq_context: ptr::null_mut(),
                    attr: ibv_srq_attr {
                        max_wr: (count as u64 * RECEIVES) as u32,
                        max_sge: 1,
                        srq_limit: 0,
                    },
                };
                made(
                    (verbs.ibv_create_srq)(pd, &raw mut wanted),
                    "ibv_create_srq",
                )?
            } else {
                ptr::null_mut()
            };
            let mut pairs = Vec::new();
            for _ in 0..count {
                let mut wanted: ibv_qp_init_attr = std::mem::zeroed();
                (wanted.send_cq, wanted.recv_cq, wanted.srq) = (queue, queue, shared);
                wanted.qp_type = if arguments.datagrams {
                    IBV_QPT_UD
                } else {
                    IBV_QPT_RC
                };
                (wanted.cap.max_send_wr, wanted.cap.max_send_sge) = (SENDS as u32, 1);
                (wanted.cap.max_recv_wr, wanted.cap.max_recv_sge) = (RECEIVES as u32, 1);
                let pair = made((verbs.ibv_create_qp)(pd, &raw mut wanted), "ibv_create_qp")?;
                let mut to = ibv_qp_attr {
                    qp_state: IBV_QPS_INIT,
                    port_num: 1,
                    qp_access_flags: ACCESS as u32,
                    qkey: DATAGRAM_KEY,
                    ..Default::default()
                };
                let mask = if arguments.datagrams {
                    DATAGRAMS_TO_INIT
                } else {
                    TO_INIT
                };
                done((verbs.ibv_modify_qp)(pair, &raw mut to, mask), "to INIT")?;
                pairs.push(pair);
            }
            Ok(Self {
                verbs,
                channel,
                instance,
                queue,
                shared,
                pairs,
                domain: pd,
                header: if arguments.datagrams { HEADER } else { 0 },
                region,
                windows: arguments.windows.map_or(0, c_int::from),
                memory,
                gid,
                gid_index: arguments.gid_index,
            })
        }
    }

    /// Returns the addresses and keys for a peer of these queue pairs.
    pub(crate) fn reach(&self, pairs: Range<usize>) -> Reach {
        // SAFETY: the objects live to the end.
        unsafe {
            Reach {
                gid: self.gid.raw,
                landing: self.address(Slot::Landing(pairs.start, 0)) as u64,
                pairs: self.pairs[pairs]
                    .iter()
                    .map(|pair| (**pair).qp_num)
                    .collect(),
                key: (*self.region).rkey,
            }
        }
    }

    /// Connects each of these queue pairs to the peer's with the same place among them.
    pub(crate) fn connect(&self, pairs: Range<usize>, peer: &Reach) -> io::Result<()> {
        for (pair, number) in self.pairs[pairs].iter().zip(&peer.pairs) {
            let mut to = ibv_qp_attr {
                qp_state: IBV_QPS_RTR,
                path_mtu: MTU,
                dest_qp_num: *number,
                max_dest_rd_atomic: 1,
                min_rnr_timer: 12,
                ..Default::default()
            };
            to.ah_attr.is_global = 1;
            to.ah_attr.port_num = 1;
            to.ah_attr.grh.dgid = ibv_gid { raw: peer.gid };
            to.ah_attr.grh.sgid_index = self.gid_index;
            to.ah_attr.grh.hop_limit = 1;
            // SAFETY: the queue pair lives to the end.
            unsafe {
                done(
                    (self.verbs.ibv_modify_qp)(*pair, &raw mut to, TO_RTR),
                    "to RTR",
                )?
            };
            let mut to = ibv_qp_attr {
                qp_state: IBV_QPS_RTS,
                timeout: 14,
                retry_cnt: 7,
                // Without end: a moving receiver has no receives for a while.
                rnr_retry: 7,
                max_rd_atomic: 1,
                ..Default::default()
            };
            // SAFETY: as above.
            unsafe {
                done(
                    (self.verbs.ibv_modify_qp)(*pair, &raw mut to, TO_RTS),
                    "to RTS",
                )?
            };
        }
        Ok(())
    }

    /// Makes these queue pairs take and send datagrams; returns the address handle of the peer.
    pub(crate) fn open_to(&self, pairs: Range<usize>, peer: &Reach) -> io::Result<*mut ibv_ah> {
        for pair in &self.pairs[pairs] {
            for (state, mask) in [
                (IBV_QPS_RTR, DATAGRAMS_TO_RTR),
                (IBV_QPS_RTS, DATAGRAMS_TO_RTS),
            ] {
                let mut to = ibv_qp_attr {
                    qp_state: state,
                    ..Default::default()
                };
                // SAFETY: the queue pair lives to the end.
                let changed = unsafe { (self.verbs.ibv_modify_qp)(*pair, &raw mut to, mask) };
                done(changed, "to RTR and RTS")?;
            }
        }
        let mut there = ibv_ah_attr {
            is_global: 1,
            port_num: 1,
            ..Default::default()
        };
        there.grh.dgid = ibv_gid { raw: peer.gid };
        there.grh.sgid_index = self.gid_index;
        there.grh.hop_limit = 1;
        // SAFETY: the domain lives to the end.
        let handle = unsafe { (self.verbs.ibv_create_ah)(self.domain, &raw mut there) };
        made(handle, "ibv_create_ah")
    }

    /// Returns the peer's address of the landing of the queue pair at `place`, for this one of the two windows.
    pub(crate) fn landing(peer: &Reach, place: usize, window: usize) -> u64 {
        peer.landing + ((2 * place + window) * SLOT) as u64
    }

    pub(crate) fn address(&self, slot: Slot) -> *mut u8 {
        let count = self.pairs.len();
        let (pair, place) = match slot {
            Slot::Landing(pair, window) => (2 * pair, window as u64),
            Slot::ReadBack(pair) => (2 * count + pair, 0),
            Slot::Send(pair, number) => (3 * count + pair * SENDS as usize, number % SENDS),
            Slot::Receive(pair, number) => (
                3 * count + count * SENDS as usize + pair * RECEIVES as usize,
                number % (RECEIVES * count as u64),
            ),
        };
        let slot = pair + place as usize;
        assert!(slot < slots(count));
        // SAFETY: within the memory, as was just checked.
        unsafe { self.memory.add(slot * SLOT) }
    }

    /// Returns a slot's bytes. Nothing may be in flight to or from the slot.
    #[allow(clippy::mut_from_ref, reason = "the memory is the device's as well")]
    pub(crate) fn bytes(&self, slot: Slot) -> &mut [u8] {
        // SAFETY: within the memory; the caller uses one slot at a time, and the device none of this.
        unsafe { std::slice::from_raw_parts_mut(self.address(slot), MESSAGE) }
    }

    /// Returns the message in a slot of a receive; otherwise as [`Device::bytes`].
    #[allow(clippy::mut_from_ref, reason = "the memory is the device's as well")]
    pub(crate) fn received(&self, slot: Slot) -> &mut [u8] {
        // SAFETY: a slot has room for a header and a message; otherwise as in `bytes`.
        unsafe { std::slice::from_raw_parts_mut(self.address(slot).add(self.header), MESSAGE) }
    }

    /// Returns the right number of bytes in a completion of a receive.
    fn received_length(&self) -> usize {
        self.header + MESSAGE
    }

    pub(crate) fn piece(&self, slot: Slot) -> ibv_sge {
        ibv_sge {
            addr: self.address(slot) as u64,
            length: MESSAGE as u32,
            // SAFETY: the region lives to the end.
            lkey: unsafe { (*self.region).lkey },
        }
    }

    pub(crate) fn post_send(&self, pair: usize, request: &mut ibv_send_wr) -> io::Result<()> {
        let mut bad = ptr::null_mut();
        // SAFETY: does the same as the inline function of verbs.h.
        unsafe {
            let pair = self.pairs[pair];
            let post = (*(*pair).context)
                .ops
                .post_send
                .ok_or(io::ErrorKind::Unsupported)?;
            done(post(pair, request, &raw mut bad), "ibv_post_send")
        }
    }

    /// Posts to the queue pair, or to the shared queue if there is one.
    pub(crate) fn post_receive(&self, pair: usize, wr_id: u64, slot: Slot) -> io::Result<()> {
        let mut piece = self.piece(slot);
        piece.length = self.received_length() as u32;
        let mut request = ibv_recv_wr {
            wr_id,
            next: ptr::null_mut(),
            sg_list: &raw mut piece,
            num_sge: 1,
        };
        let mut bad = ptr::null_mut();
        // SAFETY: does the same as the inline functions of verbs.h.
        unsafe {
            let pair = self.pairs[pair];
            let operations = &(*(*pair).context).ops;
            let result = if self.shared.is_null() {
                let post = operations.post_recv.ok_or(io::ErrorKind::Unsupported)?;
                post(pair, &raw mut request, &raw mut bad)
            } else {
                let post = operations.post_srq_recv.ok_or(io::ErrorKind::Unsupported)?;
                post(self.shared, &raw mut request, &raw mut bad)
            };
            done(result, "posting a receive")
        }
    }

    /// Takes completions. If there are none and there is a channel, waits there for an event, for at most `patience` if
    /// given, and takes nothing.
    pub(crate) fn take<'a>(
        &self,
        into: &'a mut [ibv_wc],
        patience: Option<Duration>,
    ) -> io::Result<&'a [ibv_wc]> {
        let mut count = self.poll(into)?;
        if count == 0 && !self.channel.is_null() {
            self.ask_for_event()?;
            count = self.poll(into)?;
            if count == 0 && self.becomes_readable(patience)? {
                self.take_event()?;
            }
        }
        Ok(&into[..count])
    }

    /// Returns the queue pair whose request has succeeded; a receive must have the right number of bytes.
    pub(crate) fn succeeded(&self, completion: &ibv_wc) -> Result<usize, String> {
        if completion.status != IBV_WC_SUCCESS {
            return Err(format!(
                "request {:#x} failed with status {}",
                completion.wr_id, completion.status
            ));
        }
        let receives = completion.opcode & IBV_WC_RECV != 0;
        if receives && completion.byte_len as usize != self.received_length() {
            return Err(format!("a message of {} bytes", completion.byte_len));
        }
        self.pairs
            .iter()
            // SAFETY: the queue pairs live to the end.
            .position(|pair| unsafe { (**pair).qp_num } == completion.qp_num)
            .ok_or_else(|| format!("a completion of queue pair {:#x}", completion.qp_num))
    }

    fn poll(&self, into: &mut [ibv_wc]) -> io::Result<usize> {
        // SAFETY: does the same as the inline function of verbs.h.
        let count = unsafe {
            let poll = (*(*self.queue).context)
                .ops
                .poll_cq
                .ok_or(io::ErrorKind::Unsupported)?;
            poll(self.queue, into.len() as c_int, into.as_mut_ptr())
        };
        usize::try_from(count).map_err(|_| io::Error::other(format!("ibv_poll_cq gave {count}")))
    }

    fn ask_for_event(&self) -> io::Result<()> {
        // SAFETY: does the same as the inline function of verbs.h.
        unsafe {
            let ask = (*(*self.queue).context)
                .ops
                .req_notify_cq
                .ok_or(io::ErrorKind::Unsupported)?;
            done(ask(self.queue, 0), "ibv_req_notify_cq")
        }
    }

    /// Returns true if the channel has an event within this time; without a time, taking the event waits.
    fn becomes_readable(&self, patience: Option<Duration>) -> io::Result<bool> {
        if let Some(instance) = &self.instance {
            let patience = patience.map_or(-1, |patience| patience.as_millis() as c_int);
            let mut event = libc::epoll_event { events: 0, u64: 0 };
            // SAFETY: room for one event of this function's own.
            let found =
                unsafe { libc::epoll_wait(instance.as_raw_fd(), &raw mut event, 1, patience) };
            return told(found);
        }
        let Some(patience) = patience else {
            return Ok(true);
        };
        let mut ready = libc::pollfd {
            // SAFETY: the channel lives to the end.
            fd: unsafe { (*self.channel).fd },
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one element of this function's own.
        told(unsafe { libc::poll(&raw mut ready, 1, patience.as_millis() as c_int) })
    }

    fn take_event(&self) -> io::Result<()> {
        let (mut queue, mut cookie) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: both results are this function's.
        unsafe {
            let got = (self.verbs.ibv_get_cq_event)(self.channel, &raw mut queue, &raw mut cookie);
            if got != 0 || !ptr::eq(queue, self.queue) {
                return Err(io::Error::other("an event of a queue that is not ours"));
            }
            (self.verbs.ibv_ack_cq_events)(queue, 1);
        }
        Ok(())
    }
}

/// Interprets the result of a wait; returns true if the wait found an event.
fn told(found: c_int) -> io::Result<bool> {
    let error = io::Error::last_os_error();
    match found {
        // A wait with a timeout may end early when a process is restored from an image.
        -1 if error.kind() == io::ErrorKind::Interrupted => Ok(false),
        -1 => Err(error),
        found => Ok(found > 0),
    }
}

/// Creates an epoll instance that reports each event of this channel once.
fn epoll_of(channel: c_int) -> io::Result<OwnedFd> {
    let mut event = libc::epoll_event {
        events: (libc::EPOLLIN | libc::EPOLLET) as u32,
        u64: 0,
    };
    // SAFETY: a new descriptor without another owner, and an event of this function's own.
    unsafe {
        let instance = libc::epoll_create1(libc::EPOLL_CLOEXEC);
        if instance < 0 {
            return Err(io::Error::last_os_error());
        }
        let instance = OwnedFd::from_raw_fd(instance);
        let operation = libc::EPOLL_CTL_ADD;
        match libc::epoll_ctl(instance.as_raw_fd(), operation, channel, &raw mut event) {
            0 => Ok(instance),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

fn slots(pairs: usize) -> usize {
    pairs * (3 + SENDS as usize + RECEIVES as usize)
}
