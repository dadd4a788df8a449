//! Options: the client's part of a handshake.

use super::HandshakeError;
use crate::nbd::constants::{BASE_ALLOCATION, IHAVEOPT, MAX_STRING, OPT_LIST_META_CONTEXT};

/// Bytes of an option before its data.
const OPTION_HEADER_SIZE: usize = 16;

#[derive(Debug, PartialEq, Eq)]
pub(super) struct ClientOption {
    pub(super) number: u32,
    pub(super) data: Vec<u8>,
}

impl ClientOption {
    /// Takes the first option off `input`; `None` if the option is incomplete. Wrong or too long options are refused
    /// once their header is there, without a wait for their data.
    pub(super) fn take(input: &mut Vec<u8>, limit: u32) -> Result<Option<Self>, HandshakeError> {
        let Some(header) = input.first_chunk::<OPTION_HEADER_SIZE>() else {
            return Ok(None);
        };
        let [
            m0,
            m1,
            m2,
            m3,
            m4,
            m5,
            m6,
            m7,
            n0,
            n1,
            n2,
            n3,
            l0,
            l1,
            l2,
            l3,
        ] = *header;
        if u64::from_be_bytes([m0, m1, m2, m3, m4, m5, m6, m7]) != IHAVEOPT {
            return Err(HandshakeError::OptionMagic);
        }
        let number = u32::from_be_bytes([n0, n1, n2, n3]);
        let length = u32::from_be_bytes([l0, l1, l2, l3]);
        if length > limit {
            return Err(HandshakeError::OptionTooLong {
                option: number,
                length,
                limit,
            });
        }
        let end = OPTION_HEADER_SIZE + length as usize;
        let Some(data) = input.get(OPTION_HEADER_SIZE..end) else {
            return Ok(None);
        };
        let data = data.to_vec();
        input.drain(..end);
        Ok(Some(Self { number, data }))
    }

    /// Returns the export named by `NBD_OPT_INFO` and `NBD_OPT_GO`, if their data is well formed: a name with its
    /// length, then a count and as many 16-bit numbers. The requested kinds of information do not matter: all
    /// information fits one reply, and the protocol allows the server to send all.
    pub(super) fn requested_export(&self) -> Option<String> {
        let (length, rest) = self.data.split_first_chunk()?;
        let length = usize::try_from(u32::from_be_bytes(*length)).ok()?;
        let (name, rest) = rest.split_at_checked(length)?;
        let (count, requests) = rest.split_first_chunk()?;
        if requests.len() != 2 * usize::from(u16::from_be_bytes(*count)) {
            return None;
        }
        export_name(name)
    }
}

/// The request of `NBD_OPT_LIST_META_CONTEXT` and `NBD_OPT_SET_META_CONTEXT`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ContextRequest {
    pub(super) export: String,
    /// True if `base:allocation` is among the requested contexts.
    pub(super) allocation: bool,
}

impl ClientOption {
    /// Returns the request, if the option's data is well formed: the export's name with its length, then a count and as
    /// many queries with their lengths. A list request without queries asks for every context, and `base:` asks for all
    /// of its namespace. A set request selects a context only by its whole name.
    pub(super) fn requested_contexts(&self) -> Option<ContextRequest> {
        let (export, rest) = counted_string(&self.data)?;
        let export = export_name(export)?;
        let (count, mut rest) = rest.split_first_chunk()?;
        let count = u32::from_be_bytes(*count);
        let lists = self.number == OPT_LIST_META_CONTEXT;
        let mut allocation = lists && count == 0;
        // Every query takes 4 bytes at least, so the option's length bounds the loop.
        for _ in 0..count {
            let (query, next) = counted_string(rest)?;
            if query.len() > MAX_STRING {
                return None;
            }
            allocation |= query == BASE_ALLOCATION || lists && query == b"base:";
            rest = next;
        }
        rest.is_empty()
            .then_some(ContextRequest { export, allocation })
    }
}

/// Returns a string with a length prefix, and the rest.
fn counted_string(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = bytes.split_first_chunk()?;
    rest.split_at_checked(usize::try_from(u32::from_be_bytes(*length)).ok()?)
}

/// Returns the export's name in these bytes, if the protocol allows the name.
pub(super) fn export_name(bytes: &[u8]) -> Option<String> {
    if bytes.len() > MAX_STRING || bytes.contains(&0) {
        return None;
    }
    core::str::from_utf8(bytes).ok().map(str::to_owned)
}
