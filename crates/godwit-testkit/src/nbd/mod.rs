//! A small blocking NBD client, written from the protocol's document to share no code and no misunderstanding with the
//! server under test.

mod connection;
mod target;

pub use connection::{Command, NbdConnection, NbdReader, NbdWriter, Reply, Request};
pub use target::{NbdStream, NbdTarget};

/// The transmission flag of a read-only export.
pub const FLAG_READ_ONLY: u16 = 1 << 1;
