//! Connections to a node's API.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::Bytes;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};

use crate::arguments::{Connection, DEFAULT_DATA_DIR};
use crate::failure::Failure;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The address of a node's API.
#[derive(Clone)]
pub(crate) enum Endpoint {
    /// A socket on this host.
    Unix(PathBuf),
    /// An address on the network.
    Tls {
        /// Address as `HOST:PORT`.
        address: String,
        /// Name that the node's certificate must bear.
        name: ServerName<'static>,
        /// TLS settings: the trusted authority and the client's certificate.
        config: Arc<ClientConfig>,
    },
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "the node at {}", path.display()),
            Self::Tls { address, .. } => write!(f, "the node at https://{address}"),
        }
    }
}

impl Endpoint {
    /// Returns the endpoint given on the command line or in the environment. A network address needs a certificate, its
    /// key and the authority. Without an address, the endpoint is a socket on this host.
    pub(crate) fn from_arguments(arguments: &Connection) -> Result<Self, Failure> {
        let Some(api) = &arguments.api else {
            let socket = arguments.socket.clone();
            let default = || Path::new(DEFAULT_DATA_DIR).join("godwit.sock");
            return Ok(Self::Unix(socket.unwrap_or_else(default)));
        };
        let address = parse_url(api)?;
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        let host = host
            .trim_start_matches('[')
            .trim_end_matches(']')
            .to_owned();
        let name = ServerName::try_from(host).map_err(|error| {
            Failure::usage(format!(
                "the host in {api:?} cannot be in a certificate: {error}"
            ))
        })?;
        let (Some(certificate), Some(key), Some(authority)) =
            (&arguments.cert, &arguments.key, &arguments.ca)
        else {
            return Err(Failure::usage("--api needs --cert, --key and --ca")
                .hint("make them on the host that has the authority: godwit certs issue NAME --role operator"));
        };
        let config = Arc::new(client_config(certificate, key, authority)?);
        Ok(Self::Tls {
            address: address.to_owned(),
            name,
            config,
        })
    }

    /// Returns the value of the host header.
    pub(crate) fn host(&self) -> &str {
        match self {
            Self::Unix(_) => "localhost",
            Self::Tls { address, .. } => address,
        }
    }

    /// Explains a connection that ended before the answer. A node rejects the client's certificate only at this point:
    /// TLS 1.3 lets the client go on before the server has checked the certificate.
    pub(crate) fn broken(&self, error: &(dyn std::error::Error + 'static)) -> Failure {
        match received_alert(error) {
            Some(alert) => Failure::new(format!(
                "{self} does not accept the certificate it was shown ({alert:?})"
            ))
            .hint(
                "it must come from the authority that the node was started with, be valid today, \
                 and belong to the key: godwit certs issue NAME --role operator",
            )
            .unreachable(),
            None => Failure::caused(format!("the connection to {self} broke"), error)
                .hint("has the node been stopped? What was asked for may have been done")
                .unreachable(),
        }
    }

    /// Connects to the node.
    pub(crate) async fn connect(&self) -> Result<SendRequest<Full<Bytes>>, Failure> {
        match tokio::time::timeout(CONNECT_TIMEOUT, self.try_connect()).await {
            Ok(connected) => connected,
            Err(_elapsed) => Err(Failure::new(format!("cannot connect to {self}: no answer"))
                .hint("is the address right, and does a firewall stand between?")
                .unreachable()),
        }
    }

    async fn try_connect(&self) -> Result<SendRequest<Full<Bytes>>, Failure> {
        let failed = |error: &dyn std::error::Error| {
            Failure::caused(format!("cannot connect to {self}"), error).unreachable()
        };
        match self {
            Self::Unix(path) => {
                let stream = UnixStream::connect(path).await.map_err(|error| {
                    failed(&error).hint(match error.kind() {
                        std::io::ErrorKind::PermissionDenied => {
                            "may you use the socket? Try again as the user that runs the node"
                        }
                        _ => {
                            "is the node running? Name its socket with --socket or GODWIT_SOCKET: \
                             it is godwit.sock in the node's data directory"
                        }
                    })
                })?;
                start_http(stream).await.map_err(|error| failed(&error))
            }
            Self::Tls {
                address,
                name,
                config,
            } => {
                let stream = TcpStream::connect(address).await.map_err(|error| {
                    failed(&error).hint("is the node running with --api-listen?")
                })?;
                let connector = tokio_rustls::TlsConnector::from(Arc::clone(config));
                let stream = connector
                    .connect(name.clone(), stream)
                    .await
                    .map_err(|error| {
                        failed(&error).hint(
                        "the node's certificate must come from the authority in --ca and bear the \
                         host's name or address: godwit certs issue NODE --dns HOST --ip ADDRESS",
                    )
                    })?;
                start_http(stream).await.map_err(|error| failed(&error))
            }
        }
    }
}

/// Returns the alert with which the peer ended a TLS connection.
fn received_alert(error: &(dyn std::error::Error + 'static)) -> Option<rustls::AlertDescription> {
    let mut next = Some(error);
    while let Some(error) = next {
        // The source of an I/O error is the source of the wrapped error, not the wrapped error itself.
        let wrapped = error
            .downcast_ref::<std::io::Error>()
            .and_then(std::io::Error::get_ref);
        if let Some(rustls::Error::AlertReceived(alert)) =
            wrapped.and_then(|wrapped| wrapped.downcast_ref())
        {
            return Some(*alert);
        }
        next = error.source();
    }
    None
}

async fn start_http(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
) -> hyper::Result<SendRequest<Full<Bytes>>> {
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // An error of the connection also reaches the caller that waits for an answer on `sender`.
    tokio::spawn(connection);
    Ok(sender)
}

/// Returns the `HOST:PORT` of `https://HOST:PORT[/]`.
fn parse_url(url: &str) -> Result<&str, Failure> {
    let wrong = || {
        Failure::usage(format!("{url:?} is not the address of an API"))
            .hint("it looks like https://192.0.2.7:7443")
    };
    let rest = url.strip_prefix("https://").ok_or_else(wrong)?;
    let address = rest.strip_suffix('/').unwrap_or(rest);
    let (host, port) = address.rsplit_once(':').ok_or_else(wrong)?;
    let plain = !host.is_empty() && !address.contains(['/', '?', '#', '@']);
    if plain && port.parse::<u16>().is_ok_and(|port| port > 0) {
        Ok(address)
    } else {
        Err(wrong())
    }
}

fn client_config(
    certificate: &Path,
    key: &Path,
    authority: &Path,
) -> Result<ClientConfig, Failure> {
    let unreadable = |path: &Path, error: &dyn std::error::Error| {
        Failure::caused(format!("cannot read {}", path.display()), error)
            .hint("it must be a PEM file, as godwit certs issue writes it")
    };
    let certificates = |path: &Path| -> Result<Vec<CertificateDer<'static>>, Failure> {
        CertificateDer::pem_file_iter(path)
            .and_then(Iterator::collect)
            .map_err(|error| unreadable(path, &error))
    };
    let mut roots = RootCertStore::empty();
    for root in certificates(authority)? {
        roots
            .add(root)
            .map_err(|error| unreadable(authority, &error))?;
    }
    let chain = certificates(certificate)?;
    let private = PrivateKeyDer::from_pem_file(key).map_err(|error| unreadable(key, &error))?;
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|builder| {
            builder
                .with_root_certificates(roots)
                .with_client_auth_cert(chain, private)
        })
        .map_err(|error| {
            let what = format!(
                "cannot use {} with {}",
                certificate.display(),
                key.display()
            );
            Failure::caused(what, &error)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connection(api: Option<&str>) -> Connection {
        let api = api.map(str::to_owned);
        Connection {
            socket: None,
            api,
            cert: None,
            key: None,
            ca: None,
        }
    }

    #[test]
    fn without_an_address_it_is_the_socket_of_a_node_here() {
        let endpoint = Endpoint::from_arguments(&connection(None)).unwrap();
        assert!(matches!(endpoint, Endpoint::Unix(path) if path.ends_with("godwit.sock")));
    }

    #[test]
    fn addresses_are_https_with_a_host_and_port() {
        assert_eq!(parse_url("https://h:7443").unwrap(), "h:7443");
        assert_eq!(parse_url("https://[::1]:7443/").unwrap(), "[::1]:7443");
        for url in [
            "",
            "h:7443",
            "http://h:1",
            "https://h",
            "https://:1",
            "https://h:0/x",
        ] {
            assert_eq!(
                parse_url(url).unwrap_err().exit,
                crate::failure::EXIT_USAGE,
                "{url}"
            );
        }
    }

    #[test]
    fn an_address_without_certificates_says_which_options_are_missing() {
        let failure = Endpoint::from_arguments(&connection(Some("https://h:1"))).unwrap_err();
        assert!(failure.message.contains("--cert"), "{failure}");
        let hint = failure.hint.expect("a hint");
        assert!(hint.contains("--role operator"), "{hint}");
    }
}
