//! The types of a node's JSON API: requests, answers and errors, shared by nodes, the command line and other clients.

mod disk;
mod error;
mod migration;
mod moves;
mod node;
mod options;
mod process;
mod promise;
pub mod text;
mod vm;

pub use disk::*;
pub use error::{ErrorBody, ErrorCode, advice};
pub use migration::*;
pub use moves::*;
pub use node::*;
pub use options::policy::Policy;
pub use options::*;
pub use process::*;
pub use promise::*;
pub use vm::*;

const fn yes() -> bool {
    true
}
