//! A guest that checks every answer.

mod content;
mod driver;
mod model;
mod verify;
mod workload;

pub use content::Content;
pub use driver::{ClientStats, End, Outcome, VerifyingClient};
pub use model::{Initial, Model, ReadTicket, Violation, WriteTicket};
pub use verify::{DiskReader, RawImage, Verified};
pub use workload::Workload;
