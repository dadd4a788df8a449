//! Carries the memory of a VM between the nodes: from QEMU's unix socket into a connection between
//! nodes, and out of it into the other QEMU's unix socket.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use godwit_core::units::MigrationId;
use godwit_core::wire::{Hello, Purpose, Refusal, RefusalCode, TrafficClass};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use crate::config::PeerConfig;
use crate::node::Node;
use crate::peers::{PeerConnection, greeting};
use crate::vms::incoming::arrival::DestinationLink;
use crate::vms::lifecycle::run;
use crate::vms::messages::Order;
use crate::vms::stream_keeper::StreamKeeper;
use crate::vms::vm::Vm;
use godwit_api::{ErrorBody, ErrorCode};

/// Bytes that are on their way in each direction inside this process.
const BUFFER: usize = 1 << 20;

/// How long QEMU may take to connect once it was told to.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Incoming VMs that wait for their memory.
#[derive(Debug, Default)]
pub(crate) struct MemoryDoors {
    by_migration: Mutex<HashMap<MigrationId, Door>>,
}

#[derive(Debug)]
struct Door {
    peer: String,
    connections: mpsc::Sender<PeerConnection>,
    returns: mpsc::Sender<Return>,
}

/// The source's new control connection, and the order that came with it.
pub(crate) type Return = (DestinationLink, Order);

impl MemoryDoors {
    /// Where a connection of this move goes, if `hello` is from the node that offered the VM.
    ///
    /// # Errors
    /// [`RefusalCode::Unknown`] when no VM waits for it.
    pub(crate) fn find(&self, hello: &Hello) -> Result<mpsc::Sender<PeerConnection>, Refusal> {
        self.lock()
            .get(&hello.migration)
            .filter(|door| door.peer == hello.node)
            .map(|door| door.connections.clone())
            .ok_or_else(|| Refusal {
                code: RefusalCode::Unknown,
                text: format!(
                    "no VM waits for the memory of migration {}",
                    hello.migration
                ),
            })
    }

    /// Where the source of this move goes that lost its control connection.
    pub(crate) fn returns(&self, hello: &Hello) -> Option<mpsc::Sender<Return>> {
        let doors = self.lock();
        let door = doors.get(&hello.migration)?;
        (door.peer == hello.node).then(|| door.returns.clone())
    }

    /// Waits for the memory of a move. It ends with the returned door.
    pub(crate) fn open(&self, migration: MigrationId, peer: &str) -> OpenDoor<'_> {
        let (connections, arrivals) = mpsc::channel(1);
        let (returns, returned) = mpsc::channel(1);
        let door = Door {
            peer: peer.to_owned(),
            connections,
            returns,
        };
        self.lock().insert(migration, door);
        OpenDoor {
            doors: self,
            migration,
            arrivals,
            returned,
        }
    }

    /// How many VMs of this peer wait for their memory.
    pub(crate) fn open_for(&self, peer: &str) -> usize {
        let doors = self.lock();
        doors.values().filter(|door| door.peer == peer).count()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<MigrationId, Door>> {
        self.by_migration
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// A VM that waits for its memory.
#[derive(Debug)]
pub(crate) struct OpenDoor<'a> {
    doors: &'a MemoryDoors,
    migration: MigrationId,
    /// The connections of the move.
    pub(crate) arrivals: mpsc::Receiver<PeerConnection>,
    /// New control connections of its source.
    pub(crate) returned: mpsc::Receiver<Return>,
}

impl Drop for OpenDoor<'_> {
    fn drop(&mut self) {
        self.doors.lock().remove(&self.migration);
    }
}

/// Source: connects to the destination's QEMU that waits for this VM's memory. Gives the socket for
/// QEMU here, and the task that carries what comes there.
///
/// # Errors
/// The socket cannot be made, or the other node cannot be reached or refuses.
pub(crate) async fn lead(
    node: &Node,
    vm: &Vm,
    peer: &PeerConfig,
    id: MigrationId,
) -> Result<(PathBuf, AbortHandle), ErrorBody> {
    let socket = vm.places.outgoing();
    run::make_folder(node, &vm.name, vm.places.clone()).await?;
    // One that an earlier attempt left would be in the way.
    let _ = std::fs::remove_file(&socket);
    let attempted = format!("send the memory of VM {}", vm.name);
    let user = node.config.qemu_user.as_ref();
    let listener = UnixListener::bind(&socket)
        .and_then(|listener| {
            user.map_or(Ok(()), |user| user.own(&socket))?;
            Ok(listener)
        })
        .map_err(|error| {
            let text = format!("cannot {attempted}: {}: {error}", socket.display());
            ErrorBody::new(ErrorCode::Internal, text)
        })?;
    let name = &node.config.name;
    let hello = greeting::hello(name, &vm.name, TrafficClass::Copy, Purpose::Machine, id);
    let dialled = node.dialer.dial(peer, hello).await;
    let (connection, _) = dialled.map_err(|error| error.into_body(&peer.name, &attempted))?;
    let (vm, has_nics) = (vm.name.clone(), !vm.lock().nics.is_empty());
    let carrying = tokio::spawn(async move {
        if let Err(error) = send(listener, connection, has_nics).await {
            tracing::info!(vm, %error, "the memory's connection ended");
        }
    });
    Ok((socket, carrying.abort_handle()))
}

/// Source: takes QEMU's connection and carries what comes to the other node, until both are done.
///
/// # Errors
/// QEMU does not connect, or one of the connections fails.
async fn send(listener: UnixListener, mut peer: PeerConnection, has_nics: bool) -> io::Result<()> {
    let accepted = tokio::time::timeout(CONNECT_TIMEOUT, listener.accept()).await;
    let (mut qemu, _) = accepted.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
    drop(listener);
    let keeper = has_nics.then(|| StreamKeeper::start(&qemu));
    if let Some(Err(error)) = &keeper {
        // It matters only if this node is killed within the next moments.
        tracing::warn!(%error, "no process keeps the connection of QEMU's migration");
    }
    let carried = carry(&mut qemu, &mut peer).await;
    // The node lives, so QEMU may know at once, whoever else holds the connection.
    let _ = rustix::net::shutdown(&qemu, rustix::net::Shutdown::Both);
    carried
}

/// Destination: carries what comes from the other node into the QEMU that waits at `socket`.
///
/// # Errors
/// QEMU does not take connections, or one of the connections fails.
pub(crate) async fn receive(mut peer: PeerConnection, socket: &Path) -> io::Result<()> {
    let mut qemu = UnixStream::connect(socket).await?;
    carry(&mut qemu, &mut peer).await
}

async fn carry(
    qemu: &mut (impl AsyncRead + AsyncWrite + Unpin),
    peer: &mut PeerConnection,
) -> io::Result<()> {
    let copied = tokio::io::copy_bidirectional_with_sizes(qemu, peer, BUFFER, BUFFER).await;
    // Whichever ended first, the other must not wait for it.
    let _ = qemu.shutdown().await;
    let _ = peer.shutdown().await;
    copied.map(drop)
}
