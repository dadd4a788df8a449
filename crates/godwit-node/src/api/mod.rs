//! The server of the node's JSON API, whose types are in `godwit-api`.

pub mod access;
mod openapi;
mod refusal;
mod routes;
mod serve;

pub use godwit_api::*;
pub use openapi::document;
pub(crate) use serve::{listen_tls, listen_unix};
