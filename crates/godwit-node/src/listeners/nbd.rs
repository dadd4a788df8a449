//! Accepts NBD clients: performs the handshake and hands the connection to the disk's engine.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use godwit_block::engine::{ClientStream, EngineHandle};
use godwit_block::nbd::{
    ExportInfo, ExportRefusal, Handshake, HandshakeConfig, HandshakeError, HandshakeStep,
    Negotiated, TlsPolicy,
};
use godwit_core::units::Sectors;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio_rustls::TlsAcceptor;

use crate::listeners::cannot_take;
use crate::listeners::handshake_slots::HandshakeSlots;
use crate::node::Node;
use godwit_api::DiskState;
use godwit_disks::disks::client_places::Place;
use godwit_disks::disks::disk::Activity;
use godwit_peers::open::SocketNumber;
use godwit_peers::roles::Holder;
use godwit_peers::tls::NodeTls;
use godwit_peers::transport::Transport;
use godwit_peers::transport::secure::SecureStream;

/// Unfinished handshakes, at most, per listener.
const MAX_HANDSHAKES: usize = 128;

/// Longest handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// The reason for a client's failure to reach the transmission phase.
#[derive(Debug, thiserror::Error)]
enum ClientError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    #[error("the handshake took longer than {} seconds", HANDSHAKE_TIMEOUT.as_secs())]
    Timeout,
    #[error("the client left")]
    Left,
}

/// A socket of an NBD client.
trait ClientSocket: AsyncRead + AsyncWrite + AsFd + Unpin + Send + Sized + 'static {
    /// Returns the socket in blocking mode.
    fn into_fd(self) -> io::Result<OwnedFd>;
}

impl ClientSocket for TcpStream {
    fn into_fd(self) -> io::Result<OwnedFd> {
        let socket = self.into_std()?;
        socket.set_nonblocking(false)?;
        Ok(socket.into())
    }
}

impl ClientSocket for UnixStream {
    fn into_fd(self) -> io::Result<OwnedFd> {
        let socket = self.into_std()?;
        socket.set_nonblocking(false)?;
        Ok(socket.into())
    }
}

/// Accepts clients on the unix socket until the node is closing.
pub(crate) async fn listen_unix(node: Arc<Node>, listener: UnixListener) {
    let slots = HandshakeSlots::new(MAX_HANDSHAKES);
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((socket, _)) => take(&node, &slots, socket, String::from("unix socket"), None),
                Err(error) => cannot_take("an NBD client", &error).await,
            },
            () = node.context.closed() => return,
        }
    }
}

/// Accepts clients over TCP until the node is closing; with `tls`, clients must use TLS.
pub(crate) async fn listen_tcp(node: Arc<Node>, listener: TcpListener, tls: Option<NodeTls>) {
    let slots = HandshakeSlots::new(MAX_HANDSHAKES);
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((socket, address)) => {
                    // Replies are small; a failure here only costs speed.
                    let _ = socket.set_nodelay(true);
                    take(&node, &slots, socket, address.to_string(), tls.clone());
                }
                Err(error) => cannot_take("an NBD client", &error).await,
            },
            () = node.context.closed() => return,
        }
    }
}

fn take<S: ClientSocket>(
    node: &Arc<Node>,
    slots: &Arc<HandshakeSlots>,
    socket: S,
    address: String,
    tls: Option<NodeTls>,
) {
    let node = Arc::clone(node);
    slots.spawn(async move {
        let serving = serve(&node, socket, &address, tls);
        let result = tokio::time::timeout(HANDSHAKE_TIMEOUT, serving)
            .await
            .unwrap_or(Err(ClientError::Timeout));
        if let Err(error) = result {
            tracing::debug!(address, %error, "an NBD client was turned away");
        }
    });
}

async fn serve<S: ClientSocket>(
    node: &Arc<Node>,
    socket: S,
    address: &str,
    tls: Option<NodeTls>,
) -> Result<(), ClientError> {
    let number = SocketNumber::of(&socket);
    let mut connection = Transport::Plain(socket);
    let policy = if tls.is_some() {
        TlsPolicy::Required
    } else {
        TlsPolicy::Off
    };
    let mut handshake = Handshake::new(HandshakeConfig::new(policy));
    let mut buffer = [0; 4096];
    let (mut engine, mut holder) = (None, None);
    let negotiated = loop {
        match handshake.poll() {
            HandshakeStep::Receive => match connection.read(&mut buffer).await? {
                0 => return Err(ClientError::Left),
                count => handshake.receive(&buffer[..count]),
            },
            HandshakeStep::Send(bytes) => {
                connection.write_all(&bytes).await?;
                connection.flush().await?;
            }
            HandshakeStep::NeedExport { name, enters } => {
                let allowed = may_attach(holder.as_ref(), &name);
                if let Err(ExportRefusal::Policy(why)) = &allowed {
                    tracing::warn!(disk = name, address, why, "refused an NBD client");
                }
                let found = allowed.and_then(|()| export(node, &name, enters));
                handshake.export(found.map(|(found, info, place)| {
                    engine = Some((found, place));
                    info
                }))
            }
            HandshakeStep::List => {
                let may = |name: &String| may_attach(holder.as_ref(), name).is_ok();
                handshake.list(names(node).into_iter().filter(may))
            }
            HandshakeStep::StartTls => {
                connection = start_tls(connection, tls.as_ref()).await?;
                if let Some(tls) = &tls {
                    tls.opened(number, connection.certificates())?;
                }
                holder = tls
                    .as_ref()
                    .map(|tls| tls.holder(connection.certificates()));
                handshake.tls_done();
            }
            HandshakeStep::Done(negotiated) => break negotiated,
            HandshakeStep::Aborted => return Err(ClientError::Left),
            HandshakeStep::Failed(error) => return Err(error.into()),
        }
    };
    let Some((engine, place)) = engine else {
        return Err(ClientError::Left);
    };
    tracing::info!(disk = negotiated.export, address, "an NBD client attached");
    attach(&engine, connection, negotiated, address, place)?;
    Ok(())
}

fn attach<S: ClientSocket>(
    engine: &EngineHandle,
    connection: Transport<S>,
    negotiated: Negotiated,
    address: &str,
    place: Option<Place>,
) -> io::Result<()> {
    let (socket, tls) = connection.into_parts();
    engine.attach(ClientStream {
        socket: socket.into_fd()?,
        tls,
        received: negotiated.leftover,
        structured_replies: negotiated.structured_replies,
        base_allocation: negotiated.base_allocation,
        address: address.to_owned(),
        place: place.map(|place| Box::new(place) as _),
    });
    Ok(())
}

async fn start_tls<S: ClientSocket>(
    connection: Transport<S>,
    tls: Option<&NodeTls>,
) -> io::Result<Transport<S>> {
    let (Transport::Plain(socket), Some(tls)) = (connection, tls) else {
        return Err(io::ErrorKind::InvalidData.into());
    };
    let (socket, session) = TlsAcceptor::from(Arc::clone(&tls.current().server))
        .accept(socket)
        .await?
        .into_inner();
    let stream = SecureStream::library(socket, session.into())?;
    Ok(Transport::Tls(Box::new(stream)))
}

/// Refuses a client that may not attach a disk: over TLS the certificate decides. Runs before any fact about the disk
/// is disclosed.
fn may_attach(holder: Option<&Holder>, disk: &str) -> Result<(), ExportRefusal> {
    match holder {
        Some(holder) if !holder.may_attach(disk) => Err(ExportRefusal::Policy(format!(
            "the certificate of {holder} does not allow to attach disk {disk}: use one that \
             'godwit certs issue NAME --role nbd-client' made"
        ))),
        _ => Ok(()),
    }
}

/// Returns the names of the disks that clients can attach now.
fn names(node: &Arc<Node>) -> Vec<String> {
    let serving = |disk: &godwit_disks::disks::disk::Disk| {
        let inner = disk.lock();
        inner.engine.is_some() && inner.state() == DiskState::Serving
    };
    node.disks
        .all()
        .iter()
        .filter(|disk| serving(disk))
        .map(|disk| disk.name.clone())
        .collect()
}

/// Returns the disk that a client asks for, unless refused; with a place at the disk if the client `enters`.
fn export(
    node: &Arc<Node>,
    name: &str,
    enters: bool,
) -> Result<(EngineHandle, ExportInfo, Option<Place>), ExportRefusal> {
    if node.context.is_closing() {
        let text = format!("node '{}' is shutting down", node.context.config.name);
        return Err(ExportRefusal::Shutdown(text));
    }
    let disk = node.disks.find(name).ok_or_else(|| {
        let shown: String = name.chars().take(128).collect();
        ExportRefusal::Unknown(format!(
            "node '{}' has no disk named {shown:?}: see 'godwit disk list'",
            node.context.config.name
        ))
    })?;
    let inner = disk.lock();
    let state = inner.state();
    let other = inner
        .entry
        .counterpart
        .as_deref()
        .unwrap_or("the other node");
    let refusal = match (state, inner.activity, &inner.engine) {
        (DiskState::Serving, Activity::Idle | Activity::Outgoing(_), Some(engine)) => {
            let most = node.context.config.nbd_connections;
            let place = disk.places.take(most);
            if let Some(place) = place {
                let info = ExportInfo {
                    capacity: Sectors(inner.entry.sectors),
                };
                let place = enters.then_some(place);
                return Ok((engine.handle.clone(), info, place));
            }
            format!(
                "disk {name} has {} NBD connections at node '{}', which allows {most} \
                 (--nbd-connections): detach one",
                disk.places.taken(),
                node.context.config.name
            )
        }
        (DiskState::Serving, Activity::Idle | Activity::Outgoing(_), None) => format!(
            "disk {name} is not served: {}",
            inner
                .problem
                .as_deref()
                .unwrap_or("it is starting or ending")
        ),
        (DiskState::Serving, activity, _) => {
            format!(
                "disk {name} is {}: try again when that is done",
                activity.describe()
            )
        }
        (DiskState::Receiving, ..) => {
            format!("disk {name} is being received: node '{other}' serves it until that is done")
        }
        (DiskState::Accepted | DiskState::Relinquished, ..) => format!(
            "disk {name} is in doubt: it is not known whether this node or node '{other}' owns it; \
             node '{other}' is being asked"
        ),
        (DiskState::Departed, ..) => match &inner.entry.moved_to {
            Some(owner) => format!("disk {name} moved to node '{owner}': attach it there"),
            None => format!("disk {name} is not served here: see 'godwit disk show {name}'"),
        },
        (DiskState::Outdated, ..) => format!(
            "disk {name} is held here, because another node has had it since: see 'godwit disk show {name}'"
        ),
        (DiskState::Importing, ..) => format!("disk {name} is being made: try again shortly"),
        (DiskState::Failed, ..) => format!(
            "disk {name} cannot be used: {}",
            inner
                .problem
                .as_deref()
                .unwrap_or("the thread that served it has ended")
        ),
    };
    Err(ExportRefusal::Policy(refusal))
}
