//! Output for people: tables, sentences, quantities and progress.

pub(crate) mod line;
pub(crate) mod output;
pub(crate) mod progress;
pub(crate) mod promise;
