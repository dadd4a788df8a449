//! The server's side of the NBD protocol, without I/O.
//!
//! A connection has two phases. In the first, [`Handshake`] is fed the client's bytes and names the next step: bytes to
//! send, a disk to look up, TLS to start. The first phase ends with [`Negotiated`]. In the second, the client sends a
//! [`RequestHeader`] per request (followed by the data of a write) and gets a [`ReplyHeader`] for each (followed by the
//! data of a read). The codecs of the second phase allocate nothing.
//!
//! Every byte of a client counts as hostile: lengths and counts are bounded before anything is stored, and no input
//! panics or overflows. Time limits are up to the caller.
//!
//! The server offers the fixed newstyle handshake, with `NBD_OPT_GO`, `INFO`, `EXPORT_NAME`, `LIST`, `ABORT`,
//! `STARTTLS`, `STRUCTURED_REPLY`, `LIST_META_CONTEXT` and `SET_META_CONTEXT` with the context `base:allocation`; every
//! other option is answered with `NBD_REP_ERR_UNSUP`.

mod constants;
mod errno;
mod handshake;
mod transmission;

#[cfg(test)]
mod tests;

pub use constants::{MAX_PAYLOAD, MAX_STRING, PREFERRED_BLOCK_SIZE};
pub use errno::Errno;
pub use handshake::{
    ExportInfo, ExportRefusal, Handshake, HandshakeConfig, HandshakeError, HandshakeStep,
    Negotiated, TlsPolicy,
};
pub use transmission::{
    Allocation, Command, Extents, InvalidRequest, REQUEST_HEADER_SIZE, ReplyHeader, RequestHeader,
    block_status,
};
