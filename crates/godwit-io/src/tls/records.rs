//! The records of a TLS 1.3 session after its handshake (RFC 8446, section 5).

use std::ops::Range;

use rustls::client::ClientConnectionData;
use rustls::kernel::KernelConnection;
use rustls::server::ServerConnectionData;
use rustls::{
    AlertDescription, Error, ExtractedSecrets, InvalidMessage, PeerMisbehaved, ProtocolVersion,
    SupportedCipherSuite,
};

use super::TlsError;
use super::keys::{Keys, TAG};
use crate::page_buffers::Staging;

/// Bytes of a record before its ciphertext: type, version, length.
const HEADER: usize = 5;

/// Plaintext in one record at most.
pub(super) const LONGEST: usize = 1 << 14;

/// Ciphertext in one record at most: padding, type and tag together are limited, too.
const LONGEST_CIPHERTEXT: usize = LONGEST + 256;

/// Bytes of a record beside its plaintext: header, type, tag.
pub(super) const OVERHEAD: usize = HEADER + 1 + TAG;

/// Key changes of the other side without data in between at most: each costs time here.
const MOST_UPDATES: u32 = 32;

/// Types of records.
mod kind {
    pub(super) const ALERT: u8 = 21;
    pub(super) const HANDSHAKE: u8 = 22;
    pub(super) const DATA: u8 = 23;
}

/// Types of handshake messages that may follow a handshake.
mod message {
    pub(super) const NEW_SESSION_TICKET: u8 = 4;
    pub(super) const KEY_UPDATE: u8 = 24;
}

/// A whole message: a new key from here on, without a request for a new key of the other side.
const KEY_UPDATE: [u8; 5] = [message::KEY_UPDATE, 0, 0, 1, 0];

/// The secrets behind the next keys.
pub(super) enum Secrets {
    /// Secrets of the side that connected.
    Client(KernelConnection<ClientConnectionData>),
    /// Secrets of the side that accepted the connection.
    Server(KernelConnection<ServerConnectionData>),
}

/// The codec of records.
pub(super) struct Records {
    secrets: Secrets,
    sealing: Keys,
    opening: Keys,
    /// Most records encrypted with one key.
    most_sealed: u64,
    /// Plaintext of records that did not fit the caller's buffer; `waiting` is the unread range.
    plaintext: Vec<u8>,
    waiting: Range<usize>,
    /// Key changes of the other side since its last data.
    updates: u32,
    /// True if the other side asks this side to change its key.
    update_wanted: bool,
    /// True if the other side has announced the end of its data.
    ended: bool,
    /// State of this side's own announcement of the end.
    close: Close,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Close {
    No,
    Wanted,
    Sent,
}

impl Records {
    /// Continues a session with a complete handshake, during which `early` arrived.
    pub(super) fn new(
        secrets: Secrets,
        keys: ExtractedSecrets,
        early: Vec<u8>,
    ) -> Result<Self, Error> {
        let (version, suite) = match &secrets {
            Secrets::Client(kernel) => {
                (kernel.protocol_version(), kernel.negotiated_cipher_suite())
            }
            Secrets::Server(kernel) => {
                (kernel.protocol_version(), kernel.negotiated_cipher_suite())
            }
        };
        let (ProtocolVersion::TLSv1_3, SupportedCipherSuite::Tls13(suite)) = (version, suite)
        else {
            return Err(Error::General(String::from("the session is not TLS 1.3")));
        };
        let waiting = 0..early.len();
        let mut plaintext = early;
        plaintext.resize(waiting.end.max(LONGEST_CIPHERTEXT), 0);
        Ok(Self {
            secrets,
            sealing: Keys::new(keys.tx)?,
            opening: Keys::new(keys.rx)?,
            most_sealed: suite.common.confidentiality_limit,
            plaintext,
            waiting,
            updates: 0,
            update_wanted: false,
            ended: false,
            close: Close::No,
        })
    }

    /// Returns true if decrypted plaintext waits to be read.
    pub(super) fn has_plaintext(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Fills `into` with plaintext from the records in `incoming`. Returns zero if more ciphertext is needed.
    pub(super) fn open(
        &mut self,
        incoming: &mut Staging,
        into: &mut [u8],
    ) -> Result<usize, TlsError> {
        loop {
            if self.has_plaintext() {
                let count = self.waiting.len().min(into.len());
                let start = self.waiting.start;
                into[..count].copy_from_slice(&self.plaintext[start..start + count]);
                self.waiting.start += count;
                return Ok(count);
            }
            if self.ended {
                return Err(TlsError::Closed);
            }
            match self.open_record(incoming, into)? {
                None => return Ok(0),
                Some(0) => {}
                Some(count) => return Ok(count),
            }
        }
    }

    /// Decrypts the next record before its plaintext is asked for. Returns false if no record is complete.
    pub(super) fn look_ahead(&mut self, incoming: &mut Staging) -> Result<bool, TlsError> {
        while !self.has_plaintext() {
            if self.ended {
                return Err(TlsError::Closed);
            }
            if self.open_record(incoming, &mut [])?.is_none() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Decrypts the next record, into `into` if the whole record fits and otherwise into `plaintext`. Returns the bytes
    /// that went to `into`; `None` if no whole record is there.
    fn open_record(
        &mut self,
        incoming: &mut Staging,
        into: &mut [u8],
    ) -> Result<Option<usize>, Error> {
        let Some((header, rest)) = incoming.data().split_first_chunk::<HEADER>() else {
            return Ok(None);
        };
        let [record, _, _, length @ ..] = *header;
        let length = usize::from(u16::from_be_bytes(length));
        if record != kind::DATA {
            return Err(InvalidMessage::InvalidContentType.into());
        }
        if length > LONGEST_CIPHERTEXT {
            return Err(Error::PeerSentOversizedRecord);
        }
        // The shortest record holds its type and no data.
        let Some(inner) = length.checked_sub(TAG).filter(|&inner| inner > 0) else {
            return Err(Error::DecryptError);
        };
        let Some(body) = rest.get(..length) else {
            return Ok(None);
        };
        let (ciphertext, tag) = body.split_at(inner);
        let direct = inner <= into.len();
        let plaintext = if direct {
            &mut into[..inner]
        } else {
            &mut self.plaintext[..inner]
        };
        self.opening.open(header, ciphertext, tag, plaintext)?;
        incoming.consume(HEADER + length);
        // Zeroes after the type are padding.
        let Some(end) = plaintext.iter().rposition(|&byte| byte != 0) else {
            return Err(PeerMisbehaved::IllegalTlsInnerPlaintext.into());
        };
        let (content, kind) = (&plaintext[..end], plaintext[end]);
        if end > LONGEST {
            return Err(Error::PeerSentOversizedRecord);
        }
        match kind {
            kind::DATA => {
                if end > 0 {
                    self.updates = 0;
                }
                if direct {
                    return Ok(Some(end));
                }
                self.waiting = 0..end;
            }
            kind::ALERT => {
                let alert = content.try_into().ok();
                self.alert(alert)?;
            }
            kind::HANDSHAKE => {
                let content = content.to_vec();
                self.handshake_messages(&content)?;
            }
            _ => return Err(InvalidMessage::InvalidContentType.into()),
        }
        Ok(Some(0))
    }

    fn alert(&mut self, alert: Option<[u8; 2]>) -> Result<(), Error> {
        let Some([_, description]) = alert else {
            return Err(InvalidMessage::MessageTooShort.into());
        };
        match AlertDescription::from(description) {
            AlertDescription::CloseNotify => self.ended = true,
            // Announces a close, for a reason of the other side's own.
            AlertDescription::UserCanceled => {}
            other => return Err(Error::AlertReceived(other)),
        }
        Ok(())
    }

    /// Handles the messages allowed after the handshake. Each message is whole: the allowed messages are short.
    fn handshake_messages(&mut self, mut messages: &[u8]) -> Result<(), Error> {
        if messages.is_empty() {
            return Err(InvalidMessage::MessageTooShort.into());
        }
        while let Some((&[kind, high, middle, low], rest)) = messages.split_first_chunk() {
            let length = u32::from_be_bytes([0, high, middle, low]) as usize;
            let Some((body, after)) = rest.split_at_checked(length) else {
                return Err(InvalidMessage::MessageTooShort.into());
            };
            messages = after;
            match (kind, body) {
                // Sessions are never resumed: a ticket is of no use.
                (message::NEW_SESSION_TICKET, _) if matches!(self.secrets, Secrets::Client(_)) => {}
                // A new key starts with a new record.
                (message::KEY_UPDATE, &[wanted @ 0..=1]) if after.is_empty() => {
                    self.new_opening_key()?;
                    self.update_wanted |= wanted == 1;
                }
                (message::KEY_UPDATE, _) => return Err(InvalidMessage::InvalidKeyUpdate.into()),
                _ => {
                    return Err(InvalidMessage::UnexpectedMessage("a handshake message").into());
                }
            }
        }
        if messages.is_empty() {
            Ok(())
        } else {
            Err(InvalidMessage::MessageTooShort.into())
        }
    }

    fn new_opening_key(&mut self) -> Result<(), Error> {
        self.updates += 1;
        if self.updates > MOST_UPDATES {
            return Err(PeerMisbehaved::TooManyKeyUpdateRequests.into());
        }
        self.opening = Keys::new(match &mut self.secrets {
            Secrets::Client(kernel) => kernel.update_rx_secret(),
            Secrets::Server(kernel) => kernel.update_rx_secret(),
        }?)?;
        Ok(())
    }

    /// Encrypts `plaintext` into `outgoing`, as many whole records as fit. Returns the number of bytes taken.
    pub(super) fn seal(
        &mut self,
        outgoing: &mut Staging,
        plaintext: &[u8],
    ) -> Result<usize, Error> {
        let mut taken = 0;
        for part in plaintext.chunks(LONGEST) {
            let changes = self.update_wanted || self.sealing.used() >= self.most_sealed;
            let before = if changes {
                OVERHEAD + KEY_UPDATE.len()
            } else {
                0
            };
            if outgoing.room().1 < before + OVERHEAD + part.len() {
                break;
            }
            if changes {
                self.seal_key_update(outgoing)?;
            }
            self.seal_record(outgoing, part, kind::DATA)?;
            taken += part.len();
        }
        Ok(taken)
    }

    /// Announces and takes a new key, without a request for a new key of the other side. The caller ensures room.
    pub(super) fn seal_key_update(&mut self, outgoing: &mut Staging) -> Result<(), Error> {
        self.seal_record(outgoing, &KEY_UPDATE, kind::HANDSHAKE)?;
        self.sealing = Keys::new(match &mut self.secrets {
            Secrets::Client(kernel) => kernel.update_tx_secret(),
            Secrets::Server(kernel) => kernel.update_tx_secret(),
        }?)?;
        self.update_wanted = false;
        Ok(())
    }

    /// Encrypts one record. The caller ensures room.
    pub(super) fn seal_record(
        &mut self,
        outgoing: &mut Staging,
        plaintext: &[u8],
        kind: u8,
    ) -> Result<(), Error> {
        let [high, low] = ((plaintext.len() + 1 + TAG) as u16).to_be_bytes();
        // The version is the legacy version, as everywhere in TLS 1.3.
        let header = [kind::DATA, 3, 3, high, low];
        let length = OVERHEAD + plaintext.len();
        let (start, body) = outgoing.room_mut()[..length].split_at_mut(HEADER);
        start.copy_from_slice(&header);
        self.sealing.seal(&header, plaintext, kind, body)?;
        outgoing.filled(length);
        Ok(())
    }

    /// Ends the session after everything encrypted so far.
    pub(super) fn close(&mut self) {
        if self.close == Close::No {
            self.close = Close::Wanted;
        }
    }

    /// Returns true if the end of the session is still to be announced.
    pub(super) fn wants_close(&self) -> bool {
        self.close == Close::Wanted
    }

    /// Announces the end of the session if due and if the announcement fits.
    pub(super) fn seal_close(&mut self, outgoing: &mut Staging) -> Result<(), Error> {
        let alert = [1, u8::from(AlertDescription::CloseNotify)];
        if self.wants_close() && outgoing.room().1 >= OVERHEAD + alert.len() {
            self.seal_record(outgoing, &alert, kind::ALERT)?;
            self.close = Close::Sent;
        }
        Ok(())
    }

    /// Limits the records encrypted with one key.
    #[cfg(test)]
    pub(super) fn limit_key(&mut self, records: u64) {
        self.most_sealed = records;
    }
}
