//! A TLS session without I/O of its own: ciphertext in, plaintext out, and the reverse.

use std::io::{self, Read as _, Write as _};

use super::StreamError;
use crate::memory::Staging;

const INCOMING: usize = 64 << 10;
const OUTGOING: usize = 192 << 10;

/// Plaintext encrypted for one send operation at most, so that bulk data leaves time for others.
pub(super) const TURN: usize = 128 << 10;

/// The TLS part of a stream.
pub(super) struct Session {
    connection: rustls::Connection,
    incoming: Staging,
    outgoing: Staging,
    closed: bool,
}

impl Session {
    pub(super) fn new(mut connection: rustls::Connection) -> io::Result<Self> {
        // The outbox bounds what it hands over.
        connection.set_buffer_limit(None);
        let (incoming, outgoing) = (Staging::new(INCOMING)?, Staging::new(OUTGOING)?);
        Ok(Self {
            connection,
            incoming,
            outgoing,
            closed: false,
        })
    }

    /// Where the kernel puts ciphertext.
    pub(super) fn room(&mut self) -> (*mut u8, usize) {
        self.incoming.compact();
        self.incoming.room()
    }

    /// The kernel put `count` bytes there.
    pub(super) fn received(&mut self, count: usize) {
        self.incoming.filled(count);
    }

    /// Fills `into` with plaintext. Zero: more ciphertext is needed.
    pub(super) fn read(&mut self, into: &mut [u8]) -> Result<usize, StreamError> {
        loop {
            match self.connection.reader().read(into) {
                Ok(0) if into.is_empty() => return Ok(0),
                Ok(0) => self.closed = true,
                Ok(count) => return Ok(count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(StreamError::Socket(error)),
            }
            if self.closed {
                return Err(StreamError::Closed);
            }
            let mut ciphertext = self.incoming.data();
            let before = ciphertext.len();
            if before == 0 {
                return Ok(0);
            }
            self.connection
                .read_tls(&mut ciphertext)
                .map_err(StreamError::Socket)?;
            let consumed = before - ciphertext.len();
            self.incoming.consume(consumed);
            self.connection
                .process_new_packets()
                .map_err(StreamError::Tls)?;
            if consumed == 0 {
                return Err(StreamError::Closed);
            }
        }
    }

    /// Encrypts `plaintext`.
    pub(super) fn write(&mut self, plaintext: &[u8]) -> Result<(), StreamError> {
        self.connection
            .writer()
            .write_all(plaintext)
            .map_err(StreamError::Socket)
    }

    /// Ends the session after what was encrypted so far.
    pub(super) fn close(&mut self) {
        self.connection.send_close_notify();
    }

    /// Whether ciphertext waits.
    pub(super) fn wants_send(&self) -> bool {
        self.connection.wants_write() || !self.outgoing.data().is_empty()
    }

    /// Bytes of ciphertext that the kernel has not taken yet.
    pub(super) fn unsent(&self) -> usize {
        self.outgoing.pending().1
    }

    /// Address and length of ciphertext to send. Not to be called while the kernel sends.
    pub(super) fn pending(&mut self) -> Result<(*const u8, usize), StreamError> {
        self.outgoing.compact();
        while self.connection.wants_write() && self.outgoing.room().1 > 0 {
            self.connection
                .write_tls(&mut self.outgoing)
                .map_err(StreamError::Socket)?;
        }
        Ok(self.outgoing.pending())
    }

    /// The kernel sent `count` bytes of it.
    pub(super) fn sent(&mut self, count: usize) {
        self.outgoing.consume(count);
    }
}
