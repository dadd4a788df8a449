//! The server of the node's JSON API, whose types are in `godwit-api`.

pub mod access;
mod memory_routes;
mod move_routes;
mod nic_routes;
mod openapi;
mod process_routes;
mod refusal;
mod routes;
mod serve;
mod vm_routes;

pub use godwit_api::*;
pub use openapi::document;
pub(crate) use serve::{listen_tls, listen_unix};
