//! The memory, windows and keys of a client, and what the client expects of them.

pub(crate) mod ledger;
pub(crate) mod memory;
pub(crate) mod old_keys;
pub(crate) mod windows;
