//! What people see: tables and sentences, quantities, and work that goes on.

pub(crate) mod line;
pub(crate) mod output;
pub(crate) mod progress;
pub(crate) mod promise;
pub(crate) mod units;
