//! A process in a guest, and the status from its library.

use std::io;

use godwit_verbs::control::{Answer, Request, Status};

use super::RdmaGuest;

/// A process in a guest.
#[derive(Clone, Copy)]
pub struct Place<'a> {
    /// The guest.
    pub guest: &'a RdmaGuest,
    /// Process id, which a move keeps.
    pub pid: u32,
}

impl Place<'_> {
    /// Returns true if the process exists in any state but zombie or dead.
    pub fn exists(&self) -> io::Result<bool> {
        let pid = self.pid;
        let said = self.guest.must(&format!(
            "case $(sed -n 's/^State:.//p' /proc/{pid}/status 2>/dev/null) in ''|Z*|X*) echo gone;; *) echo there;; esac"
        ))?;
        match said.trim() {
            "there" => Ok(true),
            "gone" => Ok(false),
            other => Err(io::Error::other(format!(
                "whether process {pid} is there, guest {} says {other:?}",
                self.guest.number()
            ))),
        }
    }

    /// Returns the process's queue pairs, and the reasons against a move.
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
