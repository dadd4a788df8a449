//! The subject of a move: a process, or a container with the one process inside that has RDMA connections.

use super::super::containers::choose;
use crate::host::family::Users;
use crate::host::runc::{self, Container};
use godwit_context::blocking;

/// The process or container to move.
#[derive(Debug)]
pub(in crate::outgoing) struct Chosen {
    pub(in crate::outgoing) pid: u32,
    /// The container of the process.
    pub(in crate::outgoing) container: Option<Container>,
    /// True if no process of the subject uses RDMA.
    pub(in crate::outgoing) plain: bool,
    /// The container's obstacles, one sentence each.
    pub(in crate::outgoing) reasons: Vec<String>,
}

impl Chosen {
    /// Chooses a process with its descendants.
    ///
    /// # Errors
    /// One sentence: the users of RDMA are unreadable.
    pub(in crate::outgoing) async fn process(pid: u32) -> Result<Self, String> {
        let found = blocking(move || Users::of(pid)).await;
        let users = found
            .map_err(|error| error.message)?
            .map_err(|error| format!("whether process {pid} uses RDMA cannot be read: {error}"))?;
        Ok(Self {
            pid,
            container: None,
            plain: users.is_empty(),
            reasons: users.reasons(pid),
        })
    }

    /// Chooses the same subject again, in its present state.
    ///
    /// # Errors
    /// One sentence: the subject has changed or ended.
    pub(in crate::outgoing) async fn again(&self) -> Result<Self, String> {
        let Some(container) = &self.container else {
            let chosen = Self::process(self.pid).await?;
            if chosen.plain == self.plain {
                return Ok(chosen);
            }
            return Err(format!(
                "whether process {} uses RDMA has changed",
                self.pid
            ));
        };
        let name = self.name();
        let listed = runc::named(&container.id).await?;
        let listed = listed.filter(|listed| listed.pid == container.init);
        let listed = listed.ok_or_else(|| format!("{name} has ended"))?;
        let chosen = choose(listed).await.map_err(|error| error.message)?;
        if (chosen.pid, chosen.plain) == (self.pid, self.plain) {
            return Ok(chosen);
        }
        Err(format!("which process of {name} uses RDMA has changed"))
    }

    /// Returns the subject's name for messages.
    pub(in crate::outgoing) fn name(&self) -> String {
        name_of(self.pid, self.container.as_ref())
    }
}

/// Returns the name of a process, or of its container, for messages.
pub(in crate::outgoing) fn name_of(pid: u32, container: Option<&Container>) -> String {
    match container {
        None => format!("process {pid}"),
        Some(container) => format!("container {}", container.id),
    }
}
