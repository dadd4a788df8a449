//! The part of a node that disks, machines and processes share.

pub mod config;
pub mod failpoint;
pub mod fencing;
pub mod ids;
pub mod moves;
pub mod node_error;
pub mod store;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use godwit_block::engine::PeerStream;
use godwit_core::units::MigrationId;
use godwit_core::wire::{Purpose, TrafficClass};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::config::NodeConfig;
use crate::fencing::Fencing;
use crate::store::Store;
use godwit_api::{ErrorBody, ErrorCode};
use godwit_peers::config::PeerConfig;
use godwit_peers::dial::Dialer;
use godwit_peers::greeting;
use godwit_peers::health::PeerHealth;
use godwit_peers::into_stream;

/// Longest wait for any answer of the other node during a migration.
pub const PEER_TIMEOUT: Duration = Duration::from_secs(10);

/// Time between two uses of the thread for blocking work: tokio ends a thread idle for ten seconds.
const BLOCKING_THREAD_USED: Duration = Duration::from_secs(4);

/// The configuration, durable state and connections of a node.
#[derive(Debug)]
pub struct Context {
    /// The configuration from the start.
    pub config: NodeConfig,
    /// The durable state.
    pub store: Store,
    /// Opens connections to other nodes.
    pub dialer: Dialer,
    /// The peers' recent reachability.
    pub peer_health: PeerHealth,
    /// The hosts that this node is fencing.
    pub fencing: Fencing,
    /// True once the node is closing.
    closing: watch::Sender<bool>,
}

impl Context {
    /// Creates the context of a node that is open.
    pub fn new(config: NodeConfig, store: Store, dialer: Dialer) -> Self {
        Self {
            config,
            store,
            dialer,
            peer_health: PeerHealth::default(),
            fencing: Fencing::default(),
            closing: watch::Sender::new(false),
        }
    }

    /// Ends the watches of every part of the node, and refuses new work from now on.
    pub fn close(&self) {
        self.closing.send_replace(true);
    }

    /// Returns the peer of this name.
    ///
    /// # Errors
    /// [`ErrorCode::UnknownPeer`] with the known peers.
    pub fn peer(&self, name: &str) -> Result<&PeerConfig, ErrorBody> {
        self.config
            .peers
            .iter()
            .find(|peer| peer.name == name)
            .ok_or_else(|| {
                let shown: String = name.chars().take(128).collect();
                let known: Vec<_> = self
                    .config
                    .peers
                    .iter()
                    .map(|peer| peer.name.as_str())
                    .collect();
                let known = if known.is_empty() {
                    String::from("it knows none")
                } else {
                    format!("it knows {}", known.join(", "))
                };
                ErrorBody::new(
                    ErrorCode::UnknownPeer,
                    format!(
                        "node '{}' knows no peer named {shown:?}: {known}",
                        self.config.name
                    ),
                )
                .hint("start the node with --peer NAME=HOST:PORT for each other node")
            })
    }

    /// Opens one connection about a disk to another node, for the disk's engine.
    ///
    /// # Errors
    /// Text for the log: the peer cannot be reached, or refused.
    pub async fn open_for(
        &self,
        disk: &str,
        peer: &PeerConfig,
        (class, purpose): (TrafficClass, Purpose),
        migration: MigrationId,
    ) -> Result<PeerStream, String> {
        let hello = greeting::hello(&self.config.name, disk, class, purpose, migration);
        let dialled = self.dialer.dial(peer, hello).await;
        let (connection, _) = dialled.map_err(|error| error.to_string())?;
        into_stream(connection)
            .await
            .map_err(|error| error.to_string())
    }

    /// Returns true once the node is closing.
    pub fn is_closing(&self) -> bool {
        *self.closing.borrow()
    }

    /// Refuses new work once the node is closing.
    ///
    /// # Errors
    /// [`ErrorCode::ShuttingDown`].
    pub fn check_open(&self) -> Result<(), ErrorBody> {
        if self.is_closing() {
            return Err(ErrorBody::new(
                ErrorCode::ShuttingDown,
                format!("node '{}' is shutting down", self.config.name),
            ));
        }
        Ok(())
    }

    /// Waits until the node is closing.
    pub async fn closed(&self) {
        // The sender lives as long as the node, so waiting cannot fail.
        let _ = self.closing.subscribe().wait_for(|closing| *closing).await;
    }
}

/// Starts a task. All tasks with one type of output share the code of the runtime; each type of future would otherwise
/// have its own.
pub fn spawn<T: Send + 'static>(task: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
    let task: Pin<Box<dyn Future<Output = T> + Send>> = Box::pin(task);
    tokio::spawn(task)
}

/// Runs blocking work on a thread for blocking work.
///
/// # Errors
/// [`ErrorCode::Internal`] if the work panicked.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ErrorBody> {
    let work: Box<dyn FnOnce() -> T + Send> = Box::new(work);
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| ErrorBody::new(ErrorCode::Internal, format!("a task failed: {error}")))
}

/// Keeps one thread for [`blocking`] until the node is closing. If the process may start no more threads, blocking work
/// waits for this thread; without any thread the work could not even fail in order.
pub async fn keep_blocking_thread(context: Arc<Context>) {
    tokio::select! {
        () = use_blocking_thread(BLOCKING_THREAD_USED) => {}
        () = context.closed() => {}
    }
}

async fn use_blocking_thread(every: Duration) {
    loop {
        // The empty work cannot fail.
        let _ = blocking(|| ()).await;
        tokio::time::sleep(every).await;
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn a_thread_for_work_that_blocks_stays() {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_time()
            .thread_keep_alive(Duration::from_secs(1))
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            let thread = || async { blocking(|| thread::current().id()).await.expect("a thread") };
            let keeper = tokio::spawn(use_blocking_thread(Duration::from_millis(100)));
            // Two concurrent calls get a thread each, and may use the threads in turns.
            let mut before = Vec::new();
            for _ in 0..20 {
                before.push(thread().await);
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            tokio::time::sleep(Duration::from_secs(3)).await;
            let after = thread().await;
            assert!(before.contains(&after), "{after:?} after {before:?}");
            keeper.abort();
        });
    }
}
