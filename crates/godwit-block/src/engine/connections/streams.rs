//! Established byte streams that are handed to an engine.

use std::any::Any;
use std::net::TcpStream;
use std::os::fd::OwnedFd;

use godwit_io::tls::Session;

/// A connection to another node, after the TLS handshake and the greetings.
#[derive(Debug)]
pub struct PeerStream {
    /// The socket. The engine sets its options and makes it blocking.
    pub socket: TcpStream,
    /// The TLS session, its handshake complete; `None` for a plain connection.
    pub tls: Option<Session>,
}

/// The connections of one migration.
#[derive(Debug)]
pub struct PeerStreams {
    /// The other node's name: it links a migration's sync connection with later forwarding
    /// connections of the same node.
    pub peer: String,
    /// The authority protocol and heartbeats.
    pub control: PeerStream,
    /// Double writes, and forwarded I/O after switchover.
    pub sync: PeerStream,
    /// Bulk copies and verification; at least one.
    pub copies: Vec<PeerStream>,
    /// Whether the other node takes data compressed.
    pub compression: bool,
}

/// An NBD client in the transmission phase.
#[derive(Debug)]
pub struct ClientStream {
    /// The socket, TCP or unix. The engine sets its options and makes it blocking.
    pub socket: OwnedFd,
    /// The TLS session, its handshake complete; `None` for a plain connection.
    pub tls: Option<Session>,
    /// Plaintext that was read past the handshake and not consumed.
    pub received: Vec<u8>,
    /// Whether structured replies were negotiated.
    pub structured_replies: bool,
    /// Whether the client selected `base:allocation`.
    pub base_allocation: bool,
    /// Who it is, for logs.
    pub address: String,
    /// Dropped once the engine has closed the connection.
    pub place: Option<Box<dyn Any + Send>>,
}
