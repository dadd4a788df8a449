//! Established byte streams for an engine.

use std::any::Any;
use std::net::TcpStream;
use std::os::fd::OwnedFd;

use godwit_io::tls::Session;

/// A connection to another node, after the TLS handshake and the greetings.
#[derive(Debug)]
pub struct PeerStream {
    /// Connected socket. The engine sets its options and makes the socket blocking.
    pub socket: TcpStream,
    /// TLS session with a complete handshake; `None` for a plain connection.
    pub tls: Option<Session>,
}

/// The connections of one migration.
#[derive(Debug)]
pub struct PeerStreams {
    /// Name of the other node, which links a migration's sync connection with later forwarding connections of the same
    /// node.
    pub peer: String,
    /// Connection for the authority protocol and heartbeats.
    pub control: PeerStream,
    /// Connection for double writes, and for forwarded I/O after switchover.
    pub sync: PeerStream,
    /// Connections for bulk copies and verification; at least one.
    pub copies: Vec<PeerStream>,
    /// True if the other node accepts compressed data.
    pub compression: bool,
}

/// An NBD client in the transmission phase.
#[derive(Debug)]
pub struct ClientStream {
    /// Connected socket, TCP or unix. The engine sets its options and makes the socket blocking.
    pub socket: OwnedFd,
    /// TLS session with a complete handshake; `None` for a plain connection.
    pub tls: Option<Session>,
    /// Plaintext read past the handshake and not consumed.
    pub received: Vec<u8>,
    /// True if structured replies were negotiated.
    pub structured_replies: bool,
    /// True if the client selected `base:allocation`.
    pub base_allocation: bool,
    /// Address of the client, for logs.
    pub address: String,
    /// Dropped once the engine has closed the connection.
    pub place: Option<Box<dyn Any + Send>>,
}
