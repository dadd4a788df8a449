//! The part of a disk that has not come with it: what the owner lacks and pulls, and what the node that gave the
//! disk away owes and sends (Alg. 3 and 4 of the hybrid storage-transfer paper).

pub(in crate::controller) mod lacking;
pub(in crate::controller) mod missing;
pub(in crate::controller) mod owing;
