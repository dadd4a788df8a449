//! Connections between nodes: authentication, and the messages before an engine takes over.

pub(crate) mod dial;
pub(crate) mod framed;
pub(crate) mod greeting;
pub(crate) mod health;
pub(crate) mod open;
pub(crate) mod renewal;
pub(crate) mod tls;
mod validity;

use std::time::Duration;

use godwit_block::engine::PeerStream;
use godwit_core::wire::{Features, TrafficClass};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

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
