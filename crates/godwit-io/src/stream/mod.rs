//! Byte streams over sockets, plain or TLS. Their reads and writes run in the ring.
//!
//! A plain stream moves payload between the socket and its final buffer without a copy here. A TLS stream decrypts
//! straight into the final buffer and encrypts straight out of it.

mod frame;
mod outbox;
mod packing;
mod sent_by;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use io_uring::{opcode, types};

pub use self::frame::{Frame, Keep, Payload};
pub use self::outbox::{Outbox, Packed, PackingEnd};
pub use self::packing::{Packer, Unpacker, What};
pub use self::sent_by::SentBy;
use crate::page_buffers::Staging;
use crate::ring::{Ring, Token};
use crate::tls::{self, Session, TlsError};

/// Most bytes to read ahead: headers, and data too short for an operation of its own.
const STAGING: usize = 64 << 10;

/// Bytes of a long payload to gather before the socket wakes the reader. Each wake-up costs both sides: the sender's
/// processor has to interrupt the receiver's. Equal to the bytes received at a time.
const GATHERED: usize = tls::INCOMING;

/// Time without progress or an answer to probes after which the other side counts as gone.
const GONE: Duration = Duration::from_secs(60);

/// Silent seconds before the first probe of the other side.
const IDLE: u32 = 30;

/// Seconds between two probes.
const BETWEEN_PROBES: u32 = 10;

/// A payload is long while at least this many bytes are missing.
const LONG: usize = 64 << 10;

/// The reason for the end of a stream.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// The other side closed the connection.
    #[error("the connection was closed by the other side")]
    Closed,
    /// The socket failed.
    #[error("the connection failed: {0}")]
    Socket(io::Error),
    /// The TLS session failed.
    #[error("the connection's TLS session failed: {0}")]
    Tls(TlsError),
    /// The other side takes no data, and the queue for it grows too long.
    #[error("the other side leaves too many answers unread")]
    Backlog,
}

impl From<TlsError> for StreamError {
    fn from(error: TlsError) -> Self {
        match error {
            TlsError::Closed => Self::Closed,
            error => Self::Tls(error),
        }
    }
}

impl StreamError {
    fn from_result(result: i32) -> Self {
        match result {
            0 => Self::Closed,
            negative => Self::Socket(io::Error::from_raw_os_error(-negative)),
        }
    }
}

/// The description of one receive operation. Stays in place while the kernel reads it.
struct Gather {
    header: libc::msghdr,
    parts: [libc::iovec; 2],
}

/// The bytes of one connection in both directions. While [`Stream::is_idle`] is false, the kernel uses the stream's
/// memory, and the stream must not be dropped.
pub struct Stream {
    socket: OwnedFd,
    session: Option<Box<Session>>,
    /// Plaintext read ahead: headers and short data.
    staging: Staging,
    gather: Box<Gather>,
    receiving: bool,
    /// Bytes of the receive operation in flight for a payload's buffer.
    payload_wanted: usize,
    /// Bytes to gather before the socket becomes readable; `None` if the socket cannot gather.
    low_water: Option<usize>,
    outbox: Outbox,
}

impl Stream {
    /// Returns a stream over a connected socket; `received` is plaintext already read from the socket.
    pub fn new(socket: OwnedFd, tls: Option<Session>, received: &[u8]) -> io::Result<Self> {
        // With O_NONBLOCK the ring would report EAGAIN instead of waiting.
        let flags = rustix::fs::fcntl_getfl(&socket)?;
        rustix::fs::fcntl_setfl(&socket, flags - rustix::fs::OFlags::NONBLOCK)?;
        // Unix sockets have no such option, and wake for every byte.
        let is_tcp = rustix::net::sockopt::set_tcp_nodelay(&socket, true).is_ok();
        if is_tcp {
            notice_when_gone(&socket);
        }
        let mut staging = Staging::new(STAGING.max(received.len() + STAGING))?;
        staging.room_mut()[..received.len()].copy_from_slice(received);
        staging.filled(received.len());
        // SAFETY: all-zero bytes are a valid value of both C structures.
        let gather = Box::new(unsafe { std::mem::zeroed::<Gather>() });
        let session = tls.map(Box::new);
        let outbox = Outbox::new(session.is_some())?;
        Ok(Self {
            socket,
            session,
            staging,
            gather,
            receiving: false,
            payload_wanted: 0,
            low_water: is_tcp.then_some(1),
            outbox,
        })
    }

    /// Returns true if the kernel uses none of the stream's memory.
    pub const fn is_idle(&self) -> bool {
        !self.receiving && !self.outbox.is_sending()
    }

    /// Returns true if a receive operation is in flight.
    pub const fn is_receiving(&self) -> bool {
        self.receiving
    }

    /// Returns true if a send operation is in flight.
    pub const fn is_sending(&self) -> bool {
        self.outbox.is_sending()
    }

    /// Returns the bytes of plaintext ready to be taken, without the plaintext inside a TLS session.
    pub fn staged(&self) -> usize {
        self.staging.data().len()
    }

    /// Returns the queue of unsent frames.
    pub const fn outbox(&self) -> &Outbox {
        &self.outbox
    }

    /// Queues a frame.
    pub fn queue(&mut self, frame: Frame) {
        self.outbox.push(frame);
    }

    /// Fills `into` from the plaintext. Takes nothing and returns false if too little has arrived. At most a page.
    pub fn take_exactly(&mut self, into: &mut [u8]) -> Result<bool, StreamError> {
        if self.receiving {
            return Ok(false);
        }
        let wanted = into.len();
        if self.staging.data().len() < wanted
            && let Some(session) = &mut self.session
        {
            self.staging.compact();
            while self.staging.data().len() < wanted {
                let missing = wanted - self.staging.data().len();
                match session.read(&mut self.staging.room_mut()[..missing])? {
                    0 => break,
                    count => self.staging.filled(count),
                }
            }
        }
        let Some(data) = self.staging.data().get(..wanted) else {
            return Ok(false);
        };
        into.copy_from_slice(data);
        self.staging.consume(wanted);
        Ok(true)
    }

    /// Fills `into` as far as plaintext has arrived and returns the number of bytes.
    pub fn take_payload(&mut self, into: &mut [u8]) -> Result<usize, StreamError> {
        if self.receiving {
            return Ok(0);
        }
        let staged = self.staging.data().len().min(into.len());
        into[..staged].copy_from_slice(&self.staging.data()[..staged]);
        self.staging.consume(staged);
        let mut taken = staged;
        if let Some(session) = &mut self.session {
            while taken < into.len() {
                match session.read(&mut into[taken..])? {
                    0 => break,
                    count => taken += count,
                }
            }
        }
        Ok(taken)
    }

    /// Drops up to `count` bytes of plaintext that have arrived and returns the number.
    pub fn discard(&mut self, count: usize) -> Result<usize, StreamError> {
        let mut scratch = [0; 4096];
        let mut dropped = 0;
        while dropped < count {
            let length = scratch.len().min(count - dropped);
            match self.take_payload(&mut scratch[..length])? {
                0 => break,
                taken => dropped += taken,
            }
        }
        Ok(dropped)
    }

    /// Starts a receive operation unless one is in flight. The next bytes go to `payload` (address and length). The
    /// bytes after the payload are read ahead, at most `ahead` and as many as fit. The operation ends with the bytes
    /// that have arrived. For a long payload with more bytes on the way, the operation waits for a large part.
    ///
    /// # Safety
    /// The payload's memory stays valid and unused until [`Stream::received`].
    pub unsafe fn receive(
        &mut self,
        ring: &mut Ring,
        token: Token,
        payload: Option<(*mut u8, usize)>,
        ahead: usize,
    ) {
        if self.receiving {
            return;
        }
        let fd = types::Fd(self.socket.as_raw_fd());
        let missing = payload.map_or(0, |(_, length)| length);
        let gathers = self.gather(missing);
        let ioprio = if gathers {
            ring.wait_before_receiving()
        } else {
            0
        };
        self.receiving = true;
        if let Some(session) = &mut self.session {
            let (pointer, length) = session.room();
            let entry = opcode::Recv::new(fd, pointer, length as u32)
                .ioprio(ioprio)
                .build();
            // SAFETY: the session's buffer lives as long as the stream, which outlives the
            // operation, and is not used while `receiving`.
            unsafe { ring.push(entry, token) };
            return;
        }
        self.staging.compact();
        let (room, space) = self.staging.room();
        let gather = &mut *self.gather;
        let mut count = 0;
        self.payload_wanted = 0;
        if let Some((pointer, length)) = payload {
            gather.parts[0] = libc::iovec {
                iov_base: pointer.cast(),
                iov_len: length,
            };
            self.payload_wanted = length;
            count = 1;
        }
        gather.parts[count] = libc::iovec {
            iov_base: room.cast(),
            iov_len: space.min(ahead),
        };
        gather.header.msg_iov = gather.parts.as_mut_ptr();
        gather.header.msg_iovlen = count + 1;
        let entry = opcode::RecvMsg::new(fd, &raw mut gather.header)
            .ioprio(ioprio)
            .build();
        // SAFETY: the staging and the gather list live as long as the stream, which outlives the
        // operation; the staging's free part is not used while `receiving`; the caller answers for
        // the payload.
        unsafe { ring.push(entry, token) };
    }

    /// Lets the socket gather a large part of a long payload with `missing` bytes to come. Returns false if the socket
    /// wakes for every byte.
    fn gather(&mut self, missing: usize) -> bool {
        let Some(low_water) = self.low_water else {
            return false;
        };
        let to_come = self
            .session
            .as_ref()
            .map_or(missing, |session| session.to_come(missing));
        let wanted = match to_come {
            0..LONG => 1,
            long => long.min(GATHERED),
        };
        if wanted != low_water {
            let applied = set_low_water(&self.socket, wanted);
            self.low_water = applied.then_some(wanted);
        }
        wanted > 1 && self.low_water.is_some()
    }

    /// Ends the receive operation. Returns the bytes that went to the payload's buffer.
    pub fn received(&mut self, result: i32) -> Result<usize, StreamError> {
        self.receiving = false;
        if result <= 0 {
            if matches!(-result, libc::EINTR | libc::EAGAIN) {
                return Ok(0);
            }
            return Err(StreamError::from_result(result));
        }
        let count = result as usize;
        if let Some(session) = &mut self.session {
            session.received(count);
            return Ok(0);
        }
        let payload = count.min(self.payload_wanted);
        self.staging.filled(count - payload);
        Ok(payload)
    }

    /// Returns true if data is ready to send and no send operation is in flight.
    pub fn wants_send(&self) -> bool {
        let session = self
            .session
            .as_ref()
            .is_some_and(|session| session.wants_send());
        !self.outbox.is_sending() && (session || self.outbox.has_ready())
    }

    /// Starts a send operation if data is ready. `release` gets the payloads that are no longer needed.
    pub fn send(
        &mut self,
        ring: &mut Ring,
        token: Token,
        by: SentBy,
        release: &mut dyn FnMut(Payload),
    ) -> Result<(), StreamError> {
        let fd = types::Fd(self.socket.as_raw_fd());
        if !self.wants_send() {
            return Ok(());
        }
        match &mut self.session {
            None => self.outbox.send(ring, fd, token, by),
            Some(session) => {
                self.outbox.encrypt(session, release)?;
                let pending = session.pending()?;
                self.outbox.send_encrypted(ring, fd, token, pending, by);
            }
        }
        Ok(())
    }

    /// Ends the send operation.
    pub fn sent(
        &mut self,
        result: i32,
        release: &mut dyn FnMut(Payload),
    ) -> Result<(), StreamError> {
        let count = self.outbox.finish(result)?;
        match &mut self.session {
            None => self.outbox.advance(count, release),
            Some(session) => session.sent(count),
        }
        Ok(())
    }

    /// Returns true if a frame waits to be compressed.
    pub const fn has_to_pack(&self) -> bool {
        self.outbox.has_to_pack()
    }

    /// Compresses the next block of the waiting frames; `None` if no frame waits.
    pub fn pack(
        &mut self,
        packer: &mut Packer,
        release: &mut dyn FnMut(Payload),
    ) -> Option<Packed> {
        self.outbox.pack(packer, release)
    }

    /// Lets frames waiting for compression leave uncompressed.
    pub fn stop_packing(&mut self) {
        self.outbox.stop_packing();
    }

    /// Drops the frames of which no byte has been encrypted or handed to the kernel.
    pub fn discard_unsent(&mut self, release: &mut dyn FnMut(Payload)) {
        self.outbox.discard(release);
    }

    /// Returns the bytes not yet taken by the kernel.
    pub fn unsent(&self) -> usize {
        let ciphertext = self.session.as_ref().map_or(0, |session| session.unsent());
        self.outbox.bytes() + ciphertext
    }

    /// Returns the socket, to inspect its state.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Limits the bytes that the kernel takes ahead of transmission. The rest stays here, can still be discarded, and
    /// delays nothing on the way.
    pub fn limit_unsent(&self, bytes: u32) {
        // On failure (not a TCP socket, an old kernel) there is no limit.
        let _ = set_option(
            &self.socket,
            libc::IPPROTO_TCP,
            libc::TCP_NOTSENT_LOWAT,
            bytes,
        );
    }

    /// Drops the unsent data, except the bytes in flight.
    pub fn clear(&mut self, release: &mut dyn FnMut(Payload)) {
        self.outbox.clear(release);
    }

    /// Queues the end of the TLS session, behind everything that was encrypted before.
    pub fn close_session(&mut self) {
        if let Some(session) = &mut self.session {
            session.close();
        }
    }

    /// Announces the end of the data, once the queue has left.
    pub fn shut_down_sending(&self) {
        // Fails if the connection is gone, which is as good.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Write);
    }

    /// Makes the operations in flight end soon.
    pub fn abort(&self, ring: &mut Ring, receive: Token, send: Token) {
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        if self.receiving {
            ring.cancel(receive);
        }
        if self.outbox.is_sending() {
            ring.cancel(send);
        }
    }
}

/// Ends the connection if the other side answers nothing, or takes no data, for [`GONE`]. A host without power says
/// nothing, and would keep its place for ever.
fn notice_when_gone(socket: &OwnedFd) {
    let milliseconds = GONE.as_millis() as u32;
    // Without an option, the longer times of the system apply.
    let _ = set_option(socket, libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1);
    for (option, value) in [
        (libc::TCP_KEEPIDLE, IDLE),
        (libc::TCP_KEEPINTVL, BETWEEN_PROBES),
        (libc::TCP_USER_TIMEOUT, milliseconds),
    ] {
        let _ = set_option(socket, libc::IPPROTO_TCP, option, value);
    }
}

/// Makes the socket readable once `bytes` bytes have arrived, or no more can arrive.
fn set_low_water(socket: &OwnedFd, bytes: usize) -> bool {
    set_option(socket, libc::SOL_SOCKET, libc::SO_RCVLOWAT, bytes as u32)
}

/// Sets an option with a 32-bit value. Returns false if the kernel refuses the option.
fn set_option(socket: &OwnedFd, level: i32, option: i32, value: u32) -> bool {
    let pointer = (&raw const value).cast();
    let length = size_of::<u32>() as libc::socklen_t;
    // SAFETY: the socket is open, and `pointer` and `length` describe the 32-bit value of the option.
    unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, pointer, length) == 0 }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use rustix::net::sockopt;

    use super::*;

    #[test]
    fn a_connection_whose_other_side_is_gone_ends() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let socket = TcpStream::connect(address).expect("a connection");
        let stream = Stream::new(socket.into(), None, &[]).expect("a stream");
        assert!(sockopt::socket_keepalive(stream.socket()).expect("an option"));
        let idle = sockopt::tcp_keepidle(stream.socket()).expect("an option");
        let between = sockopt::tcp_keepintvl(stream.socket()).expect("an option");
        assert!(idle + between < GONE);
        let gone = sockopt::tcp_user_timeout(stream.socket()).expect("an option");
        assert_eq!(gone, GONE.as_millis() as u32);
    }
}
