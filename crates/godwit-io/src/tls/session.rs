//! A session after its handshake, with the buffers for its ciphertext.

use std::io::{self, BufRead as _, Read as _, Write as _};

use rustls::Connection;

use super::TlsError;
use super::records::Records;
use crate::page_buffers::Staging;

/// Bytes of ciphertext received at a time.
pub const INCOMING: usize = 512 << 10;

/// Most bytes of unsent ciphertext: one turn, and the rest of the turn before.
const OUTGOING: usize = 640 << 10;

/// Most bytes of ciphertext to move for more room.
const MOST_MOVED: usize = 32 << 10;

/// The TLS part of a connection.
pub struct Session {
    codec: Codec,
    incoming: Staging,
    outgoing: Staging,
}

/// The implementation of the cipher.
enum Codec {
    /// rustls, with buffers of its own.
    Library(Box<Connection>),
    /// Keys from rustls.
    Records(Box<Records>),
}

/// Returns the buffers of a new session, for received ciphertext and for ciphertext to send.
pub(super) fn buffers() -> Result<(Staging, Staging), TlsError> {
    let buffer = |length| Staging::new(length).map_err(TlsError::Memory);
    Ok((buffer(INCOMING)?, buffer(OUTGOING)?))
}

impl Session {
    /// Continues a session of rustls with a complete handshake.
    ///
    /// # Errors
    /// No memory is left.
    pub fn library(mut connection: Connection) -> Result<Self, TlsError> {
        // Callers bound the data they write.
        connection.set_buffer_limit(None);
        let (incoming, outgoing) = buffers()?;
        Ok(Self {
            codec: Codec::Library(Box::new(connection)),
            incoming,
            outgoing,
        })
    }

    pub(super) fn records(records: Records, incoming: Staging, outgoing: Staging) -> Self {
        Self {
            codec: Codec::Records(Box::new(records)),
            incoming,
            outgoing,
        }
    }

    /// Returns the room where the kernel puts ciphertext, while nothing else uses the session.
    pub fn room(&mut self) -> (*mut u8, usize) {
        self.incoming.compact();
        self.incoming.room()
    }

    /// Returns the room for arriving ciphertext. [`Session::received`] counts the bytes.
    pub fn room_mut(&mut self) -> &mut [u8] {
        self.incoming.compact();
        self.incoming.room_mut()
    }

    /// Returns the least number of bytes to receive before `plaintext` more bytes can be read. Zero with rustls, which
    /// does not tell how much has arrived.
    pub fn to_come(&self, plaintext: usize) -> usize {
        match &self.codec {
            Codec::Records(_) => plaintext.saturating_sub(self.incoming.data().len()),
            Codec::Library(_) => 0,
        }
    }

    /// Counts `count` bytes of ciphertext as received.
    pub fn received(&mut self, count: usize) {
        self.incoming.filled(count);
    }

    /// Fills `into` with plaintext. Returns zero if more ciphertext is needed.
    ///
    /// # Errors
    /// The session has ended, or the received data is not valid.
    pub fn read(&mut self, into: &mut [u8]) -> Result<usize, TlsError> {
        let connection = match &mut self.codec {
            Codec::Records(records) => return records.open(&mut self.incoming, into),
            Codec::Library(connection) => connection,
        };
        loop {
            match connection.reader().read(into) {
                Ok(0) if !into.is_empty() => return Err(TlsError::Closed),
                Ok(count) => return Ok(count),
                Err(error) => expect_more(error)?,
            }
            if !decrypt(connection, &mut self.incoming)? {
                return Ok(0);
            }
        }
    }

    /// Returns true if plaintext is there to read, false if more ciphertext is needed.
    ///
    /// # Errors
    /// The session has ended, or the received data is not valid.
    pub fn is_readable(&mut self) -> Result<bool, TlsError> {
        let connection = match &mut self.codec {
            Codec::Records(records) => return records.look_ahead(&mut self.incoming),
            Codec::Library(connection) => connection,
        };
        loop {
            match connection.reader().fill_buf() {
                Ok([]) => return Err(TlsError::Closed),
                Ok(_) => return Ok(true),
                Err(error) => expect_more(error)?,
            }
            if !decrypt(connection, &mut self.incoming)? {
                return Ok(false);
            }
        }
    }

    /// Encrypts `plaintext`, as far as there is room, and returns the number of bytes taken. Must not be called while
    /// the kernel sends.
    ///
    /// # Errors
    /// The session cannot encrypt any more.
    pub fn write(&mut self, plaintext: &[u8]) -> Result<usize, TlsError> {
        match &mut self.codec {
            Codec::Records(records) => {
                // For more bytes, a move costs more than a wait until they have left.
                if self.outgoing.pending().1 <= MOST_MOVED {
                    self.outgoing.compact();
                }
                Ok(records.seal(&mut self.outgoing, plaintext)?)
            }
            Codec::Library(connection) => connection.writer().write(plaintext).map_err(failed),
        }
    }

    /// Ends the session after everything encrypted so far.
    pub fn close(&mut self) {
        match &mut self.codec {
            Codec::Records(records) => records.close(),
            Codec::Library(connection) => connection.send_close_notify(),
        }
    }

    /// Returns true if ciphertext waits to be sent.
    pub fn wants_send(&self) -> bool {
        let more = match &self.codec {
            Codec::Records(records) => records.wants_close(),
            Codec::Library(connection) => connection.wants_write(),
        };
        more || self.unsent() > 0
    }

    /// Returns true if all received data was read and all written data has been sent. Always false with rustls, which
    /// does not tell.
    pub fn is_drained(&self) -> bool {
        let read = match &self.codec {
            Codec::Records(records) => !records.has_plaintext(),
            Codec::Library(_) => false,
        };
        read && self.incoming.data().is_empty() && !self.wants_send()
    }

    /// Returns the bytes of ciphertext not yet taken by the kernel.
    pub fn unsent(&self) -> usize {
        self.outgoing.pending().1
    }

    /// Returns address and length of ciphertext for the kernel to send. Must not be called while the kernel sends.
    pub fn pending(&mut self) -> Result<(*const u8, usize), TlsError> {
        self.collect()?;
        Ok(self.outgoing.pending())
    }

    /// Returns the ciphertext to send. [`Session::sent`] counts the sent bytes.
    ///
    /// # Errors
    /// The session cannot encrypt any more.
    pub fn to_send(&mut self) -> Result<&[u8], TlsError> {
        self.collect()?;
        Ok(self.outgoing.data())
    }

    /// Counts `count` bytes of ciphertext as sent.
    pub fn sent(&mut self, count: usize) {
        self.outgoing.consume(count);
    }

    /// Puts the last ciphertext of the codec behind the ciphertext in `outgoing`.
    fn collect(&mut self) -> Result<(), TlsError> {
        match &mut self.codec {
            Codec::Records(records) => records.seal_close(&mut self.outgoing)?,
            Codec::Library(connection) => {
                self.outgoing.compact();
                while connection.wants_write() && self.outgoing.room().1 > 0 {
                    connection.write_tls(&mut self.outgoing).map_err(failed)?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
impl Session {
    fn own(&mut self) -> (&mut Records, &mut Staging) {
        match &mut self.codec {
            Codec::Records(records) => (records, &mut self.outgoing),
            Codec::Library(_) => panic!("a session of rustls"),
        }
    }

    /// Limits the records encrypted with one key.
    pub(super) fn limit_key(&mut self, records: u64) {
        self.own().0.limit_key(records);
    }

    /// Encrypts one record of any type.
    pub(super) fn write_record(&mut self, plaintext: &[u8], kind: u8) {
        let (records, outgoing) = self.own();
        records
            .seal_record(outgoing, plaintext, kind)
            .expect("to encrypt");
    }

    /// Changes the key before its limit.
    pub(super) fn change_key(&mut self) {
        let (records, outgoing) = self.own();
        records.seal_key_update(outgoing).expect("to encrypt");
    }
}

impl std::fmt::Debug for Session {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Keys and data stay out of logs.
        formatter.debug_struct("Session").finish_non_exhaustive()
    }
}

/// Decrypts some of the received ciphertext. Returns false if there is none.
fn decrypt(connection: &mut Connection, incoming: &mut Staging) -> Result<bool, TlsError> {
    let mut ciphertext = incoming.data();
    let before = ciphertext.len();
    if before == 0 {
        return Ok(false);
    }
    connection.read_tls(&mut ciphertext).map_err(failed)?;
    let consumed = before - ciphertext.len();
    incoming.consume(consumed);
    connection.process_new_packets()?;
    if consumed == 0 {
        return Err(TlsError::Closed);
    }
    Ok(true)
}

/// Returns an error unless rustls merely has no plaintext yet.
fn expect_more(error: io::Error) -> Result<(), TlsError> {
    if error.kind() == io::ErrorKind::WouldBlock {
        Ok(())
    } else {
        Err(failed(error))
    }
}

/// Converts an error of rustls' buffers, which reports misuse this way.
fn failed(error: io::Error) -> TlsError {
    TlsError::Session(rustls::Error::General(error.to_string()))
}
