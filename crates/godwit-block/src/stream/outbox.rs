//! What waits to be sent on one connection.

use std::collections::VecDeque;
use std::io;
use std::rc::Rc;

use godwit_core::action::ChunkSlot;
use godwit_core::request::RequestTag;
use io_uring::{opcode, types};

use super::StreamError;
use crate::memory::Mapping;
use crate::ring::{Ring, Token};
use crate::tls::Session;

/// Longest header, with what follows it inside a frame.
const HEADER: usize = 64;

/// Frames sent with one operation.
const BATCH: usize = 32;

/// Payload bytes sent with one operation, so that the copy into the socket leaves time for others.
const BATCH_BYTES: usize = 1 << 20;

/// Plaintext encrypted for one send operation at most, so that bulk data leaves time for others.
const TURN: usize = 512 << 10;

/// Frames that may wait: far more than honest peers can cause.
const LONGEST: usize = 1 << 16;

/// What keeps a payload's memory in place until it has been sent.
#[derive(Debug)]
pub(crate) enum Keep {
    /// The buffer of a request's slot, on which a hold was taken.
    Slot(RequestTag),
    /// The buffer of a chunk's slot, on which a hold was taken, and the mapping it lies in.
    Chunk {
        slot: ChunkSlot,
        memory: Rc<Mapping>,
    },
}

/// Bytes that follow a frame's header.
#[derive(Debug)]
pub(crate) struct Payload {
    pointer: *const u8,
    length: usize,
    pub(crate) keep: Keep,
}

impl Payload {
    /// # Safety
    /// What `keep` names holds the `length` bytes at `pointer` in place, initialised and unchanged,
    /// until the payload is released.
    pub(crate) const unsafe fn new(pointer: *const u8, length: usize, keep: Keep) -> Self {
        Self {
            pointer,
            length,
            keep,
        }
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: as `new` was promised.
        unsafe { std::slice::from_raw_parts(self.pointer, self.length) }
    }
}

/// A header and what follows it.
#[derive(Debug)]
pub(crate) struct Frame {
    header: [u8; HEADER],
    header_length: usize,
    payload: Option<Payload>,
}

impl Frame {
    /// A frame that starts with the concatenation of `parts`, at most 64 bytes in all.
    pub(crate) fn new(parts: &[&[u8]], payload: Option<Payload>) -> Self {
        let mut header = [0; HEADER];
        let mut header_length = 0;
        for part in parts {
            header[header_length..header_length + part.len()].copy_from_slice(part);
            header_length += part.len();
        }
        Self {
            header,
            header_length,
            payload,
        }
    }

    /// What follows the first `done` bytes, up to the end of the header or of the payload.
    fn rest(&self, done: usize) -> &[u8] {
        let header = &self.header[..self.header_length];
        match &self.payload {
            Some(payload) if done >= header.len() => &payload.bytes()[done - header.len()..],
            _ => &header[done..],
        }
    }

    fn length(&self) -> usize {
        self.header_length + self.payload.as_ref().map_or(0, |payload| payload.length)
    }
}

/// Memory of one send operation's description; it stays where it is while the kernel reads it.
struct Scatter {
    header: libc::msghdr,
    parts: [libc::iovec; 2 * BATCH],
}

/// The frames that wait to be sent on one connection, in order, and those that are being sent.
pub(crate) struct Outbox {
    waiting: VecDeque<Frame>,
    /// Frames that the operation in flight sends. Never grows beyond its capacity, so that their
    /// headers stay in place.
    flying: VecDeque<Frame>,
    /// Bytes of the first frame (of `flying`, or with TLS of `waiting`) that are done.
    done: usize,
    bytes: usize,
    scatter: Box<Scatter>,
    sending: bool,
    /// What the operation in flight leaves untouched is dropped when it ends.
    discard_flying: bool,
}

impl Outbox {
    pub(super) fn new(tls: bool) -> io::Result<Self> {
        // SAFETY: all-zero bytes are a valid value of both C structures.
        let scatter = Box::new(unsafe { std::mem::zeroed::<Scatter>() });
        let batch = if tls { 0 } else { BATCH };
        Ok(Self {
            waiting: VecDeque::with_capacity(2 * BATCH),
            flying: VecDeque::with_capacity(batch),
            done: 0,
            bytes: 0,
            scatter,
            sending: false,
            discard_flying: false,
        })
    }

    /// Bytes that have not left.
    pub(crate) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Frames that have not left.
    pub(crate) fn frames(&self) -> usize {
        self.waiting.len() + self.flying.len()
    }

    /// Whether nothing is queued.
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.flying.is_empty()
    }

    /// Whether more is queued than any honest other side can cause.
    pub(crate) fn overflows(&self) -> bool {
        self.frames() > LONGEST
    }

    pub(super) const fn is_sending(&self) -> bool {
        self.sending
    }

    pub(super) fn push(&mut self, frame: Frame) {
        self.bytes += frame.length();
        self.waiting.push_back(frame);
    }

    /// Sends as much as one operation takes.
    pub(super) fn send(&mut self, ring: &mut Ring, fd: types::Fd, token: Token) {
        while self.flying.len() < BATCH
            && let Some(frame) = self.waiting.pop_front()
        {
            self.flying.push_back(frame);
        }
        let scatter = &mut *self.scatter;
        let (mut count, mut total, mut skip) = (0, 0, self.done);
        for frame in &self.flying {
            let header = &frame.header[..frame.header_length];
            let payload = frame.payload.as_ref().map_or(&[][..], Payload::bytes);
            for part in [header, payload] {
                let done = skip.min(part.len());
                skip -= done;
                let part = &part[done..];
                if part.is_empty() || total >= BATCH_BYTES {
                    continue;
                }
                let length = part.len().min(BATCH_BYTES - total);
                scatter.parts[count] = libc::iovec {
                    iov_base: part.as_ptr().cast_mut().cast(),
                    iov_len: length,
                };
                total += length;
                count += 1;
            }
        }
        scatter.header.msg_iov = scatter.parts.as_mut_ptr();
        scatter.header.msg_iovlen = count;
        let entry =
            opcode::SendMsg::new(fd, &raw const scatter.header).flags(libc::MSG_NOSIGNAL as u32);
        self.sending = true;
        // SAFETY: headers lie in `flying`, which is not changed while `sending`; payloads are kept
        // as `Payload::new` was promised; the list is boxed. All outlive the operation, because a
        // stream is not dropped before it is idle.
        unsafe { ring.push(entry.build(), token) };
    }

    /// Hands frames to the session, a bounded number of bytes.
    pub(super) fn encrypt(
        &mut self,
        session: &mut Session,
        release: &mut dyn FnMut(Payload),
    ) -> Result<(), StreamError> {
        let mut budget = TURN;
        while budget > 0
            && let Some(frame) = self.waiting.front()
        {
            let part = frame.rest(self.done);
            let part = &part[..part.len().min(budget)];
            let taken = session.write(part)?;
            budget -= taken;
            self.bytes -= taken;
            self.done += taken;
            if self.done == frame.length() {
                self.done = 0;
                if let Some(payload) = self.waiting.pop_front().and_then(|frame| frame.payload) {
                    release(payload);
                }
            } else if taken < part.len() {
                break;
            }
        }
        Ok(())
    }

    /// Sends ciphertext.
    pub(super) fn send_encrypted(
        &mut self,
        ring: &mut Ring,
        fd: types::Fd,
        token: Token,
        (pointer, length): (*const u8, usize),
    ) {
        if length == 0 {
            return;
        }
        let entry = opcode::Send::new(fd, pointer, length as u32).flags(libc::MSG_NOSIGNAL);
        self.sending = true;
        // SAFETY: the ciphertext lies in the session's buffer, which is not changed while
        // `sending` and outlives the operation, because a stream is not dropped before it is idle.
        unsafe { ring.push(entry.build(), token) };
    }

    /// The operation ended; the number of bytes it sent.
    pub(super) fn finish(&mut self, result: i32) -> Result<usize, StreamError> {
        self.sending = false;
        match result {
            count if count > 0 => Ok(count as usize),
            error if matches!(-error, libc::EINTR | libc::EAGAIN) => Ok(0),
            error => Err(StreamError::from_result(error)),
        }
    }

    /// `count` bytes of the frames in flight have left.
    pub(super) fn advance(&mut self, count: usize, release: &mut dyn FnMut(Payload)) {
        self.bytes -= count;
        self.done += count;
        while let Some(frame) = self.flying.front()
            && self.done >= frame.length()
        {
            self.done -= frame.length();
            if let Some(payload) = self.flying.pop_front().and_then(|frame| frame.payload) {
                release(payload);
            }
        }
        if std::mem::take(&mut self.discard_flying) {
            self.discard_flying(release);
        }
    }

    /// Drops the frames of which no byte has left. The operation in flight may send more of those
    /// that it was given: the rest of them goes when it ends.
    pub(super) fn discard(&mut self, release: &mut dyn FnMut(Payload)) {
        // Only with TLS can the first waiting frame be half encrypted.
        let begun = usize::from(self.flying.is_empty() && self.done > 0);
        while self.waiting.len() > begun
            && let Some(frame) = self.waiting.pop_back()
        {
            self.bytes -= frame.length();
            frame.payload.into_iter().for_each(&mut *release);
        }
        if self.sending {
            self.discard_flying = !self.flying.is_empty();
        } else {
            self.discard_flying(release);
        }
    }

    /// Drops the frames taken for sending of which no byte has left. Not while they are sent.
    fn discard_flying(&mut self, release: &mut dyn FnMut(Payload)) {
        while self.flying.len() > usize::from(self.done > 0)
            && let Some(frame) = self.flying.pop_back()
        {
            self.bytes -= frame.length();
            frame.payload.into_iter().for_each(&mut *release);
        }
    }

    /// Drops everything that the kernel does not use at the moment.
    pub(super) fn clear(&mut self, release: &mut dyn FnMut(Payload)) {
        let flying = if self.sending {
            None
        } else {
            Some(self.flying.drain(..))
        };
        for frame in self.waiting.drain(..).chain(flying.into_iter().flatten()) {
            self.bytes = self.bytes.saturating_sub(frame.length());
            if let Some(payload) = frame.payload {
                release(payload);
            }
        }
        if self.flying.is_empty() {
            self.done = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::ring::Completion;

    const LENGTH: usize = 64 << 10;
    static DATA: [u8; LENGTH] = [7; LENGTH];

    fn frame(index: u8) -> Frame {
        let keep = Keep::Slot(RequestTag(u32::from(index)));
        // SAFETY: the data is there forever and never changes.
        let payload = unsafe { Payload::new(DATA.as_ptr(), LENGTH, keep) };
        Frame::new(&[&[index]], Some(payload))
    }

    /// Notes which frames' payloads are released.
    fn note(released: &mut Vec<u32>) -> impl FnMut(Payload) + '_ {
        |payload| match payload.keep {
            Keep::Slot(tag) => released.push(tag.0),
            Keep::Chunk { .. } => panic!("no chunk was queued"),
        }
    }

    #[test]
    fn frames_that_wait_are_dropped_whole() {
        let mut outbox = Outbox::new(false).expect("an outbox");
        (0..40).for_each(|index| outbox.push(frame(index)));
        let mut released = Vec::new();
        outbox.discard(&mut note(&mut released));
        assert!(outbox.is_empty());
        assert_eq!(outbox.bytes(), 0);
        released.sort_unstable();
        assert!(released.into_iter().eq(0..40));
    }

    #[test]
    fn a_frame_that_is_half_encrypted_stays() {
        let mut outbox = Outbox::new(true).expect("an outbox");
        (0..3).for_each(|index| outbox.push(frame(index)));
        outbox.done = 100;
        outbox.bytes -= 100;
        let mut released = Vec::new();
        outbox.discard(&mut note(&mut released));
        assert_eq!(released, [2, 1]);
        assert_eq!(outbox.frames(), 1);
        assert_eq!(outbox.bytes(), LENGTH + 1 - 100);
    }

    #[test]
    fn what_the_operation_in_flight_does_not_send_is_dropped_and_what_follows_is_sent() {
        let (ours, mut theirs) = UnixStream::pair().expect("sockets");
        rustix::net::sockopt::set_socket_send_buffer_size(&ours, LENGTH).expect("set");
        let fd = types::Fd(ours.as_raw_fd());
        let mut ring = Ring::new().expect("a ring");
        let mut outbox = Outbox::new(false).expect("an outbox");
        let mut released = Vec::new();
        (0..40).for_each(|index| outbox.push(frame(index)));
        outbox.send(&mut ring, fd, Token::Send(0));
        outbox.discard(&mut note(&mut released));
        assert!(
            released.iter().all(|&tag| tag >= 8),
            "a payload that may be in flight was released: {released:?}"
        );
        outbox.push(frame(200));
        let reader = std::thread::spawn(move || {
            let mut seen = Vec::new();
            let mut bytes = vec![0; LENGTH + 1];
            while theirs.read_exact(&mut bytes).is_ok() {
                assert!(bytes[1..] == DATA);
                seen.push(bytes[0]);
            }
            seen
        });
        let mut batch = [Completion {
            token: Token::Wake,
            result: 0,
            more: false,
        }; 4];
        while !outbox.is_empty() {
            if !outbox.is_sending() {
                outbox.send(&mut ring, fd, Token::Send(0));
            }
            ring.wait(None).expect("a wait");
            let count = ring.completions(&mut batch);
            for completion in &batch[..count] {
                let sent = outbox.finish(completion.result).expect("sent");
                outbox.advance(sent, &mut note(&mut released));
            }
        }
        assert_eq!(outbox.bytes(), 0);
        drop(ours);
        let seen = reader.join().expect("a reader");
        let (&last, before) = seen.split_last().expect("frames");
        assert_eq!(last, 200);
        assert!(
            before.len() <= 16,
            "hardly anything was dropped: {before:?}"
        );
        assert!(
            before.iter().copied().eq(0..before.len() as u8),
            "{before:?}"
        );
        released.sort_unstable();
        assert!(released.into_iter().eq((0..40).chain([200])));
    }
}
