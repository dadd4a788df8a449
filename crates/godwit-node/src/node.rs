//! The shared state of a running node.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use crate::config::{NodeConfig, PeerConfig};
use crate::disks::jobs::Jobs;
use crate::disks::{DiskUsers, Disks};
use crate::images::Images;
use crate::migrations::Migrations;
use crate::migrations::incoming::admission::Arrivals;
use crate::migrations::incoming::gatherings::Gatherings;
use crate::nics::named::NamedNics;
use crate::peers::dial::Dialer;
use crate::peers::probe::PeerHealth;
use crate::processes::Processes;
use crate::store::Store;
use crate::vms::Vms;
use crate::vms::outgoing::table::VmMigrations;
use crate::vms::tunnel::MemoryDoors;
use godwit_api::{ErrorBody, ErrorCode};

/// Longest wait for any answer of the other node during a migration.
pub(crate) const PEER_TIMEOUT: Duration = Duration::from_secs(10);

/// Time between two uses of the thread for blocking work: tokio ends a thread idle for ten seconds.
const BLOCKING_THREAD_USED: Duration = Duration::from_secs(4);

/// A running node.
#[derive(Debug)]
pub(crate) struct Node {
    /// The configuration from the start.
    pub(crate) config: NodeConfig,
    /// The start time, as the API shows it.
    pub(crate) started_at: String,
    /// The durable state.
    pub(crate) store: Store,
    pub(crate) disks: Disks,
    /// The receiver of the events of the disks' engines.
    pub(crate) disk_users: DiskUsers,
    /// Migrations under way and ended.
    pub(crate) migrations: Migrations,
    /// Incoming migrations whose connections are not complete.
    pub(crate) gatherings: Gatherings,
    /// Disks being received, with their senders.
    pub(crate) arrivals: Arrivals,
    pub(crate) vms: Vms,
    /// NICs with names of their own.
    pub(crate) nics: NamedNics,
    /// Imports and exports.
    pub(crate) jobs: Jobs,
    /// The images that disks are created from.
    pub(crate) images: Images,
    /// Opens connections to other nodes.
    pub(crate) dialer: Dialer,
    /// The peers' recent reachability.
    pub(crate) peer_health: PeerHealth,
    /// Signals every change of the stored owner of a disk.
    pub(crate) owners: watch::Sender<()>,
    /// Moves of VMs, under way and ended.
    pub(crate) vm_migrations: VmMigrations,
    /// Incoming VMs that wait for the connection of their memory.
    pub(crate) memory_doors: MemoryDoors,
    /// Processes with RDMA connections.
    pub(crate) processes: Processes,
    /// True once the node is closing.
    pub(crate) closing: watch::Sender<bool>,
}

impl Node {
    /// Returns the peer of this name.
    ///
    /// # Errors
    /// [`ErrorCode::UnknownPeer`] with the known peers.
    pub(crate) fn peer(&self, name: &str) -> Result<&PeerConfig, ErrorBody> {
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

    pub(crate) fn is_closing(&self) -> bool {
        *self.closing.borrow()
    }

    /// Refuses new work once the node is closing.
    ///
    /// # Errors
    /// [`ErrorCode::ShuttingDown`].
    pub(crate) fn check_open(&self) -> Result<(), ErrorBody> {
        if self.is_closing() {
            return Err(ErrorBody::new(
                ErrorCode::ShuttingDown,
                format!("node '{}' is shutting down", self.config.name),
            ));
        }
        Ok(())
    }

    /// Waits until the node is closing.
    pub(crate) async fn closed(self: &Arc<Self>) {
        // The sender lives as long as the node, so waiting cannot fail.
        let _ = self.closing.subscribe().wait_for(|closing| *closing).await;
    }
}

/// Runs blocking work on a thread for blocking work.
///
/// # Errors
/// [`ErrorCode::Internal`] if the work panicked.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ErrorBody> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| ErrorBody::new(ErrorCode::Internal, format!("a task failed: {error}")))
}

/// Keeps one thread for [`blocking`] until the node is closing. If the process may start no more threads, blocking work
/// waits for this thread; without any thread the work could not even fail in order.
pub(crate) async fn keep_blocking_thread(node: Arc<Node>) {
    tokio::select! {
        () = use_blocking_thread(BLOCKING_THREAD_USED) => {}
        () = node.closed() => {}
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
