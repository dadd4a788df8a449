//! Repositories that are away, slow, damaged or odd.

pub(crate) mod away;
pub(crate) mod bad;
pub(crate) mod odd_node;
pub(crate) mod peers;
pub(crate) mod s3;
