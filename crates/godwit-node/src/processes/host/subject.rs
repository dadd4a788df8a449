//! What becomes an image and is made of it again: a process, or a container with all that runs in it.

use std::io;
use std::path::Path;
use std::time::Duration;

use super::criu;
use super::runc::Container;

/// Between two attempts to find out whether it runs.
const AGAIN: Duration = Duration::from_secs(1);

/// A process that moves, by itself or with its container.
#[derive(Clone, Debug)]
pub(crate) struct Subject {
    /// Its number at the source. By itself it keeps that; in a container it has another one at each host.
    pub(crate) pid: u32,
    /// What tells it from others.
    pub(crate) layout: String,
    /// The container that it runs in.
    pub(crate) container: Option<Container>,
}

impl Subject {
    /// The number under which it runs here; nothing if it does not.
    ///
    /// # Errors
    /// It cannot be read, which says nothing of the process.
    pub(crate) async fn found(&self) -> io::Result<Option<u32>> {
        match &self.container {
            None => Ok(criu::lives(self.pid, &self.layout)?.then_some(self.pid)),
            Some(container) => container.process(&self.layout).await,
        }
    }

    /// The number under which it runs here, asked until it is known; nothing if it does not.
    pub(crate) async fn surely_found(&self) -> Option<u32> {
        loop {
            match self.found().await {
                Ok(found) => return found,
                Err(error) => {
                    tracing::error!(pid = self.pid, %error, "whether a process runs cannot be read");
                }
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    /// Makes files of it; it runs no more then. Its TCP connections are cut off without a word to their peers.
    ///
    /// # Errors
    /// What CRIU says.
    pub(crate) async fn dump(&self, image: &Path) -> Result<(), String> {
        match &self.container {
            None => criu::dump(self.pid, image).await,
            Some(container) => container.dump(image).await,
        }
    }

    /// Makes it of its files.
    ///
    /// # Errors
    /// What CRIU says, or that it is not the same afterwards.
    pub(super) async fn make(&self, image: &Path) -> Result<u32, String> {
        let Some(container) = &self.container else {
            criu::make(image).await?;
            return Ok(self.pid);
        };
        container.restore(image).await?;
        let found = container.process(&self.layout).await;
        found
            .map_err(|error| error.to_string())?
            .ok_or_else(|| format!("container {} runs without its process", container.id))
    }

    /// Ends the rules with which CRIU has cut off its connections at the source.
    pub(crate) async fn unlock_network(&self) {
        let pid = self.container.as_ref().map_or(self.pid, |one| one.init);
        criu::unlock_network(pid).await;
    }
}
