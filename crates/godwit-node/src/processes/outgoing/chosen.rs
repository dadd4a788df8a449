//! What moves: a process, or a container with the process in it that has RDMA connections.

use super::containers::choose;
use crate::node::blocking;
use crate::processes::host::family::Users;
use crate::processes::host::runc::{self, Container};

/// What is to move.
#[derive(Debug)]
pub(super) struct Chosen {
    /// The process.
    pub(super) pid: u32,
    /// The container that it runs in.
    pub(super) container: Option<Container>,
    /// Whether nothing of it uses RDMA.
    pub(super) plain: bool,
    /// What of the container stands in the way, one sentence each.
    pub(super) reasons: Vec<String>,
}

impl Chosen {
    /// A process with those that descend from it.
    ///
    /// # Errors
    /// One sentence: who uses RDMA cannot be read.
    pub(super) async fn process(pid: u32) -> Result<Self, String> {
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

    /// The same, as it is now.
    ///
    /// # Errors
    /// One sentence: it is another one by now.
    pub(super) async fn again(&self) -> Result<Self, String> {
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

    /// What it is called in what is said.
    pub(super) fn name(&self) -> String {
        name_of(self.pid, self.container.as_ref())
    }
}

/// What a process, or the container that it runs in, is called in what is said.
pub(super) fn name_of(pid: u32, container: Option<&Container>) -> String {
    match container {
        None => format!("process {pid}"),
        Some(container) => format!("container {}", container.id),
    }
}
