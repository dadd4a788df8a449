//! What the node's JSON API speaks (the types are shared with the command line), and its server.

pub mod access;
mod error;
mod openapi;
pub mod promise;
mod routes;
mod serve;
pub mod types;
pub mod vm;
mod vm_routes;

pub use error::{ErrorBody, ErrorCode};
pub use openapi::document;
pub use promise::{MigrationPromise, Obstacle, PauseReason, Pauses};
pub(crate) use serve::{listen_tls, listen_unix};
pub use types::*;
pub use vm::{
    Accelerator, AdoptVm, MemoryMode, MemoryProgress, MigrateVm, RunVm, StopVm, Vm, VmMigration,
    VmMigrationPhase, VmState,
};
