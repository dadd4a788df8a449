//! The nodes of a move, this node included, with connections made on demand.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use godwit_core::units::MigrationId;
use godwit_core::wire::{Purpose, TrafficClass};
use godwit_verbs::control::{Answer as LibraryAnswer, Request};

use crate::Processes;
use crate::incoming::serve::Session;
use crate::messages::{self, Answer, Ask};
use godwit_peers::{PeerConnection, greeting};

/// Longest wait for most answers: a process may have thousands of objects.
pub(crate) const ANSWER: Duration = Duration::from_secs(150);

/// The reason for a missing or useless answer.
#[derive(Clone, Debug)]
pub(crate) enum Trouble {
    /// The node refuses.
    Refused(String),
    /// The node is unreachable or silent, and may fulfil the request nevertheless.
    Silent(String),
}

impl Trouble {
    pub(crate) fn into_text(self) -> String {
        match self {
            Self::Refused(text) | Self::Silent(text) => text,
        }
    }
}

/// The nodes of one move.
#[derive(Debug)]
pub(crate) struct Reach {
    processes: Arc<Processes>,
    id: MigrationId,
    own: Session,
    others: BTreeMap<String, PeerConnection>,
}

impl Reach {
    pub(crate) fn new(processes: Arc<Processes>, id: MigrationId) -> Self {
        let own = Session::new(processes.context.config.name.clone(), id.to_string());
        Self {
            processes,
            id,
            own,
            others: BTreeMap::new(),
        }
    }

    /// Returns the connection to another node, and opens one if missing.
    pub(crate) async fn connection(&mut self, name: &str) -> Result<&mut PeerConnection, Trouble> {
        if !self.others.contains_key(name) {
            let peer = self
                .processes
                .context
                .peer(name)
                .map_err(|error| Trouble::Silent(error.message))?;
            let own = &self.processes.context.config.name;
            let hello = greeting::hello(own, "", TrafficClass::Control, Purpose::Process, self.id);
            let dialled = self.processes.context.dialer.dial(peer, hello).await;
            let (connection, _) = dialled.map_err(|error| {
                Trouble::Silent(error.into_body(name, "move a process").message)
            })?;
            self.others.insert(name.to_owned(), connection);
        }
        self.others
            .get_mut(name)
            .ok_or_else(|| Trouble::Silent(format!("node '{name}' is not connected")))
    }

    /// Closes the connection to a node.
    pub(crate) fn hang_up(&mut self, name: &str) {
        self.others.remove(name);
    }

    /// Closes the connections to all nodes that are not involved.
    pub(crate) fn keep(&mut self, involved: impl Fn(&str) -> bool) {
        self.others.retain(|name, _| involved(name));
    }

    /// Sends a request to a node, this node or another, and returns the answer.
    pub(crate) async fn ask(
        &mut self,
        name: &str,
        asked: Ask,
        within: Duration,
    ) -> Result<Answer, Trouble> {
        let answer = if name == self.processes.context.config.name {
            let processes = Arc::clone(&self.processes);
            self.own.answer(&processes, asked).await
        } else {
            let connection = self.connection(name).await?;
            let asking = async {
                messages::write(connection, &asked).await?;
                messages::read::<Answer>(connection, within).await
            };
            match asking.await {
                Ok(answer) => answer,
                Err(error) => {
                    self.hang_up(name);
                    return Err(Trouble::Silent(format!("node '{name}': {error}")));
                }
            }
        };
        match answer {
            Answer::Refused(why) => Err(Trouble::Refused(format!("node '{name}': {why}"))),
            Answer::Busy(why) => {
                self.hang_up(name);
                Err(Trouble::Silent(format!("node '{name}': {why}")))
            }
            answer => Ok(answer),
        }
    }

    /// Sends a request to a library through a node.
    pub(crate) async fn library(
        &mut self,
        name: &str,
        asked: Ask,
    ) -> Result<LibraryAnswer, Trouble> {
        match self.ask(name, asked, ANSWER).await? {
            Answer::Library(LibraryAnswer::Error(why)) => {
                Err(Trouble::Refused(format!("node '{name}': {why}")))
            }
            Answer::Library(answer) => Ok(answer),
            _ => Err(Trouble::Refused(format!(
                "node '{name}' gave an answer to another question"
            ))),
        }
    }

    /// Sends a request to a partner's library.
    pub(crate) async fn partner(
        &mut self,
        name: &str,
        pid: u32,
        request: Request,
    ) -> Result<LibraryAnswer, Trouble> {
        self.library(name, Ask::Partner { pid, request }).await
    }
}
