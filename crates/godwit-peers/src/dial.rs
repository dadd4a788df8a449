//! Opens connections to other nodes.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use godwit_core::wire::{Features, Greeting, Hello, Refusal, RefusalCode, Reply};
use godwit_io::tls::Handshake;
use rustls::pki_types::ServerName;
use rustls::{AlertDescription, CertificateError};
use time::OffsetDateTime;
use tokio::net::TcpStream;

use super::greeting::{self, GreetingError};
use super::open::SocketNumber;
use super::tls::NodeTls;
use super::{GREETING_TIMEOUT, PeerConnection, after_welcome};
use crate::clock;
use crate::config::PeerConfig;
use crate::transport::Transport;
use crate::transport::secure::shake_hands;
use godwit_api::{ErrorBody, ErrorCode};

/// The reason why a peer could not be dialled.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// The peer cannot be reached.
    #[error("cannot reach it at {address}: {why}")]
    Unreachable {
        /// The address tried.
        address: String,
        /// The system's error.
        why: String,
    },
    /// One side does not accept the other's certificate.
    #[error("{0}")]
    Identity(String),
    /// The peer refused.
    #[error("it refused: {0}")]
    Refused(Refusal),
    /// The answer is not of this protocol.
    #[error("what answers at {address} does not speak the protocol: {why}")]
    Protocol {
        /// The address tried.
        address: String,
        /// The error.
        why: String,
    },
}

impl DialError {
    /// Converts the error for a list of peers, where the message need not name the peer.
    pub fn into_note(self, peer: &str) -> ErrorBody {
        let message = self.to_string();
        ErrorBody {
            message,
            ..self.into_body(peer, "reach it")
        }
    }

    /// Converts the error for the API, with the peer's name and the attempted action.
    pub fn into_body(self, peer: &str, attempted: &str) -> ErrorBody {
        let (code, hint) = match &self {
            Self::Unreachable { .. } => (
                ErrorCode::PeerUnreachable,
                "check that the node runs there and that nothing blocks the way",
            ),
            Self::Identity(_) => (
                ErrorCode::PeerIdentity,
                "see that this is the node's address; both nodes' certificates must come from one \
                 authority, be valid today and bear the nodes' names: godwit certs issue NAME",
            ),
            Self::Refused(refusal) => return refused(refusal, peer, attempted),
            Self::Protocol { .. } => (
                ErrorCode::PeerUnreachable,
                "check the peer's address: it is not a node's peer port",
            ),
        };
        ErrorBody::new(code, format!("cannot {attempted}: node '{peer}': {self}")).hint(hint)
    }
}

/// Converts a peer's refusal for the API.
pub fn refused(refusal: &Refusal, peer: &str, attempted: &str) -> ErrorBody {
    let (code, hint) = match refusal.code {
        RefusalCode::Version => (ErrorCode::PeerVersion, None),
        RefusalCode::Identity => (
            ErrorCode::PeerIdentity,
            Some(format!(
                "both nodes must name each other with --peer, and this node's certificate must be one \
                 of a node and bear its name; node '{peer}' logs what it refuses"
            )),
        ),
        RefusalCode::NoSpace => (
            ErrorCode::NoSpace,
            Some(format!(
                "free space on node '{peer}', or move the disk elsewhere"
            )),
        ),
        RefusalCode::DiskExists => (
            ErrorCode::PeerRefused,
            Some(format!(
                "remove the disk of the same name on node '{peer}', or look whether it is the same one: 'godwit disk \
                 show' there says where it came from"
            )),
        ),
        RefusalCode::Busy => (ErrorCode::PeerRefused, Some("try again shortly".to_owned())),
        RefusalCode::Unknown | RefusalCode::Invalid | RefusalCode::Internal => {
            (ErrorCode::PeerRefused, None)
        }
    };
    let body = ErrorBody::new(
        code,
        format!("cannot {attempted}: node '{peer}' refused: {refusal}"),
    );
    ErrorBody { hint, ..body }
}

/// Opens connections for one node.
#[derive(Clone, Debug)]
pub struct Dialer {
    /// `None`: plain TCP, loopback only.
    pub tls: Option<NodeTls>,
    /// The features wanted by this node.
    pub features: Features,
}

/// The version and features shared by two nodes.
#[derive(Clone, Copy, Debug)]
pub struct Agreed {
    /// The protocol version of the connection.
    pub version: u16,
    /// The features wanted by both nodes.
    pub features: Features,
}

impl Dialer {
    /// Connects to the peer, authenticates both sides and sends `hello`. The connection is ready for use after the
    /// peer's welcome.
    pub async fn dial(
        &self,
        peer: &PeerConfig,
        hello: Hello,
    ) -> Result<(PeerConnection, Agreed), DialError> {
        let mut connection = self.connect(peer).await?;
        let class = hello.class;
        let hello = Hello {
            features: self.features,
            ..hello
        };
        let reply = async {
            greeting::write(&mut connection, &Greeting::Hello(hello)).await?;
            greeting::read(&mut connection).await
        };
        match reply.await {
            Ok(Greeting::Reply(Reply::Welcome {
                version,
                features,
                node,
            })) => {
                if node != peer.name {
                    return Err(DialError::Identity(format!(
                        "the node at {} calls itself {node:?}",
                        peer.address
                    )));
                }
                let features = features.common(self.features);
                let connection = after_welcome(connection, class, features)
                    .map_err(|error| protocol(peer, &error))?;
                Ok((connection, Agreed { version, features }))
            }
            Ok(Greeting::Reply(Reply::Refused(refusal))) => Err(DialError::Refused(refusal)),
            Ok(_) => Err(protocol(peer, &GreetingError::Unexpected)),
            Err(error) => Err(self.failed(peer, error)),
        }
    }

    /// Converts an error of a connection that broke before the peer's welcome.
    fn failed(&self, peer: &PeerConfig, error: GreetingError) -> DialError {
        let own_end = self.tls.as_ref().map(|tls| tls.current().ends.certificate);
        let now = OffsetDateTime::now_utc().unix_timestamp();
        failed(peer, error, own_end, now)
    }

    async fn connect(&self, peer: &PeerConfig) -> Result<PeerConnection, DialError> {
        let unreachable = |why: String| DialError::Unreachable {
            address: peer.address.clone(),
            why,
        };
        let timeout = || format!("no answer within {} seconds", GREETING_TIMEOUT.as_secs());
        let connect = async {
            let addresses: Vec<SocketAddr> = tokio::net::lookup_host(peer.address.as_str())
                .await?
                .collect();
            if self.tls.is_none() && !addresses.iter().all(|address| address.ip().is_loopback()) {
                return Err(io::Error::new(
                    io::ErrorKind::PermissionDenied,
                    "plain TCP is allowed on loopback only; give the node certificates",
                ));
            }
            TcpStream::connect(addresses.as_slice()).await
        };
        let socket = tokio::time::timeout(GREETING_TIMEOUT, connect)
            .await
            .map_err(|_| unreachable(timeout()))?
            .map_err(|error| unreachable(error.to_string()))?;
        // Greetings are small and wait for each other. Without the option they are only slower.
        let _ = socket.set_nodelay(true);
        let Some(tls) = &self.tls else {
            return Ok(Transport::Plain(socket));
        };
        let name = ServerName::try_from(peer.name.clone()).map_err(|_| {
            DialError::Identity(format!(
                "{:?} is not a name that a certificate can hold",
                peer.name
            ))
        })?;
        let number = SocketNumber::of(&socket);
        let handshake = Handshake::client(Arc::clone(&tls.current().client), name)
            .map_err(|error| protocol(peer, &error))?;
        match tokio::time::timeout(GREETING_TIMEOUT, shake_hands(handshake, socket)).await {
            Err(_) => Err(unreachable(timeout())),
            Ok(Err((error, _))) => Err(self.failed(peer, GreetingError::Io(error))),
            Ok(Ok(stream)) => {
                tls.opened(number, Some(stream.certificates()))
                    .map_err(|error| DialError::Identity(error.to_string()))?;
                Ok(Transport::Tls(Box::new(stream)))
            }
        }
    }
}

/// Tells certificate errors from others. `own_end` is the end of this node's certificate, in seconds since 1970 like
/// `now`; nothing with plain TCP.
fn failed(peer: &PeerConfig, error: GreetingError, own_end: Option<i64>, now: i64) -> DialError {
    let GreetingError::Io(io) = &error else {
        return protocol(peer, &error);
    };
    let tls = io
        .get_ref()
        .and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match tls {
        Some(rustls::Error::InvalidCertificate(wrong)) => {
            DialError::Identity(certificate_trouble(peer, wrong, now))
        }
        Some(rustls::Error::AlertReceived(alert)) if is_about_certificates(*alert) => {
            DialError::Identity(format!(
                "it does not accept this node's certificate ({alert:?}): {}",
                refused_certificate(peer, *alert, own_end, now)
            ))
        }
        Some(other) => protocol(peer, other),
        None if is_hang_up(io) => {
            let why = match own_end {
                Some(_) => "was asked for TLS: was it started with --insecure-loopback?",
                None => {
                    "was greeted without TLS: does it have certificates, while this node was started with \
                     --insecure-loopback?"
                }
            };
            let address = &peer.address;
            DialError::Identity(format!("what answers at {address} hung up when it {why}"))
        }
        None => DialError::Unreachable {
            address: peer.address.clone(),
            why: io.to_string(),
        },
    }
}

fn is_hang_up(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset
    )
}

/// Returns the likely reason why the other node refuses this node's certificate.
fn refused_certificate(
    peer: &PeerConfig,
    alert: AlertDescription,
    own_end: Option<i64>,
    now: i64,
) -> String {
    match (alert, own_end) {
        (AlertDescription::CertificateExpired, Some(end)) if end > now => format!(
            "it is not valid by the clock at {}, and by this node's, which says {}, it is until {}: set the clocks",
            peer.address,
            clock::text_of(now),
            clock::text_of(end)
        ),
        (AlertDescription::CertificateRevoked, _) => String::from("it has been revoked"),
        _ => String::from("the certificate is expired or from another authority"),
    }
}

fn certificate_trouble(peer: &PeerConfig, wrong: &CertificateError, now: i64) -> String {
    let PeerConfig { name, address } = peer;
    let clock = clock::text_of(now);
    match wrong {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => format!(
            "the certificate of the node at {address} has expired, by the clock here, which says {clock}: if that is \
             wrong, set it"
        ),
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => format!(
            "the certificate of the node at {address} is not valid yet, by the clock here, which says {clock}: set \
             the clocks"
        ),
        CertificateError::Revoked => {
            format!("the certificate of the node at {address} has been revoked")
        }
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            format!("the certificate of the node at {address} is not for the name {name:?}")
        }
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            format!("the certificate of the node at {address} is from another authority")
        }
        other => format!("the certificate of the node at {address} is not accepted: {other}"),
    }
}

const fn is_about_certificates(alert: AlertDescription) -> bool {
    matches!(
        alert,
        AlertDescription::NoCertificate
            | AlertDescription::BadCertificate
            | AlertDescription::UnsupportedCertificate
            | AlertDescription::CertificateRevoked
            | AlertDescription::CertificateExpired
            | AlertDescription::CertificateUnknown
            | AlertDescription::UnknownCA
            | AlertDescription::DecryptError
            | AlertDescription::AccessDenied
            | AlertDescription::CertificateRequired
    )
}

fn protocol(peer: &PeerConfig, why: &dyn std::fmt::Display) -> DialError {
    DialError::Protocol {
        address: peer.address.clone(),
        why: why.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: i64 = 1_700_000_000;
    const END: i64 = NOW + 1_000_000;

    fn told(error: io::Error, own_end: Option<i64>) -> String {
        let peer = PeerConfig {
            name: String::from("b"),
            address: String::from("b:1"),
        };
        failed(&peer, GreetingError::Io(error), own_end, NOW).to_string()
    }

    #[test]
    fn a_wrong_clock_is_named_on_both_sides() {
        let tls = |error| io::Error::new(io::ErrorKind::InvalidData, error);
        let expired = rustls::Error::AlertReceived(AlertDescription::CertificateExpired);
        let there = told(tls(expired.clone()), Some(END));
        assert!(
            there.contains("by the clock at b:1") && there.contains("2023-11-14"),
            "{there}"
        );
        let ended = told(tls(expired), Some(NOW - 1));
        assert!(
            ended.contains("is expired") && !ended.contains("clock"),
            "{ended}"
        );
        let here = rustls::Error::InvalidCertificate(CertificateError::Expired);
        let here = told(tls(here), Some(END));
        assert!(
            here.contains("the clock here, which says 2023-11-14"),
            "{here}"
        );
    }

    #[test]
    fn a_node_without_tls_is_named_to_one_with() {
        let end = || io::Error::from(io::ErrorKind::UnexpectedEof);
        for own_end in [Some(END), None] {
            let told = told(end(), own_end);
            assert!(
                told.contains("TLS") && told.contains("--insecure-loopback"),
                "{told}"
            );
        }
        assert!(!told(io::ErrorKind::ConnectionRefused.into(), None).contains("TLS"));
    }
}
