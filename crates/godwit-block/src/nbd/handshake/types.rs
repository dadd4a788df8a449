//! The types between a handshake and its caller.

use godwit_core::units::Sectors;

/// The need for TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsPolicy {
    /// No TLS here: `NBD_OPT_STARTTLS` is refused.
    Off,
    /// TLS before anything else: until TLS is up, every option but `NBD_OPT_STARTTLS` and `NBD_OPT_ABORT` is refused.
    Required,
}

/// The limits of a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandshakeConfig {
    /// Need for TLS.
    pub tls: TlsPolicy,
    /// Most options of a client before the transmission phase.
    pub max_options: u32,
    /// Longest data of one option in bytes. `NBD_OPT_GO` takes up to 4 KiB of name, 6 bytes, and 2 bytes for each
    /// requested kind of information.
    pub max_option_length: u32,
}

impl HandshakeConfig {
    /// Returns the usual bounds: 256 options of 16 KiB.
    pub const fn new(tls: TlsPolicy) -> Self {
        Self {
            tls,
            max_options: 256,
            max_option_length: 16 << 10,
        }
    }
}

/// The caller's next step; see [`Handshake::poll`](super::Handshake::poll).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HandshakeStep {
    /// Read from the client, and pass the bytes to [`Handshake::receive`](super::Handshake::receive).
    Receive,
    /// Send these bytes to the client.
    Send(Vec<u8>),
    /// The client asks for this export, or about it: answer with [`Handshake::export`](super::Handshake::export).
    NeedExport {
        /// Name of the export: at most 4096 bytes of any UTF-8 but NUL; empty for the default export.
        name: String,
        /// True if the transmission phase begins with the export; false if the client only asks about the export.
        enters: bool,
    },
    /// The client asks for the names of the exports: answer with [`Handshake::list`](super::Handshake::list).
    List,
    /// The client waits for the TLS handshake on this connection: perform the handshake, then call
    /// [`Handshake::tls_done`](super::Handshake::tls_done).
    StartTls,
    /// The transmission phase begins.
    Done(Negotiated),
    /// The client leaves: close the connection.
    Aborted,
    /// The handshake cannot succeed: close the connection.
    Failed(HandshakeError),
}

/// The agreement of client and server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Negotiated {
    /// Export that the client asked for.
    pub export: String,
    /// Facts of the export that the client was told.
    pub info: ExportInfo,
    /// True if reads are to be answered with structured replies.
    pub structured_replies: bool,
    /// True if the client may ask for allocated ranges, having selected `base:allocation` for this export.
    pub base_allocation: bool,
    /// First bytes of the transmission phase, received with the last bytes of the handshake.
    pub leftover: Vec<u8>,
}

/// The facts of an export for a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportInfo {
    /// Size of the export.
    pub capacity: Sectors,
}

/// The reason for refusing an export. The client's program shows the text, which gives the remedy, in at most 4096
/// bytes (more is cut off).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExportRefusal {
    /// No export has this name.
    Unknown(String),
    /// The export exists and is not available now, such as a disk whose owner is in doubt.
    Policy(String),
    /// The server is about to end.
    Shutdown(String),
}

/// The reason for a failed handshake.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeError {
    /// The client requests protocol features that were not offered.
    #[error("the NBD client set unknown handshake flags {0:#010x}")]
    ClientFlags(u32),
    /// The bytes do not start an option.
    #[error("the client sent something else than an NBD option")]
    OptionMagic,
    /// An option's data is too long.
    #[error(
        "the NBD client sent {length} bytes with option {option}, more than the {limit} allowed"
    )]
    OptionTooLong {
        /// Number of the option.
        option: u32,
        /// Length of the option's data in bytes.
        length: u32,
        /// Longest length allowed.
        limit: u32,
    },
    /// There were too many options.
    #[error("the NBD client sent more than {0} options without choosing an export")]
    TooManyOptions(u32),
    /// A client of the old handshake sent an option of the fixed one.
    #[error("the NBD client sent option {0} without the fixed newstyle handshake")]
    NotFixedNewstyle(u32),
    /// `NBD_OPT_EXPORT_NAME` was refused, which the client cannot be told.
    #[error("the NBD client was refused the export it asked for by NBD_OPT_EXPORT_NAME: {0}")]
    ExportRefused(String),
    /// More bytes came in the clear after the client asked for TLS. An attacker may have inserted them, so they must
    /// not be acted on.
    #[error("the NBD client sent bytes in the clear after it asked for TLS")]
    PlaintextAfterStartTls,
    /// The handshake was asked to go on after its end.
    #[error("the NBD handshake is over")]
    Over,
}
