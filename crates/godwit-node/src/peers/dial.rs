//! Opens connections to other nodes.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use godwit_core::wire::{Features, Greeting, Hello, Refusal, RefusalCode, Reply};
use godwit_io::tls::Handshake;
use rustls::pki_types::ServerName;
use rustls::{AlertDescription, CertificateError};
use tokio::net::TcpStream;

use super::greeting::{self, GreetingError};
use super::tls::NodeTls;
use super::{GREETING_TIMEOUT, PeerConnection, after_welcome};
use crate::config::PeerConfig;
use crate::transport::Transport;
use crate::transport::secure::shake_hands;
use godwit_api::{ErrorBody, ErrorCode};

/// Why a peer could not be dialled.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DialError {
    /// It cannot be reached.
    #[error("cannot reach it at {address}: {why}")]
    Unreachable {
        /// Where it was tried.
        address: String,
        /// What the system said.
        why: String,
    },
    /// One side does not accept the other's certificate.
    #[error("{0}")]
    Identity(String),
    /// It answered with a refusal.
    #[error("it refused: {0}")]
    Refused(Refusal),
    /// It answered with something that is not the protocol.
    #[error("what answers at {address} does not speak the protocol: {why}")]
    Protocol {
        /// Where it was tried.
        address: String,
        /// What was wrong.
        why: String,
    },
}

impl DialError {
    /// The same for a list of peers, which says itself whom it is about.
    pub(crate) fn into_note(self, peer: &str) -> ErrorBody {
        let message = self.to_string();
        ErrorBody {
            message,
            ..self.into_body(peer, "reach it")
        }
    }

    /// The same for the API, about a peer and what was attempted with it.
    pub(crate) fn into_body(self, peer: &str, attempted: &str) -> ErrorBody {
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

/// A peer's refusal for the API.
pub(crate) fn refused(refusal: &Refusal, peer: &str, attempted: &str) -> ErrorBody {
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
                "remove or rename the disk of the same name on node '{peer}'"
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
pub(crate) struct Dialer {
    /// `None`: plain TCP, loopback only.
    pub(crate) tls: Option<NodeTls>,
    /// The optional parts of the protocol that this node wants.
    pub(crate) features: Features,
}

/// What two nodes have found out that they share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Agreed {
    /// The version both speak.
    pub(crate) version: u16,
    /// The optional parts both want.
    pub(crate) features: Features,
}

impl Dialer {
    /// Connects to the peer, proves who is who, and says `hello`. The connection is ready for what
    /// follows the peer's welcome.
    pub(crate) async fn dial(
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
            Err(error) => Err(failed(peer, error)),
        }
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
        // Greetings are small and wait for each other; without the option they are only slower.
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
        let handshake = Handshake::client(Arc::clone(&tls.current().client), name)
            .map_err(|error| protocol(peer, &error))?;
        match tokio::time::timeout(GREETING_TIMEOUT, shake_hands(handshake, socket)).await {
            Err(_) => Err(unreachable(timeout())),
            Ok(Err((error, _))) => Err(failed(peer, GreetingError::Io(error))),
            Ok(Ok(stream)) => Ok(Transport::Tls(Box::new(stream))),
        }
    }
}

/// Tells certificate trouble from other trouble.
fn failed(peer: &PeerConfig, error: GreetingError) -> DialError {
    let GreetingError::Io(io) = &error else {
        return protocol(peer, &error);
    };
    let tls = io
        .get_ref()
        .and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match tls {
        Some(rustls::Error::InvalidCertificate(wrong)) => {
            DialError::Identity(certificate_trouble(peer, wrong))
        }
        Some(rustls::Error::AlertReceived(alert)) if is_about_certificates(*alert) => {
            DialError::Identity(format!(
                "it does not accept this node's certificate ({alert:?}): the certificate is \
                 expired or from another authority"
            ))
        }
        Some(other) => protocol(peer, other),
        None => DialError::Unreachable {
            address: peer.address.clone(),
            why: io.to_string(),
        },
    }
}

fn certificate_trouble(peer: &PeerConfig, wrong: &CertificateError) -> String {
    let PeerConfig { name, address } = peer;
    match wrong {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            format!("the certificate of the node at {address} has expired")
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            format!("the certificate of the node at {address} is not valid yet: check the clocks")
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
