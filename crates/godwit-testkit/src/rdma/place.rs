//! A process in a guest, and what its library says of it.

use std::io;

use godwit_verbs::control::{Answer, Request, Status};

use super::RdmaGuest;

/// A process in a guest.
#[derive(Clone, Copy)]
pub struct Place<'a> {
    /// The guest.
    pub guest: &'a RdmaGuest,
    /// The process; it keeps its number when it moves.
    pub pid: u32,
}

impl Place<'_> {
    /// Its queue pairs, and what keeps it from moving.
    ///
    /// # Errors
    /// Also if it does not use the library.
    pub fn status(&self) -> io::Result<Status> {
        let text = serde_json::to_string(&Request::Status)?;
        let said = self
            .guest
            .must(&format!("godwit-verbs ask {} '{text}'", self.pid))?;
        match serde_json::from_str(&said)? {
            Answer::Status(status) => Ok(status),
            Answer::Error(error) => Err(io::Error::other(error)),
            other => Err(io::Error::other(format!(
                "the library gave an answer to another question: {other:?}"
            ))),
        }
    }
}
