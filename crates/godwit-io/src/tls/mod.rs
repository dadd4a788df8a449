//! TLS sessions without I/O of their own: ciphertext in, plaintext out, and the reverse.
//!
//! Clients of disks are served with rustls' own sessions. Between nodes, where whole disks pass, rustls does the
//! handshake and holds the secrets, and [`records`] does the rest. [`records`] encrypts out of a chunk's buffer and
//! decrypts into its final buffer, each byte once.

mod handshake;
mod keys;
mod records;
mod session;
#[cfg(test)]
mod tests;

pub use self::handshake::Handshake;
pub use self::session::INCOMING;
pub use self::session::Session;

/// The reason for the end of a session.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The other side closed the session.
    #[error("the TLS session was closed by the other side")]
    Closed,
    /// The other side sent data that TLS does not allow, or reported such data from this side.
    #[error(transparent)]
    Session(#[from] rustls::Error),
    /// No memory is left for the session's buffers.
    #[error("no memory for a TLS session: {0}")]
    Memory(std::io::Error),
}
