//! The life of a node, from its start to its orderly end.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use godwit_memory::pool::device::is_allocating;
use tokio::net::{TcpListener, UnixListener};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;

use crate::api;
use crate::daemon::data_dir::{self, DataDirLock};
use crate::daemon::disk_users;
use crate::daemon::notify;
use crate::daemon::open_files;
use crate::daemon::recover;
use crate::listeners::{self, nbd};
use crate::logging;
use crate::node::Node;
use crate::owners;
use godwit_context::config::NodeConfig;
use godwit_context::failpoint;
use godwit_context::node_error::NodeError;
use godwit_context::store::Store;
use godwit_context::{Context, keep_blocking_thread};
use godwit_disks::disks::Disks;
use godwit_disks::disks::lifecycle::{retire, run};
use godwit_disks::images::{self, Images};
use godwit_disks::migrations;
use godwit_disks::migrations::Migrations;
use godwit_machines::nics::named::NamedNics;
use godwit_machines::vms::Vms;
use godwit_peers::clock;
use godwit_peers::dial::Dialer;
use godwit_peers::tls::NodeTls;
use godwit_processes::Processes;

/// Time for listeners to end after the node begins to close.
const LISTENERS_END: Duration = Duration::from_secs(8);
/// Time between two checks for memory allocations under way while the node closes.
const ALLOCATIONS_POLL: Duration = Duration::from_millis(5);

/// A future that is compiled in this crate alone. The code of any other is made again in each crate that awaits it.
type Boxed<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Runs a node until `shutdown` is ready, then ends the node in order: listeners first, then the disks, then the store.
/// Must be awaited on a tokio runtime of several threads.
///
/// # Errors
/// [`NodeError`] if the node cannot start. A running node logs trouble with a disk or peer, and shows the trouble in
/// the API.
pub fn run(
    config: NodeConfig,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> Boxed<Result<(), NodeError>> {
    boxed(config, Box::pin(shutdown))
}

fn boxed(config: NodeConfig, shutdown: Boxed<()>) -> Boxed<Result<(), NodeError>> {
    Box::pin(live(config, shutdown))
}

async fn live(mut config: NodeConfig, shutdown: Boxed<()>) -> Result<(), NodeError> {
    failpoint::set_up();
    config.check()?;
    for warning in config.warnings() {
        tracing::warn!("{warning}");
    }
    open_files::raise_limit();
    let tls = match &config.tls {
        Some(files) => Some(
            NodeTls::load(&config.name, files)
                .map_err(|error| NodeError::Config(error.to_string()))?,
        ),
        None => None,
    };
    // From here on SIGHUP does not end the process, also during the start.
    let reload = signal(SignalKind::hangup())
        .map_err(|error| NodeError::Config(format!("cannot listen for signals: {error}")))?;
    let lock = data_dir::prepare(&mut config)?;
    let listeners = Listeners::open(&mut config).await?;
    let node = open(config, tls.clone()).await?;
    recover::recover(&node).await?;
    godwit_processes::recover(&node.processes);

    let mut tasks = JoinSet::new();
    listeners.serve(&node, tls.as_ref(), &mut tasks);
    tasks.spawn(migrations::sample_rates(Arc::clone(&node.migrations)));
    tasks.spawn(owners::watch(Arc::clone(&node)));
    tasks.spawn(retire::watch(Arc::clone(&node.disks)));
    tasks.spawn(images::uses::watch(Arc::clone(&node.images)));
    tasks.spawn(godwit_processes::incoming::partners::watch(Arc::clone(
        &node.processes,
    )));
    if let Some(tls) = tls {
        let context = Arc::clone(&node.context);
        let closed = async move { context.closed().await };
        tasks.spawn(godwit_peers::tls::renewal::watch(tls, reload, closed));
    }
    tasks.spawn(keep_blocking_thread(Arc::clone(&node.context)));
    tracing::info!(
        node = node.context.config.name,
        listen = %node.context.config.listen,
        data_dir = %node.context.config.data_dir.display(),
        disks = node.disks.all().len(),
        "the node runs"
    );
    notify::service_manager("READY=1");

    shutdown.await;
    notify::service_manager("STOPPING=1");
    warn_of_debts(&node);
    close(node, tasks, lock).await;
    Ok(())
}

/// Opens the store and builds the node, without its disks.
async fn open(config: NodeConfig, tls: Option<NodeTls>) -> Result<Arc<Node>, NodeError> {
    let path = config.store_path();
    let store = tokio::task::spawn_blocking(move || Store::open(&path))
        .await
        .map_err(|error| NodeError::Store(error.to_string()))?
        .map_err(|error| NodeError::Store(error.to_string()))?;
    let features = config.features();
    let context = Arc::new(Context::new(config, store, Dialer { tls, features }));
    let disks = Arc::new(Disks::new(Arc::clone(&context)));
    let images = Arc::new(Images::new(Arc::clone(&disks)));
    let migrations = Arc::new(Migrations::new(Arc::clone(&images)));
    let nics = Arc::new(NamedNics::new(Arc::clone(&context)));
    let vms = Arc::new(Vms::new(Arc::clone(&migrations), Arc::clone(&nics)));
    let processes = Arc::new(Processes::new(Arc::clone(&context)));
    let node = Arc::new(Node {
        started_at: clock::now_text(),
        context,
        disks,
        images,
        migrations,
        nics,
        vms,
        processes,
    });
    disk_users::connect(&node);
    Ok(node)
}

/// Warns of disks with a part only here, which wait for the node's next run.
fn warn_of_debts(node: &Node) {
    let mut owed = 0;
    for disk in node.disks.all() {
        let inner = disk.lock();
        if inner.record.owes().is_some() {
            owed += 1;
            let owner = inner.entry.moved_to.as_deref().unwrap_or("its owner");
            tracing::warn!(
                disk = disk.name,
                owner,
                "this node ends, and the disk's owner still needs a part of it from here: reads of that wait until this \
                 node runs again"
            );
        }
    }
    if owed > 0 {
        notify::service_manager(&format!(
            "STATUS=Ending, though other nodes still need parts of {owed} disks from here"
        ));
    }
}

/// Ends the node: refuses new work, finishes the work in flight, and makes all writes durable.
async fn close(node: Arc<Node>, mut tasks: JoinSet<()>, lock: DataDirLock) {
    tracing::info!(node = node.context.config.name, "the node is ending");
    node.context.close();
    let ended = async { while tasks.join_next().await.is_some() {} };
    if tokio::time::timeout(LISTENERS_END, ended).await.is_err() {
        tracing::warn!("some requests did not end in time");
        tasks.shutdown().await;
    }
    let mut engines = JoinSet::new();
    let waiting = node.vms.receiving();
    for disk in node.disks.all() {
        if waiting.contains(&disk.name) {
            run::abandon(&disk);
        } else {
            engines.spawn(async move { run::stop(&disk).await });
        }
    }
    engines.join_all().await;
    for socket in [
        node.context.config.api_socket(),
        node.context.config.nbd_socket(),
    ] {
        // A leftover socket does no harm: the next start replaces the socket.
        let _ = std::fs::remove_file(socket);
    }
    // A task that overwrites a part of a device for a new VM stops once the node closes. No other process acts for this
    // node until the end.
    while is_allocating() {
        tokio::time::sleep(ALLOCATIONS_POLL).await;
    }
    let store = node.context.store.clone();
    // The call only waits for writes in flight.
    let _ = tokio::task::spawn_blocking(move || store.close()).await;
    logging::tell_left_out();
    tracing::info!(node = node.context.config.name, "the node has ended");
    drop(node);
    drop(lock);
}

/// The node's listeners before they serve.
struct Listeners {
    peers: TcpListener,
    api: UnixListener,
    api_tls: Option<TcpListener>,
    nbd: UnixListener,
    nbd_tcp: Option<TcpListener>,
}

impl Listeners {
    /// Opens all listeners. Puts ports chosen by the system into the configuration.
    async fn open(config: &mut NodeConfig) -> Result<Self, NodeError> {
        let peers = tcp("other nodes", &mut config.listen).await?;
        let api_tls = match &mut config.api_listen {
            Some(address) => Some(tcp("API clients", address).await?),
            None => None,
        };
        let nbd_tcp = match &mut config.nbd_listen {
            Some(address) => Some(tcp("NBD clients", address).await?),
            None => None,
        };
        let api = data_dir::unix_listener("API clients", &config.api_socket())?;
        let nbd = data_dir::unix_listener("NBD clients", &config.nbd_socket())?;
        Ok(Self {
            peers,
            api,
            api_tls,
            nbd,
            nbd_tcp,
        })
    }

    /// Serves on all listeners until the node is closing.
    fn serve(self, node: &Arc<Node>, tls: Option<&NodeTls>, tasks: &mut JoinSet<()>) {
        let shared = || Arc::clone(node);
        tasks.spawn(listeners::peers::listen(shared(), self.peers, tls.cloned()));
        tasks.spawn(api::listen_unix(shared(), self.api));
        tasks.spawn(nbd::listen_unix(shared(), self.nbd));
        if let (Some(listener), Some(tls)) = (self.api_tls, tls) {
            tasks.spawn(api::listen_tls(shared(), listener, tls.clone()));
        }
        if let Some(listener) = self.nbd_tcp {
            let tls = tls.filter(|_| !node.context.config.nbd_plain).cloned();
            tasks.spawn(nbd::listen_tcp(shared(), listener, tls));
        }
    }
}

async fn tcp(
    what: &'static str,
    address: &mut std::net::SocketAddr,
) -> Result<TcpListener, NodeError> {
    let failed = |source| NodeError::Listen {
        what,
        address: address.to_string(),
        source,
    };
    let listener = TcpListener::bind(*address).await.map_err(failed)?;
    *address = listener.local_addr().map_err(failed)?;
    Ok(listener)
}
