//! Options: what the client sends during a handshake.

use super::HandshakeError;
use crate::nbd::constants::{BASE_ALLOCATION, IHAVEOPT, MAX_STRING, OPT_LIST_META_CONTEXT};

/// Bytes of an option before its data.
const OPTION_HEADER_SIZE: usize = 16;

/// One option with its data.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ClientOption {
    pub(super) number: u32,
    pub(super) data: Vec<u8>,
}

impl ClientOption {
    /// Takes the first option off `input`; `None` when it is not all there. Wrong or too long ones
    /// are refused as soon as their header is there, before their data is waited for.
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

    /// The export that `NBD_OPT_INFO` and `NBD_OPT_GO` name, when their data is well formed: a name
    /// with its length, then a count and that many 16-bit numbers. Which information is asked for
    /// does not matter: all there is fits one reply, and the protocol lets a server send it.
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

/// What `NBD_OPT_LIST_META_CONTEXT` and `NBD_OPT_SET_META_CONTEXT` ask for.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ContextRequest {
    pub(super) export: String,
    /// Whether `base:allocation` is among the contexts asked for.
    pub(super) allocation: bool,
}

impl ClientOption {
    /// What is asked for, when the option's data is well formed: the export's name with its length, then a
    /// count and that many queries with their lengths. To list, no query asks for every context and `base:`
    /// for all of its namespace; to set, only a context's whole name selects it.
    pub(super) fn requested_contexts(&self) -> Option<ContextRequest> {
        let (export, rest) = counted_string(&self.data)?;
        let export = export_name(export)?;
        let (count, mut rest) = rest.split_first_chunk()?;
        let count = u32::from_be_bytes(*count);
        let lists = self.number == OPT_LIST_META_CONTEXT;
        let mut allocation = lists && count == 0;
        // Every query takes 4 bytes at least, so that the option's length bounds the loop.
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

/// A string that its length precedes, and what follows it.
fn counted_string(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = bytes.split_first_chunk()?;
    rest.split_at_checked(usize::try_from(u32::from_be_bytes(*length)).ok()?)
}

/// The export's name in these bytes, when it is one the protocol allows.
pub(super) fn export_name(bytes: &[u8]) -> Option<String> {
    if bytes.len() > MAX_STRING || bytes.contains(&0) {
        return None;
    }
    core::str::from_utf8(bytes).ok().map(str::to_owned)
}
