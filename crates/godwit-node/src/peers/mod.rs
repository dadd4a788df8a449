//! Connections between nodes: authentication, and the messages before an engine takes over.

pub(crate) mod dial;
pub(crate) mod framed;
pub(crate) mod greeting;
pub(crate) mod open;
pub(crate) mod probe;
pub(crate) mod renewal;
pub(crate) mod tls;
mod validity;

use std::time::Duration;

use godwit_block::engine::PeerStream;
use godwit_core::units::MigrationId;
use godwit_core::wire::{Features, Purpose, TrafficClass};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use crate::config::PeerConfig;
use crate::node::Node;
use crate::transport::Transport;

/// Longest wait for each step of a greeting.
pub(crate) const GREETING_TIMEOUT: Duration = Duration::from_secs(5);

/// An open connection to another node, before an engine takes over.
pub(crate) type PeerConnection = Transport<TcpStream>;

/// Returns the connection as used after its welcome. The opener speaks first, so no data is under way.
///
/// # Errors
/// Unexpected data has arrived.
pub(crate) fn after_welcome(
    connection: PeerConnection,
    class: TrafficClass,
    agreed: Features,
) -> std::io::Result<PeerConnection> {
    match class {
        TrafficClass::Sync | TrafficClass::Copy | TrafficClass::Pull
            if agreed.contain(Features::CLEAR_DATA) =>
        {
            connection.into_clear()
        }
        _ => Ok(connection),
    }
}

/// Hands a connection over to an engine. The socket becomes blocking.
///
/// # Errors
/// The connection failed meanwhile.
pub(crate) async fn into_stream(mut connection: PeerConnection) -> std::io::Result<PeerStream> {
    connection.flush().await?;
    let (socket, tls) = connection.into_parts();
    let socket = socket.into_std()?;
    socket.set_nonblocking(false)?;
    Ok(PeerStream { socket, tls })
}

/// Opens one connection about a disk to another node, for the disk's engine.
///
/// # Errors
/// Text for the log: the peer cannot be reached, or refused.
pub(crate) async fn open_for(
    node: &Node,
    disk: &str,
    peer: &PeerConfig,
    (class, purpose): (TrafficClass, Purpose),
    migration: MigrationId,
) -> Result<PeerStream, String> {
    let hello = greeting::hello(&node.config.name, disk, class, purpose, migration);
    let dialled = node.dialer.dial(peer, hello).await;
    let (connection, _) = dialled.map_err(|error| error.to_string())?;
    into_stream(connection)
        .await
        .map_err(|error| error.to_string())
}
