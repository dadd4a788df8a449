//! Numbers of the NBD protocol, under the names of its specification.

/// Longest data of one read or write in bytes: 32 MiB, which the protocol expects of every server.
pub const MAX_PAYLOAD: u32 = 32 << 20;

/// Longest string, such as an export's name, in bytes.
pub const MAX_STRING: usize = 4096;

/// Request size, in bytes, below which clients lose speed.
pub const PREFERRED_BLOCK_SIZE: u32 = 4096;

pub(super) const NBDMAGIC: u64 = 0x4e42_444d_4147_4943;
pub(super) const IHAVEOPT: u64 = 0x4948_4156_454f_5054;
pub(super) const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

pub(super) const FLAG_FIXED_NEWSTYLE: u16 = 1 << 0;
pub(super) const FLAG_NO_ZEROES: u16 = 1 << 1;

pub(super) const OPT_EXPORT_NAME: u32 = 1;
pub(super) const OPT_ABORT: u32 = 2;
pub(super) const OPT_LIST: u32 = 3;
pub(super) const OPT_STARTTLS: u32 = 5;
pub(super) const OPT_INFO: u32 = 6;
pub(super) const OPT_GO: u32 = 7;
pub(super) const OPT_STRUCTURED_REPLY: u32 = 8;
pub(super) const OPT_LIST_META_CONTEXT: u32 = 9;
pub(super) const OPT_SET_META_CONTEXT: u32 = 10;

pub(super) const REP_ACK: u32 = 1;
pub(super) const REP_SERVER: u32 = 2;
pub(super) const REP_INFO: u32 = 3;
pub(super) const REP_META_CONTEXT: u32 = 4;
pub(super) const REP_ERR_UNSUP: u32 = (1 << 31) + 1;
pub(super) const REP_ERR_POLICY: u32 = (1 << 31) + 2;
pub(super) const REP_ERR_INVALID: u32 = (1 << 31) + 3;
pub(super) const REP_ERR_TLS_REQD: u32 = (1 << 31) + 5;
pub(super) const REP_ERR_UNKNOWN: u32 = (1 << 31) + 6;
pub(super) const REP_ERR_SHUTDOWN: u32 = (1 << 31) + 7;
pub(super) const REP_ERR_TOO_BIG: u32 = (1 << 31) + 9;

pub(super) const INFO_EXPORT: u16 = 0;
pub(super) const INFO_BLOCK_SIZE: u16 = 3;

pub(super) const TRANSMIT_HAS_FLAGS: u16 = 1 << 0;
pub(super) const TRANSMIT_SEND_FLUSH: u16 = 1 << 2;
pub(super) const TRANSMIT_SEND_FUA: u16 = 1 << 3;
pub(super) const TRANSMIT_SEND_TRIM: u16 = 1 << 5;
pub(super) const TRANSMIT_SEND_WRITE_ZEROES: u16 = 1 << 6;
pub(super) const TRANSMIT_SEND_DF: u16 = 1 << 7;
pub(super) const TRANSMIT_CAN_MULTI_CONN: u16 = 1 << 8;
pub(super) const TRANSMIT_SEND_FAST_ZERO: u16 = 1 << 11;

/// The only metadata context: the allocated ranges.
pub(super) const BASE_ALLOCATION: &[u8] = b"base:allocation";
/// Number of the context in block status replies.
pub(super) const BASE_ALLOCATION_ID: u32 = 1;
pub(super) const STATE_HOLE: u32 = 1 << 0;
pub(super) const STATE_ZERO: u32 = 1 << 1;

pub(super) const REQUEST_MAGIC: u32 = 0x2560_9513;
pub(super) const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
pub(super) const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

pub(super) const CMD_READ: u16 = 0;
pub(super) const CMD_WRITE: u16 = 1;
pub(super) const CMD_DISC: u16 = 2;
pub(super) const CMD_FLUSH: u16 = 3;
pub(super) const CMD_TRIM: u16 = 4;
pub(super) const CMD_WRITE_ZEROES: u16 = 6;
pub(super) const CMD_BLOCK_STATUS: u16 = 7;

pub(super) const CMD_FLAG_FUA: u16 = 1 << 0;
pub(super) const CMD_FLAG_NO_HOLE: u16 = 1 << 1;
pub(super) const CMD_FLAG_DF: u16 = 1 << 2;
pub(super) const CMD_FLAG_REQ_ONE: u16 = 1 << 3;
pub(super) const CMD_FLAG_FAST_ZERO: u16 = 1 << 4;

pub(super) const REPLY_FLAG_DONE: u16 = 1 << 0;
pub(super) const REPLY_TYPE_OFFSET_DATA: u16 = 1;
pub(super) const REPLY_TYPE_BLOCK_STATUS: u16 = 5;
pub(super) const REPLY_TYPE_ERROR: u16 = (1 << 15) + 1;
