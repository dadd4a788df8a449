//! Connections between nodes: authentication, and the messages before an engine takes over.

pub mod certificates;
pub mod clock;
pub mod config;
pub mod dial;
pub mod framed;
pub mod greeting;
pub mod health;
pub mod names;
pub mod open;
pub mod roles;
pub mod tls;
pub mod transport;

use std::time::Duration;

use godwit_block::engine::PeerStream;
use godwit_core::wire::{Features, TrafficClass};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use crate::transport::Transport;

/// Longest wait for each step of a greeting.
pub const GREETING_TIMEOUT: Duration = Duration::from_secs(5);

/// An open connection to another node, before an engine takes over.
pub type PeerConnection = Transport<TcpStream>;

/// Returns the connection as used after its welcome. The opener speaks first, so no data is under way.
///
/// # Errors
/// Unexpected data has arrived.
pub fn after_welcome(
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
pub async fn into_stream(mut connection: PeerConnection) -> std::io::Result<PeerStream> {
    connection.flush().await?;
    let (socket, tls) = connection.into_parts();
    let socket = socket.into_std()?;
    socket.set_nonblocking(false)?;
    Ok(PeerStream { socket, tls })
}
