//! Options: what the client sends during a handshake.

use super::HandshakeError;
use crate::nbd::constants::{IHAVEOPT, MAX_STRING};

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

/// The export's name in these bytes, when it is one the protocol allows.
pub(super) fn export_name(bytes: &[u8]) -> Option<String> {
    if bytes.len() > MAX_STRING || bytes.contains(&0) {
        return None;
    }
    core::str::from_utf8(bytes).ok().map(str::to_owned)
}
