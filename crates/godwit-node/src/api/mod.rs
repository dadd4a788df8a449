//! What the node's JSON API speaks: the types are shared with the command line.

pub mod error;
pub mod types;

pub use error::{ErrorBody, ErrorCode};
pub use types::*;
