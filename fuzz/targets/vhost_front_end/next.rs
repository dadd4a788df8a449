//! The front end that comes after one that means harm: an ordinary one, which has a sector read and
//! stops its ring.

use std::fs::File;
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::front_end::{counter, message, sealed};

const GET_FEATURES: u32 = 1;
const SET_FEATURES: u32 = 2;
const SET_OWNER: u32 = 3;
const SET_MEM_TABLE: u32 = 5;
const SET_VRING_NUM: u32 = 8;
const SET_VRING_ADDR: u32 = 9;
const SET_VRING_BASE: u32 = 10;
const GET_VRING_BASE: u32 = 11;
const SET_VRING_KICK: u32 = 12;
const SET_VRING_CALL: u32 = 13;

/// Of the device's features, the only one that its driver must know.
const VERSION_1: u64 = 1 << 32;

/// Bytes of its memory: a page for the ring, and one for data.
const MEMORY: u64 = 8192;
/// Offsets in it. The descriptors are at its start.
const AVAILABLE: u64 = 128;
const USED: u64 = 160;
const HEADER: u64 = 256;
const STATUS: u64 = 272;
const DATA: u64 = 4096;

/// Descriptors of its ring.
const SIZE: u32 = 8;

/// The next descriptor goes with this one.
const NEXT: u16 = 1;
/// The device writes there.
const WRITE: u16 = 2;

pub(crate) struct Next {
    socket: UnixStream,
    memory: File,
    kick: OwnedFd,
    call: OwnedFd,
}

impl Next {
    pub(crate) fn new(socket: UnixStream) -> Self {
        Self {
            socket,
            memory: sealed(c"next", MEMORY),
            kick: counter(EventfdFlags::NONBLOCK),
            call: counter(EventfdFlags::empty()),
        }
    }

    /// Panics when the server does not do its duty, each part within this time.
    pub(crate) fn is_served(mut self, patience: Duration) {
        self.socket
            .set_read_timeout(Some(patience))
            .expect("a socket");
        self.send(GET_FEATURES, &[], None);
        let features = self.answer();
        assert!(features & VERSION_1 != 0, "the device's features");
        self.put_request();
        self.send(SET_OWNER, &[], None);
        self.send(SET_FEATURES, &[VERSION_1], None);
        // One region, at the same addresses for all.
        self.send(
            SET_MEM_TABLE,
            &[1, 0, MEMORY, 0, 0],
            Some(self.memory.as_fd()),
        );
        self.send(SET_VRING_NUM, &[u64::from(SIZE) << 32], None);
        self.send(SET_VRING_ADDR, &[0, 0, USED, AVAILABLE, 0], None);
        self.send(SET_VRING_BASE, &[0], None);
        self.send(SET_VRING_CALL, &[0], Some(self.call.as_fd()));
        self.send(SET_VRING_KICK, &[0], Some(self.kick.as_fd()));
        self.wait_for_answer(patience);
        self.send(GET_VRING_BASE, &[0], None);
        let state = self.answer();
        assert_eq!(state, 1 << 32, "one request of the ring was taken");
    }

    /// Reads the disk's first sector.
    fn put_request(&self) {
        let descriptor = |address: u64, length: u64, flags: u16, next: u64| {
            [address, length | u64::from(flags) << 32 | next << 48]
        };
        let table = [
            descriptor(HEADER, 16, NEXT, 1),
            descriptor(DATA, 512, NEXT | WRITE, 2),
            descriptor(STATUS, 1, WRITE, 0),
        ];
        self.put(0, &words(table.as_flattened()));
        self.put(STATUS, &[255]);
        // No flags, one request, which starts at the first descriptor.
        self.put(AVAILABLE, &words(&[1 << 16]));
    }

    fn put(&self, offset: u64, bytes: &[u8]) {
        self.memory.write_all_at(bytes, offset).expect("memory");
    }

    /// Until the ring shows an answer, whatever signals come before.
    fn wait_for_answer(&self, patience: Duration) {
        let limit = Timespec::try_from(patience).expect("a time");
        let (mut used, mut status) = ([0; 4], [0]);
        while used[2..] != [1, 0] {
            let mut polled = [PollFd::new(&self.call, PollFlags::IN)];
            let ready = retry_on_intr(|| poll(&mut polled, Some(&limit))).expect("to wait");
            assert_eq!(ready, 1, "the next front end's request is answered");
            rustix::io::read(&self.call, &mut [0; 8]).expect("a signal");
            self.memory.read_exact_at(&mut used, USED).expect("memory");
        }
        self.memory
            .read_exact_at(&mut status, STATUS)
            .expect("memory");
        assert_eq!(status, [0], "the request is done");
    }

    fn send(&self, code: u32, payload: &[u64], attached: Option<BorrowedFd<'_>>) {
        let bytes = message(code, &words(payload));
        let attached = attached.as_slice();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut rights = SendAncillaryBuffer::new(&mut space);
        if !attached.is_empty() {
            assert!(
                rights.push(SendAncillaryMessage::ScmRights(attached)),
                "room"
            );
        }
        let sent = sendmsg(
            &self.socket,
            &[IoSlice::new(&bytes)],
            &mut rights,
            SendFlags::NOSIGNAL,
        );
        assert_eq!(
            sent,
            Ok(bytes.len()),
            "the server listens to the next front end"
        );
    }

    /// The one number of the server's answer.
    fn answer(&mut self) -> u64 {
        let mut bytes = [0; 20];
        let read = self.socket.read_exact(&mut bytes);
        read.expect("the next front end is answered");
        u64::from_le_bytes(*bytes.last_chunk().expect("a number"))
    }
}

fn words(numbers: &[u64]) -> Vec<u8> {
    numbers
        .iter()
        .flat_map(|number| number.to_le_bytes())
        .collect()
}
