//! Load on a network, and clients that check every answer.

pub(in crate::network) mod answers;
pub(in crate::network) mod beats;
pub(in crate::network) mod ping;
pub(in crate::network) mod postgres;
pub(in crate::network) mod records;
pub(in crate::network) mod redis;
pub(in crate::network) mod requests;
pub(in crate::network) mod talk;
pub(in crate::network) mod traffic;
