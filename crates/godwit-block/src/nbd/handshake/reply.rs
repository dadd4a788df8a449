//! The server's part of a handshake.

use godwit_core::units::SECTOR_SIZE;

use super::{ExportInfo, ExportRefusal};
use crate::nbd::constants::{
    BASE_ALLOCATION, BASE_ALLOCATION_ID, FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES, IHAVEOPT,
    INFO_BLOCK_SIZE, INFO_EXPORT, MAX_PAYLOAD, MAX_STRING, NBDMAGIC, OPTION_REPLY_MAGIC,
    PREFERRED_BLOCK_SIZE, REP_ACK, REP_ERR_POLICY, REP_ERR_SHUTDOWN, REP_ERR_UNKNOWN, REP_INFO,
    REP_META_CONTEXT, REP_SERVER, TRANSMIT_CAN_MULTI_CONN, TRANSMIT_HAS_FLAGS, TRANSMIT_SEND_DF,
    TRANSMIT_SEND_FAST_ZERO, TRANSMIT_SEND_FLUSH, TRANSMIT_SEND_FUA, TRANSMIT_SEND_TRIM,
    TRANSMIT_SEND_WRITE_ZEROES,
};

/// Zeroes at the end of the reply to `NBD_OPT_EXPORT_NAME`, unless the client declined them.
const EXPORT_NAME_PADDING: usize = 124;

/// Returns the server's first bytes.
pub(super) fn greeting() -> Vec<u8> {
    let mut bytes = Vec::with_capacity(18);
    bytes.extend_from_slice(&NBDMAGIC.to_be_bytes());
    bytes.extend_from_slice(&IHAVEOPT.to_be_bytes());
    bytes.extend_from_slice(&(FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES).to_be_bytes());
    bytes
}

/// Returns the abilities of every export. Several connections see one order of writes and flushes, because all of them
/// enter one engine.
fn transmission_flags(structured: bool) -> u16 {
    TRANSMIT_HAS_FLAGS
        | TRANSMIT_SEND_FLUSH
        | TRANSMIT_SEND_FUA
        | TRANSMIT_SEND_TRIM
        | TRANSMIT_SEND_WRITE_ZEROES
        | TRANSMIT_SEND_FAST_ZERO
        | TRANSMIT_CAN_MULTI_CONN
        | if structured { TRANSMIT_SEND_DF } else { 0 }
}

/// Appends one reply to `option`.
pub(super) fn push(out: &mut Vec<u8>, option: u32, kind: u32, data: &[&[u8]]) {
    // Every caller's data is bounded far below 4 GiB.
    let length = data.iter().map(|part| part.len()).sum::<usize>() as u32;
    out.extend_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
    out.extend_from_slice(&option.to_be_bytes());
    out.extend_from_slice(&kind.to_be_bytes());
    out.extend_from_slice(&length.to_be_bytes());
    data.iter().for_each(|part| out.extend_from_slice(part));
}

/// Appends an error with a text for the client's user.
pub(super) fn push_error(out: &mut Vec<u8>, option: u32, kind: u32, text: &str) {
    push(out, option, kind, &[clipped(text).as_bytes()]);
}

/// Appends the answer to `NBD_OPT_INFO` or `NBD_OPT_GO`.
pub(super) fn push_info(out: &mut Vec<u8>, option: u32, info: ExportInfo, structured: bool) {
    let size = info.capacity.bytes().0.to_be_bytes();
    let flags = transmission_flags(structured).to_be_bytes();
    push(
        out,
        option,
        REP_INFO,
        &[&INFO_EXPORT.to_be_bytes(), &size, &flags],
    );
    // Sent even unasked: other clients would find out by errors.
    push(
        out,
        option,
        REP_INFO,
        &[
            &INFO_BLOCK_SIZE.to_be_bytes(),
            &(SECTOR_SIZE as u32).to_be_bytes(),
            &PREFERRED_BLOCK_SIZE.to_be_bytes(),
            &MAX_PAYLOAD.to_be_bytes(),
        ],
    );
    push(out, option, REP_ACK, &[]);
}

/// Appends the answer to `NBD_OPT_EXPORT_NAME`.
pub(super) fn push_export(out: &mut Vec<u8>, info: ExportInfo, structured: bool, zeroes: bool) {
    out.extend_from_slice(&info.capacity.bytes().0.to_be_bytes());
    out.extend_from_slice(&transmission_flags(structured).to_be_bytes());
    if zeroes {
        out.extend_from_slice(&[0; EXPORT_NAME_PADDING]);
    }
}

/// Appends one export's name to the answer to `NBD_OPT_LIST`.
pub(super) fn push_server(out: &mut Vec<u8>, option: u32, name: &str) {
    push(
        out,
        option,
        REP_SERVER,
        &[&(name.len() as u32).to_be_bytes(), name.as_bytes()],
    );
}

/// Appends the context `base:allocation` to the answer to an option about contexts. The number of a context that is
/// only listed means nothing.
pub(super) fn push_allocation_context(out: &mut Vec<u8>, option: u32, listed: bool) {
    let id = if listed { 0 } else { BASE_ALLOCATION_ID };
    push(
        out,
        option,
        REP_META_CONTEXT,
        &[&id.to_be_bytes(), BASE_ALLOCATION],
    );
}

impl ExportRefusal {
    /// Returns the protocol's number for the refusal.
    pub(super) const fn kind(&self) -> u32 {
        match self {
            Self::Unknown(_) => REP_ERR_UNKNOWN,
            Self::Policy(_) => REP_ERR_POLICY,
            Self::Shutdown(_) => REP_ERR_SHUTDOWN,
        }
    }

    /// Returns the text for the client.
    pub(super) fn text(&self) -> &str {
        match self {
            Self::Unknown(text) | Self::Policy(text) | Self::Shutdown(text) => text,
        }
    }
}

/// Returns as much of the text as a string of the protocol may hold.
fn clipped(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_STRING)]
}
