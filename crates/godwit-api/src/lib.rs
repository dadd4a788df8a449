//! What a node's JSON API speaks: requests, answers and errors, as nodes, the command line and other clients
//! share them.

mod disk;
mod error;
mod job;
mod memory;
mod migration;
mod nic;
mod node;
mod process;
mod promise;
pub mod text;
mod vm;

pub use disk::*;
pub use error::{ErrorBody, ErrorCode, advice};
pub use job::*;
pub use memory::*;
pub use migration::*;
pub use nic::*;
pub use node::*;
pub use process::*;
pub use promise::*;
pub use vm::*;

const fn yes() -> bool {
    true
}
