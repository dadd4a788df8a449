//! A session after its handshake, with the buffers for its ciphertext.

use std::io::{self, BufRead as _, Read as _, Write as _};

use rustls::Connection;

use super::TlsError;
use super::records::Records;
use crate::page_buffers::Staging;

/// Bytes of ciphertext received at a time.
pub const INCOMING: usize = 512 << 10;

/// Bytes of ciphertext that wait to be sent at most: a turn's, and what the kernel left of the last.
const OUTGOING: usize = 640 << 10;

/// Bytes of ciphertext that are moved to make room for more.
const MOST_MOVED: usize = 32 << 10;

/// The TLS part of a connection.
pub struct Session {
    codec: Codec,
    incoming: Staging,
    outgoing: Staging,
}

/// What encrypts and decrypts.
enum Codec {
    /// rustls, with buffers of its own.
    Library(Box<Connection>),
    /// Keys that rustls has handed out.
    Records(Box<Records>),
}

/// The buffers of a new session, for ciphertext that came and ciphertext to send.
pub(super) fn buffers() -> Result<(Staging, Staging), TlsError> {
    let buffer = |length| Staging::new(length).map_err(TlsError::Memory);
    Ok((buffer(INCOMING)?, buffer(OUTGOING)?))
}

impl Session {
    /// Continues a session of rustls, whose handshake is complete.
    ///
    /// # Errors
    /// No memory is left.
    pub fn library(mut connection: Connection) -> Result<Self, TlsError> {
        // Whoever writes bounds what it hands over.
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

    /// Where the kernel puts ciphertext, while nothing else uses the session.
    pub fn room(&mut self) -> (*mut u8, usize) {
        self.incoming.compact();
        self.incoming.room()
    }

    /// Where ciphertext that comes belongs. [`Session::received`] says how much it was.
    pub fn room_mut(&mut self) -> &mut [u8] {
        self.incoming.compact();
        self.incoming.room_mut()
    }

    /// Bytes that have to come at least before so much more plaintext can be read. Zero where rustls
    /// does not tell how much of it has come.
    pub fn to_come(&self, plaintext: usize) -> usize {
        match &self.codec {
            Codec::Records(_) => plaintext.saturating_sub(self.incoming.data().len()),
            Codec::Library(_) => 0,
        }
    }

    /// That many bytes of ciphertext have come.
    pub fn received(&mut self, count: usize) {
        self.incoming.filled(count);
    }

    /// Fills `into` with plaintext. Zero: more ciphertext is needed.
    ///
    /// # Errors
    /// The session has ended, or what came is not valid.
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

    /// Whether plaintext is there to read; false: more ciphertext is needed.
    ///
    /// # Errors
    /// The session has ended, or what came is not valid.
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

    /// Encrypts `plaintext`, as far as there is room, and returns how many of its bytes. Not to be
    /// called while the kernel sends.
    ///
    /// # Errors
    /// The session cannot encrypt any more.
    pub fn write(&mut self, plaintext: &[u8]) -> Result<usize, TlsError> {
        match &mut self.codec {
            Codec::Records(records) => {
                // To move more costs more than to let it leave first.
                if self.outgoing.pending().1 <= MOST_MOVED {
                    self.outgoing.compact();
                }
                Ok(records.seal(&mut self.outgoing, plaintext)?)
            }
            Codec::Library(connection) => connection.writer().write(plaintext).map_err(failed),
        }
    }

    /// Ends the session after what was encrypted so far.
    pub fn close(&mut self) {
        match &mut self.codec {
            Codec::Records(records) => records.close(),
            Codec::Library(connection) => connection.send_close_notify(),
        }
    }

    /// Whether ciphertext waits.
    pub fn wants_send(&self) -> bool {
        let more = match &self.codec {
            Codec::Records(records) => records.wants_close(),
            Codec::Library(connection) => connection.wants_write(),
        };
        more || self.unsent() > 0
    }

    /// Whether nothing waits: all that came was read, and all that was written has been sent. False
    /// where rustls does not tell.
    pub fn is_drained(&self) -> bool {
        let read = match &self.codec {
            Codec::Records(records) => !records.has_plaintext(),
            Codec::Library(_) => false,
        };
        read && self.incoming.data().is_empty() && !self.wants_send()
    }

    /// Bytes of ciphertext that the kernel has not taken yet.
    pub fn unsent(&self) -> usize {
        self.outgoing.pending().1
    }

    /// Address and length of ciphertext for the kernel to send. Not to be called while it does.
    pub fn pending(&mut self) -> Result<(*const u8, usize), TlsError> {
        self.collect()?;
        Ok(self.outgoing.pending())
    }

    /// Ciphertext to send. [`Session::sent`] says how much of it was.
    ///
    /// # Errors
    /// The session cannot encrypt any more.
    pub fn to_send(&mut self) -> Result<&[u8], TlsError> {
        self.collect()?;
        Ok(self.outgoing.data())
    }

    /// That many bytes of ciphertext have been sent.
    pub fn sent(&mut self, count: usize) {
        self.outgoing.consume(count);
    }

    /// Puts what is left to say behind the ciphertext that waits.
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

    /// Lets one key encrypt so many records only.
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

    /// Changes the key before it is used up.
    pub(super) fn change_key(&mut self) {
        let (records, outgoing) = self.own();
        records.seal_key_update(outgoing).expect("to encrypt");
    }
}

impl std::fmt::Debug for Session {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Keys and data are nobody's business.
        formatter.debug_struct("Session").finish_non_exhaustive()
    }
}

/// Decrypts some of what came; false: nothing did.
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

/// Whether rustls only says that it has no plaintext now.
fn expect_more(error: io::Error) -> Result<(), TlsError> {
    if error.kind() == io::ErrorKind::WouldBlock {
        Ok(())
    } else {
        Err(failed(error))
    }
}

/// rustls reports misuse of its buffers this way.
fn failed(error: io::Error) -> TlsError {
    TlsError::Session(rustls::Error::General(error.to_string()))
}
