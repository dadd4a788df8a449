//! The unsent frames of one connection.

use std::collections::VecDeque;
use std::io;

use io_uring::{opcode, types};

use super::StreamError;
use super::frame::{Frame, Keep, Payload};
use super::packing::{self, Packer, Step, What};
use super::sent_by::{SentBy, Workers};
use crate::ring::{Ring, Token};
use crate::tls::Session;

/// Frames sent with one operation.
const BATCH: usize = 32;

/// Payload bytes sent with one operation, so that the copy into the socket leaves time for others.
const BATCH_BYTES: usize = 1 << 20;

/// Plaintext encrypted for one send operation at most, so that bulk data leaves time for others.
const TURN: usize = 512 << 10;

/// Buffers of sent compressed frames that are kept for reuse.
const SPARE: usize = 8;

/// Frames that may wait: far more than honest peers can cause.
const LONGEST: usize = 1 << 16;

/// One step of compressing a waiting frame.
#[derive(Clone, Copy, Debug)]
pub struct Packed {
    /// Part of the frame to compress.
    pub what: What,
    /// Bytes of data covered by the step.
    pub data: usize,
    /// Outcome for the frame, once certain.
    pub end: Option<PackingEnd>,
}

/// The outcome of compressing a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PackingEnd {
    /// The frame leaves uncompressed.
    Useless,
    /// The frame's data has become shorter.
    Shorter {
        /// Bytes before.
        from: usize,
        /// Bytes after.
        to: usize,
    },
}

/// The description of one send operation. Stays in place while the kernel reads it.
struct Scatter {
    header: libc::msghdr,
    parts: [libc::iovec; 2 * BATCH],
}

/// The frames that wait to be sent on one connection, in order, and the frames in flight.
pub struct Outbox {
    waiting: VecDeque<Frame>,
    /// Frames of the operation in flight. Never grows beyond the capacity: the headers stay in place.
    flying: VecDeque<Frame>,
    /// Bytes of the first frame (of `flying`, or with TLS of `waiting`) that are done.
    done: usize,
    bytes: usize,
    scatter: Box<Scatter>,
    sending: bool,
    workers: Workers,
    /// True if the end of the operation in flight drops the frames left untouched.
    discard_flying: bool,
    packings: Packings,
}

/// The frames to compress and their buffers.
#[derive(Default)]
struct Packings {
    /// Frames waiting for compression.
    frames: usize,
    /// Buffers of sent frames.
    spare: Vec<Vec<u8>>,
}

impl Packings {
    /// Lets the frame leave uncompressed.
    fn stop(&mut self, frame: &mut Frame) {
        if let Some(packing) = frame.packing.take() {
            self.frames -= 1;
            self.keep(packing.blocks);
        }
    }

    /// Keeps a buffer for the next compressed frame.
    fn keep(&mut self, mut blocks: Vec<u8>) {
        if blocks.capacity() > 0 && self.spare.len() < SPARE {
            blocks.clear();
            self.spare.push(blocks);
        }
    }

    /// Releases the payload of a frame that is no longer needed.
    fn let_go(&mut self, frame: Option<Frame>, release: &mut dyn FnMut(Payload)) {
        let Some(mut frame) = frame else { return };
        self.stop(&mut frame);
        match frame.payload {
            Some(Payload {
                keep: Keep::Packed(blocks),
                ..
            }) => self.keep(blocks),
            Some(payload) => release(payload),
            None => {}
        }
    }
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
            workers: Workers::default(),
            discard_flying: false,
            packings: Packings::default(),
        })
    }

    /// Returns the number of unsent bytes.
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the number of unsent frames.
    pub fn frames(&self) -> usize {
        self.waiting.len() + self.flying.len()
    }

    /// Returns true if no frame is queued.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.flying.is_empty()
    }

    /// Returns true if the queue is longer than any honest peer can cause.
    pub fn overflows(&self) -> bool {
        self.frames() > LONGEST
    }

    pub(super) const fn is_sending(&self) -> bool {
        self.sending
    }

    pub(super) fn push(&mut self, frame: Frame) {
        self.bytes += frame.length();
        self.packings.frames += usize::from(frame.packing.is_some());
        self.waiting.push_back(frame);
    }

    /// Returns true if a queued frame can be sent.
    pub(super) fn has_ready(&self) -> bool {
        let first = self.waiting.front();
        !self.flying.is_empty() || first.is_some_and(|frame| frame.packing.is_none())
    }

    /// Sends as much as one operation takes.
    pub(super) fn send(&mut self, ring: &mut Ring, fd: types::Fd, token: Token, by: SentBy) {
        let mut bytes: usize = self.flying.iter().map(Frame::length).sum();
        while self.flying.len() < BATCH
            && bytes < BATCH_BYTES
            && let Some(frame) = self.waiting.pop_front_if(|frame| frame.packing.is_none())
        {
            bytes += frame.length();
            self.flying.push_back(frame);
        }
        let scatter = &mut *self.scatter;
        let (mut count, mut total, mut skip) = (0, 0, self.done);
        for frame in &self.flying {
            let header = frame.header();
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
        let entry = entry.build().flags(self.workers.flags(by, total));
        self.sending = true;
        // SAFETY: headers lie in `flying`, which is not changed while `sending`; payloads are kept as `Payload::new`
        // was promised; the list is boxed. All outlive the operation, because a stream is not dropped before it is
        // idle.
        unsafe { ring.push(entry, token) };
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
            && frame.packing.is_none()
        {
            let part = frame.rest(self.done);
            let part = &part[..part.len().min(budget)];
            let taken = session.write(part)?;
            budget -= taken;
            self.bytes -= taken;
            self.done += taken;
            if self.done == frame.length() {
                self.done = 0;
                let sent = self.waiting.pop_front();
                self.packings.let_go(sent, release);
            } else if taken < part.len() {
                break;
            }
        }
        Ok(())
    }

    pub(super) fn send_encrypted(
        &mut self,
        ring: &mut Ring,
        fd: types::Fd,
        token: Token,
        (pointer, length): (*const u8, usize),
        by: SentBy,
    ) {
        if length == 0 {
            return;
        }
        let entry = opcode::Send::new(fd, pointer, length as u32).flags(libc::MSG_NOSIGNAL);
        let entry = entry.build().flags(self.workers.flags(by, length));
        self.sending = true;
        // SAFETY: the ciphertext lies in the session's buffer, which is not changed while `sending` and outlives the
        // operation, because a stream is not dropped before it is idle.
        unsafe { ring.push(entry, token) };
    }

    /// Returns true if a frame waits to be compressed.
    pub(super) const fn has_to_pack(&self) -> bool {
        self.packings.frames > 0
    }

    /// Compresses the next block of the first frame that waits for compression; `None` if no frame waits.
    pub(super) fn pack(
        &mut self,
        packer: &mut Packer,
        release: &mut dyn FnMut(Payload),
    ) -> Option<Packed> {
        if !self.has_to_pack() {
            return None;
        }
        let waits = |frame: &&mut Frame| frame.packing.is_some();
        let frame = self.waiting.iter_mut().find(waits)?;
        let (payload, packing) = frame.payload.as_ref().zip(frame.packing.as_mut())?;
        if packing.blocks.capacity() == 0 {
            packing.blocks = self.packings.spare.pop().unwrap_or_default();
        }
        let what = packing.what;
        let (data, step) = packing.step(payload.bytes(), packer);
        let end = match step {
            Step::More => None,
            Step::Useless => {
                self.packings.stop(frame);
                Some(PackingEnd::Useless)
            }
            Step::Complete => {
                let blocks = std::mem::take(&mut packing.blocks);
                let (from, to) = (payload.length, blocks.len());
                self.packings.stop(frame);
                if packing::announce(frame.header_mut(), to) {
                    // SAFETY: the bytes belong to the vector in `keep`, which is not touched before the payload is
                    // released.
                    let packed = unsafe { Payload::new(blocks.as_ptr(), to, Keep::Packed(blocks)) };
                    frame.payload.replace(packed).into_iter().for_each(release);
                    self.bytes -= from - to;
                    Some(PackingEnd::Shorter { from, to })
                } else {
                    self.packings.keep(blocks);
                    Some(PackingEnd::Useless)
                }
            }
        };
        Some(Packed { what, data, end })
    }

    /// Lets frames waiting for compression leave uncompressed.
    pub(super) fn stop_packing(&mut self) {
        for frame in &mut self.waiting {
            self.packings.stop(frame);
        }
    }

    /// Ends the operation. Returns the number of bytes sent.
    pub(super) fn finish(&mut self, result: i32) -> Result<usize, StreamError> {
        self.sending = false;
        match result {
            count if count > 0 => Ok(count as usize),
            error if matches!(-error, libc::EINTR | libc::EAGAIN) => Ok(0),
            error if self.workers.is_missing(error) => Ok(0),
            error => Err(StreamError::from_result(error)),
        }
    }

    /// Counts `count` bytes of the frames in flight as sent.
    pub(super) fn advance(&mut self, count: usize, release: &mut dyn FnMut(Payload)) {
        self.bytes -= count;
        self.done += count;
        while let Some(frame) = self.flying.front()
            && self.done >= frame.length()
        {
            self.done -= frame.length();
            let sent = self.flying.pop_front();
            self.packings.let_go(sent, release);
        }
        if std::mem::take(&mut self.discard_flying) {
            self.discard_flying(release);
        }
    }

    /// Drops the frames of which no byte has left. The operation in flight may still send some of its frames; the rest
    /// of its frames is dropped when the operation ends.
    pub(super) fn discard(&mut self, release: &mut dyn FnMut(Payload)) {
        // Only with TLS can the first waiting frame be half encrypted.
        let begun = usize::from(self.flying.is_empty() && self.done > 0);
        while self.waiting.len() > begun
            && let Some(frame) = self.waiting.pop_back()
        {
            self.bytes -= frame.length();
            self.packings.let_go(Some(frame), release);
        }
        if self.sending {
            self.discard_flying = !self.flying.is_empty();
        } else {
            self.discard_flying(release);
        }
    }

    /// Drops the frames in `flying` of which no byte has left. Must not be called while an operation is in flight.
    fn discard_flying(&mut self, release: &mut dyn FnMut(Payload)) {
        while self.flying.len() > usize::from(self.done > 0)
            && let Some(frame) = self.flying.pop_back()
        {
            self.bytes -= frame.length();
            self.packings.let_go(Some(frame), release);
        }
    }

    /// Drops everything not in use by the kernel.
    pub(super) fn clear(&mut self, release: &mut dyn FnMut(Payload)) {
        let flying = if self.sending {
            None
        } else {
            Some(self.flying.drain(..))
        };
        for frame in self.waiting.drain(..).chain(flying.into_iter().flatten()) {
            self.bytes = self.bytes.saturating_sub(frame.length());
            self.packings.let_go(Some(frame), release);
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

    use godwit_core::action::ChunkSlot;
    use godwit_core::request::RequestTag;
    use godwit_core::units::{Extent, Generation, Lba};
    use godwit_core::wire::{HEADER_SIZE, Header, Message};

    use super::*;

    const LENGTH: usize = 64 << 10;
    static DATA: [u8; LENGTH] = [7; LENGTH];

    fn frame(index: u8) -> Frame {
        let keep = Keep::Slot(RequestTag(u32::from(index)));
        // SAFETY: the data is static and never changes.
        let payload = unsafe { Payload::new(DATA.as_ptr(), LENGTH, keep) };
        Frame::new(&[&[index]], Some(payload))
    }

    /// Records the tags of released payloads.
    fn note(released: &mut Vec<u32>) -> impl FnMut(Payload) + '_ {
        |payload| match payload.keep {
            Keep::Slot(tag) => released.push(tag.0),
            keep => panic!("nothing like it was queued: {keep:?}"),
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
        drop_and_follow(SentBy::Caller);
    }

    #[test]
    fn what_a_worker_does_not_send_is_dropped_and_what_follows_is_sent() {
        drop_and_follow(SentBy::Worker);
    }

    fn drop_and_follow(by: SentBy) {
        let (ours, mut theirs) = UnixStream::pair().expect("sockets");
        rustix::net::sockopt::set_socket_send_buffer_size(&ours, LENGTH).expect("set");
        let fd = types::Fd(ours.as_raw_fd());
        let mut ring = Ring::new().expect("a ring");
        let mut outbox = Outbox::new(false).expect("an outbox");
        let mut released = Vec::new();
        (0..40).for_each(|index| outbox.push(frame(index)));
        outbox.send(&mut ring, fd, Token::Send(0), by);
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
        while !outbox.is_empty() {
            if !outbox.is_sending() {
                outbox.send(&mut ring, fd, Token::Send(0), by);
            }
            let result = ring.next_completion().expect("a wait").result;
            let sent = outbox.finish(result).expect("sent");
            outbox.advance(sent, &mut note(&mut released));
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

    /// Returns a frame of a chunk with compressible data, marked for compression if `packs` is true.
    fn chunk(packs: bool) -> Frame {
        let message = Message::Copy {
            slot: ChunkSlot(9),
            generation: Generation(0),
            extent: Extent::new(Lba(0), (LENGTH / 512) as u32).expect("an extent"),
            zeroes: false,
        };
        let keep = Keep::Slot(RequestTag(9));
        // SAFETY: the data is static and never changes.
        let payload = unsafe { Payload::new(DATA.as_ptr(), LENGTH, keep) };
        let frame = Frame::new(&[&message.encode().0.encode()], Some(payload));
        if packs {
            frame.packed_first(What::Everything)
        } else {
            frame
        }
    }

    #[test]
    fn a_frame_waits_until_it_is_compressed_and_what_follows_waits_for_it() {
        let mut outbox = Outbox::new(false).expect("an outbox");
        let mut packer = Packer::new().expect("a packer");
        let mut released = Vec::new();
        outbox.push(chunk(true));
        outbox.push(frame(1));
        assert!(!outbox.has_ready());
        let packed = outbox
            .pack(&mut packer, &mut note(&mut released))
            .expect("something to compress");
        let Some(PackingEnd::Shorter { from, to }) = packed.end else {
            panic!("{packed:?}");
        };
        assert_eq!((packed.data, from), (LENGTH, LENGTH));
        assert!(to < 1000, "{to} bytes");
        assert_eq!(released, [9], "its data is needed no more");
        assert_eq!(outbox.bytes(), HEADER_SIZE + to + LENGTH + 1);
        assert!(outbox.has_ready());
        assert!(!outbox.has_to_pack());
        let compressed =
            Header::decode(outbox.waiting[0].header().first_chunk().expect("a header"));
        assert_eq!(
            compressed.map(|header| header.payload_length),
            Ok(to as u32)
        );

        outbox.push(chunk(true));
        outbox.discard(&mut note(&mut released));
        assert_eq!(outbox.bytes(), 0);
        assert!(!outbox.has_to_pack());
        assert_eq!(released, [9, 9, 1]);
        assert_eq!(outbox.packings.spare.len(), 1, "its memory serves the next");
    }

    #[test]
    fn a_frame_without_data_waits_for_nothing() {
        let mut outbox = Outbox::new(false).expect("an outbox");
        outbox.push(Frame::new(&[&[7; HEADER_SIZE]], None).packed_first(What::Everything));
        assert!(outbox.has_ready() && !outbox.has_to_pack());
    }

    #[test]
    fn frames_that_are_not_compressed_after_all_leave_as_they_are() {
        let mut outbox = Outbox::new(false).expect("an outbox");
        outbox.push(chunk(true));
        outbox.stop_packing();
        assert!(outbox.has_ready() && !outbox.has_to_pack());
        let as_it_is = chunk(false);
        assert_eq!(outbox.waiting[0].rest(0), as_it_is.rest(0));
        assert_eq!(outbox.bytes(), as_it_is.length());
    }
}
