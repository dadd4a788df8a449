//! The transport of a VM's memory between the nodes: from QEMU's unix socket into a connection between nodes, and from
//! there into the other QEMU's unix socket.

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

use crate::vms::Vms;
use crate::vms::incoming::arrival::DestinationLink;
use crate::vms::lifecycle::run;
use crate::vms::messages::Order;
use crate::vms::stream_keeper::StreamKeeper;
use crate::vms::vm::Vm;
use godwit_api::{ErrorBody, ErrorCode};
use godwit_peers::config::PeerConfig;
use godwit_peers::{PeerConnection, greeting};

/// Bytes buffered in each direction.
const BUFFER: usize = 1 << 20;

/// Longest wait for QEMU to connect once told to.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Incoming VMs that wait for their memory.
#[derive(Debug, Default)]
pub struct MemoryDoors {
    by_migration: Mutex<HashMap<MigrationId, Door>>,
}

#[derive(Debug)]
struct Door {
    peer: String,
    connections: mpsc::Sender<PeerConnection>,
    returns: mpsc::Sender<Return>,
}

/// The source's new control connection, with its first order.
pub(crate) type Return = (DestinationLink, Order);

impl MemoryDoors {
    /// Returns the receiver of the connections of a move, if `hello` is from the node that offered the VM.
    ///
    /// # Errors
    /// [`RefusalCode::Unknown`] if no VM waits for the connection.
    pub fn find(&self, hello: &Hello) -> Result<mpsc::Sender<PeerConnection>, Refusal> {
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

    /// Returns the receiver of new control connections of a move's source.
    pub(crate) fn returns(&self, hello: &Hello) -> Option<mpsc::Sender<Return>> {
        let doors = self.lock();
        let door = doors.get(&hello.migration)?;
        (door.peer == hello.node).then(|| door.returns.clone())
    }

    /// Opens a door for the memory of a move, until the returned door is dropped.
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

    /// Returns the number of this peer's VMs that wait for their memory.
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

/// The door of a VM that waits for its memory.
#[derive(Debug)]
pub(crate) struct OpenDoor<'a> {
    doors: &'a MemoryDoors,
    migration: MigrationId,
    /// The connections of the move.
    pub arrivals: mpsc::Receiver<PeerConnection>,
    /// The source's new control connections.
    pub(crate) returned: mpsc::Receiver<Return>,
}

impl Drop for OpenDoor<'_> {
    fn drop(&mut self) {
        self.doors.lock().remove(&self.migration);
    }
}

/// Source: connects to the destination's QEMU that waits for this VM's memory. Returns the socket for the QEMU here,
/// and the carrying task.
///
/// # Errors
/// The socket cannot be made, or the other node is unreachable or refuses.
pub(crate) async fn lead(
    vms: &Vms,
    vm: &Vm,
    peer: &PeerConfig,
    id: MigrationId,
) -> Result<(PathBuf, AbortHandle), ErrorBody> {
    let socket = vm.places.outgoing();
    run::make_folder(vms, &vm.name, vm.places.clone()).await?;
    // The socket of an earlier attempt would be in the way.
    let _ = std::fs::remove_file(&socket);
    let attempted = format!("send the memory of VM {}", vm.name);
    let user = vms.context.config.qemu_user.as_ref();
    let listener = UnixListener::bind(&socket)
        .and_then(|listener| {
            user.map_or(Ok(()), |user| user.own(&socket))?;
            Ok(listener)
        })
        .map_err(|error| {
            let text = format!("cannot {attempted}: {}: {error}", socket.display());
            ErrorBody::new(ErrorCode::Internal, text)
        })?;
    let name = &vms.context.config.name;
    let hello = greeting::hello(name, &vm.name, TrafficClass::Copy, Purpose::Machine, id);
    let dialled = vms.context.dialer.dial(peer, hello).await;
    let (connection, _) = dialled.map_err(|error| error.into_body(&peer.name, &attempted))?;
    let (vm, has_nics) = (vm.name.clone(), !vm.lock().nics.is_empty());
    let carrying = godwit_context::spawn(async move {
        if let Err(error) = send(listener, connection, has_nics).await {
            tracing::info!(vm, %error, "the memory's connection ended");
        }
    });
    Ok((socket, carrying.abort_handle()))
}

/// Source: accepts QEMU's connection and carries its bytes to the other node, until both sides are done.
///
/// # Errors
/// QEMU does not connect, or one of the connections fails.
async fn send(listener: UnixListener, mut peer: PeerConnection, has_nics: bool) -> io::Result<()> {
    let accepted = tokio::time::timeout(CONNECT_TIMEOUT, listener.accept()).await;
    let (mut qemu, _) = accepted.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
    drop(listener);
    let keeper = has_nics.then(|| StreamKeeper::start(&qemu));
    if let Some(Err(error)) = &keeper {
        // The failure matters only if this node is killed within the next moments.
        tracing::warn!(%error, "no process keeps the connection of QEMU's migration");
    }
    let carried = carry(&mut qemu, &mut peer).await;
    // The node lives, so QEMU may see the end at once, even while the keeper holds the connection.
    let _ = rustix::net::shutdown(&qemu, rustix::net::Shutdown::Both);
    carried
}

/// Destination: carries the other node's bytes into the QEMU that waits at `socket`.
///
/// # Errors
/// QEMU accepts no connection, or one of the connections fails.
pub async fn receive(mut peer: PeerConnection, socket: &Path) -> io::Result<()> {
    let mut qemu = UnixStream::connect(socket).await?;
    carry(&mut qemu, &mut peer).await
}

async fn carry(
    qemu: &mut (impl AsyncRead + AsyncWrite + Unpin),
    peer: &mut PeerConnection,
) -> io::Result<()> {
    let copied = tokio::io::copy_bidirectional_with_sizes(qemu, peer, BUFFER, BUFFER).await;
    // The side that ended first must not keep the other waiting.
    let _ = qemu.shutdown().await;
    let _ = peer.shutdown().await;
    copied.map(drop)
}
