//! The binary interface of libibverbs (`infiniband/verbs.h`, stable since IBVERBS_1.1), as far as the shim touches the
//! interface. Names are the header's own, so that a reader finds them there.

#![allow(non_camel_case_types, missing_docs)]

mod commands;
mod extended;
mod extended_verbs;
mod objects;
mod requests;

pub(crate) use commands::*;
pub use extended::*;
pub use extended_verbs::*;
pub use objects::*;
pub use requests::*;
