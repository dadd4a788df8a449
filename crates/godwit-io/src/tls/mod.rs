//! TLS sessions without I/O of their own: ciphertext in, plaintext out, and the reverse.
//!
//! Clients of disks are served with rustls' own sessions. Between nodes, where whole disks pass,
//! rustls does the handshake and holds the secrets, and [`records`] does the rest: it encrypts out of
//! the buffer where a chunk lies and decrypts into the one where it belongs, each byte once.

mod handshake;
mod keys;
mod records;
mod session;
#[cfg(test)]
mod tests;

pub use self::handshake::Handshake;
pub use self::session::INCOMING;
pub use self::session::Session;

/// Why a session ended.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The other side closed it.
    #[error("the TLS session was closed by the other side")]
    Closed,
    /// What came is not what TLS allows, or the other side said so of what this one sent.
    #[error(transparent)]
    Session(#[from] rustls::Error),
    /// No memory is left for its buffers.
    #[error("no memory for a TLS session: {0}")]
    Memory(std::io::Error),
}
