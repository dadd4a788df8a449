//! What a handshake needs from its caller, and what it tells it.

use godwit_core::units::Sectors;

/// Whether the client must start TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsPolicy {
    /// No TLS here: `NBD_OPT_STARTTLS` is refused.
    Off,
    /// TLS before anything else: until it is up every option but `NBD_OPT_STARTTLS` and
    /// `NBD_OPT_ABORT` is refused.
    Required,
}

/// What a handshake allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandshakeConfig {
    /// Whether the client must start TLS.
    pub tls: TlsPolicy,
    /// Most options one client may send before it enters the transmission phase.
    pub max_options: u32,
    /// Longest data of one option in bytes. `NBD_OPT_GO` takes up to 4 KiB of name, 6 bytes, and 2
    /// bytes for each kind of information asked for.
    pub max_option_length: u32,
}

impl HandshakeConfig {
    /// The usual bounds: 256 options of 16 KiB.
    pub const fn new(tls: TlsPolicy) -> Self {
        Self {
            tls,
            max_options: 256,
            max_option_length: 16 << 10,
        }
    }
}

/// What the caller has to do next; see [`Handshake::poll`](super::Handshake::poll).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HandshakeStep {
    /// Read from the client, and give what came to
    /// [`Handshake::receive`](super::Handshake::receive).
    Receive,
    /// Send these bytes to the client.
    Send(Vec<u8>),
    /// The client asks for this export, or about it: answer with
    /// [`Handshake::export`](super::Handshake::export). At most 4096 bytes of any UTF-8 but NUL;
    /// empty for the default export.
    NeedExport {
        /// Its name.
        name: String,
        /// Whether the transmission phase begins when it gets the export; otherwise it only asks about it.
        enters: bool,
    },
    /// The client asks which exports there are: answer with
    /// [`Handshake::list`](super::Handshake::list).
    List,
    /// The client waits for the TLS handshake on this connection: perform it, then call
    /// [`Handshake::tls_done`](super::Handshake::tls_done).
    StartTls,
    /// The transmission phase begins.
    Done(Negotiated),
    /// The client took its leave: close the connection.
    Aborted,
    /// The handshake cannot succeed: close the connection.
    Failed(HandshakeError),
}

/// What client and server agreed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Negotiated {
    /// The export the client asked for.
    pub export: String,
    /// What it was told of it.
    pub info: ExportInfo,
    /// Reads are to be answered with structured replies.
    pub structured_replies: bool,
    /// The client may ask which ranges are allocated: it selected `base:allocation` for this export.
    pub base_allocation: bool,
    /// The first bytes of the transmission phase, which came with the last of the handshake.
    pub leftover: Vec<u8>,
}

/// What a client is told of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportInfo {
    /// Its size.
    pub capacity: Sectors,
}

/// Why a client does not get an export. The text is shown by its program; it says what to do next,
/// in at most 4096 bytes (more is cut off).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExportRefusal {
    /// There is none of this name.
    Unknown(String),
    /// It exists and is not to be had now, such as a disk whose owner is in doubt.
    Policy(String),
    /// The server is about to end.
    Shutdown(String),
}

/// Why a handshake failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeError {
    /// The client wants something of the protocol that was not offered.
    #[error("the NBD client set unknown handshake flags {0:#010x}")]
    ClientFlags(u32),
    /// What should be an option is not.
    #[error("the client sent something else than an NBD option")]
    OptionMagic,
    /// An option's data is too long.
    #[error(
        "the NBD client sent {length} bytes with option {option}, more than the {limit} allowed"
    )]
    OptionTooLong {
        /// Its number.
        option: u32,
        /// The length of its data in bytes.
        length: u32,
        /// The longest allowed.
        limit: u32,
    },
    /// There were too many options.
    #[error("the NBD client sent more than {0} options without choosing an export")]
    TooManyOptions(u32),
    /// A client of the old handshake sent an option that only the fixed one has.
    #[error("the NBD client sent option {0} without the fixed newstyle handshake")]
    NotFixedNewstyle(u32),
    /// `NBD_OPT_EXPORT_NAME`, whose refusal cannot be told to the client.
    #[error("the NBD client was refused the export it asked for by NBD_OPT_EXPORT_NAME: {0}")]
    ExportRefused(String),
    /// More bytes came in the clear after the client asked for TLS: somebody may have put them
    /// there, so they must not be acted on.
    #[error("the NBD client sent bytes in the clear after it asked for TLS")]
    PlaintextAfterStartTls,
    /// The handshake was asked to go on after its end.
    #[error("the NBD handshake is over")]
    Over,
}
