//! The identity of a node and its trust in others: mutual TLS with one authority.

pub mod renewal;
mod validity;

use std::io;
use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock};

use rustls::client::{
    Resumption, WebPkiServerVerifier, verify_server_cert_signed_by_trust_anchor, verify_server_name,
};
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{
    CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName, UnixTime,
};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{
    ALL_VERSIONS, CertificateError, ClientConfig, RootCertStore, ServerConfig,
    SupportedProtocolVersion, version,
};

use self::validity::Ends;
use crate::config::TlsFiles;
use crate::open::{OpenConnections, SocketNumber};
use crate::roles::Holder;

/// The TLS versions between nodes: TLS 1.3 only, because nodes use records of their own in place of rustls' records.
const NODE_VERSIONS: &[&SupportedProtocolVersion] = &[&version::TLS13];

/// The TLS settings of a node and their files, which can be read again while the node runs.
#[derive(Clone, Debug)]
pub struct NodeTls {
    name: String,
    files: TlsFiles,
    current: Arc<RwLock<Arc<Settings>>>,
    open: Arc<OpenConnections>,
}

/// The settings for new connections.
#[derive(Debug)]
pub struct Settings {
    /// For connections opened by this node.
    pub client: Arc<ClientConfig>,
    /// For connections of other nodes.
    pub nodes: Arc<ServerConfig>,
    /// For connections of clients of disks, which must show a certificate.
    pub server: Arc<ServerConfig>,
    /// For connections of the API, with certificates too.
    pub api: Arc<ServerConfig>,
    /// The ends of the certificates' validity.
    pub ends: Ends,
    roots: Arc<RootCertStore>,
    /// Checks for revoked certificates, if there are any.
    revocation: Option<Arc<dyn ClientCertVerifier>>,
}

/// The reason why the certificates cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read as PEM.
    #[error("cannot read the {what} {path}: {why}")]
    File {
        /// The expected content.
        what: &'static str,
        /// The path.
        path: String,
        /// The error.
        why: String,
    },
    /// The certificate is not for this node.
    #[error(
        "the certificate {path} is not for the node {name:?}: issue one with 'godwit certs issue'"
    )]
    Name {
        /// The certificate's path.
        path: String,
        /// This node's name.
        name: String,
    },
    /// The parts do not fit together.
    #[error("the certificate, its key and the authority do not fit together: {0}")]
    Settings(String),
}

impl NodeTls {
    /// Reads the files and checks that they fit together and belong to the node `name`.
    pub fn load(name: &str, files: &TlsFiles) -> Result<Self, TlsError> {
        let settings = Settings::load(name, files)?;
        Ok(Self {
            name: name.to_owned(),
            files: files.clone(),
            current: Arc::new(RwLock::new(Arc::new(settings))),
            open: Arc::default(),
        })
    }

    /// Reads the files again, for new connections. Open connections with a certificate revoked by now end; returns
    /// their number. On an error, nothing changes.
    pub fn reload(&self) -> Result<usize, TlsError> {
        let settings = Arc::new(Settings::load(&self.name, &self.files)?);
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = Arc::clone(&settings);
        Ok(self.open.end(|chain| settings.is_revoked(chain)))
    }

    /// Remembers an open connection by the certificate at its other end.
    ///
    /// # Errors
    /// The certificate was revoked during the handshake.
    pub fn opened(
        &self,
        socket: Option<SocketNumber>,
        chain: Option<&[CertificateDer<'_>]>,
    ) -> io::Result<()> {
        let (Some(socket), Some(chain)) = (socket, chain) else {
            return Ok(());
        };
        self.open.note(socket, chain);
        match self.current().is_revoked(chain) {
            true => Err(io::Error::other("its certificate has been revoked")),
            false => Ok(()),
        }
    }

    /// Returns the settings for a new connection.
    pub fn current(&self) -> Arc<Settings> {
        Arc::clone(&self.current.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns the proven holder of this chain.
    pub fn holder(&self, chain: Option<&[CertificateDer<'_>]>) -> Holder {
        self.current().holder(chain)
    }
}

impl Settings {
    fn load(name: &str, files: &TlsFiles) -> Result<Self, TlsError> {
        let chain = certificates("certificate", &files.certificate)?;
        let key = PrivateKeyDer::from_pem_file(&files.key)
            .map_err(|error| unreadable("private key", &files.key, &error))?;
        if !chain.first().is_some_and(|own| belongs_to(own, name)) {
            return Err(TlsError::Name {
                path: files.certificate.display().to_string(),
                name: name.to_owned(),
            });
        }
        let authorities = certificates("authority", &files.authority)?;
        let revoked = files.revoked.as_deref().map(revocation_lists).transpose()?;
        Self::new(authorities, chain, key, revoked.unwrap_or_default())
    }

    /// Creates the settings for this chain and key. Trusts these authorities except for revoked certificates.
    fn new(
        authorities: Vec<CertificateDer<'static>>,
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
        revoked: Vec<CertificateRevocationListDer<'static>>,
    ) -> Result<Self, TlsError> {
        let settings = |error: &dyn std::error::Error| TlsError::Settings(error.to_string());
        let provider = Arc::new(aws_lc_rs::default_provider());
        let ends = Ends::of(&chain, &authorities);
        let mut roots = RootCertStore::empty();
        for authority in authorities {
            roots.add(authority).map_err(|error| settings(&error))?;
        }
        let roots = Arc::new(roots);
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
                .with_crls(revoked.iter().cloned())
                .allow_unknown_revocation_status()
                .build()
                .map_err(|error| settings(&error))?;
        let has_lists = !revoked.is_empty();
        let others =
            WebPkiServerVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
                .with_crls(revoked)
                .allow_unknown_revocation_status()
                .build()
                .map_err(|error| settings(&error))?;
        let serve = |versions: &[&'static SupportedProtocolVersion]| {
            let mut config = ServerConfig::builder_with_provider(Arc::clone(&provider))
                .with_protocol_versions(versions)?
                .with_client_cert_verifier(Arc::clone(&verifier))
                .with_single_cert(chain.clone(), key.clone_key())?;
            // Every connection authenticates anew: no session is resumed.
            config.send_tls13_tickets = 0;
            config.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
            Ok(config)
        };
        let server = serve(ALL_VERSIONS).map_err(|error: rustls::Error| settings(&error))?;
        let mut nodes = serve(NODE_VERSIONS).map_err(|error| settings(&error))?;
        nodes.enable_secret_extraction = true;
        let mut client = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(NODE_VERSIONS)
            .map_err(|error| settings(&error))?
            .with_webpki_verifier(others)
            .with_client_auth_cert(chain.clone(), key.clone_key())
            .map_err(|error| settings(&error))?;
        client.resumption = Resumption::disabled();
        client.enable_secret_extraction = true;
        let mut api = server.clone();
        api.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self {
            client: Arc::new(client),
            nodes: Arc::new(nodes),
            server: Arc::new(server),
            api: Arc::new(api),
            ends,
            roots,
            revocation: has_lists.then_some(verifier),
        })
    }

    /// Returns true if a list revokes a certificate whose chain was accepted before.
    fn is_revoked(&self, chain: &[CertificateDer<'_>]) -> bool {
        let (Some(verifier), Some((own, intermediates))) = (&self.revocation, chain.split_first())
        else {
            return false;
        };
        let verified = verifier.verify_client_cert(own, intermediates, UnixTime::now());
        matches!(
            verified,
            Err(rustls::Error::InvalidCertificate(CertificateError::Revoked))
        )
    }

    fn holder(&self, chain: Option<&[CertificateDer<'_>]>) -> Holder {
        match chain.and_then(<[_]>::split_first) {
            Some((own, intermediates)) => Holder::of(own, self.is_server(own, intermediates)),
            None => Holder::nobody(),
        }
    }

    /// Returns true if a certificate is valid for servers.
    fn is_server(&self, own: &CertificateDer<'_>, intermediates: &[CertificateDer<'_>]) -> bool {
        ParsedCertificate::try_from(own).is_ok_and(|own| {
            let algorithms = aws_lc_rs::default_provider()
                .signature_verification_algorithms
                .all;
            let now = UnixTime::now();
            verify_server_cert_signed_by_trust_anchor(
                &own,
                &self.roots,
                intermediates,
                now,
                algorithms,
            )
            .is_ok()
        })
    }
}

/// Returns true if a certificate is for the node of this name.
pub fn belongs_to(certificate: &CertificateDer<'_>, name: &str) -> bool {
    let Ok(name) = ServerName::try_from(name) else {
        return false;
    };
    ParsedCertificate::try_from(certificate)
        .is_ok_and(|certificate| verify_server_name(&certificate, &name).is_ok())
}

fn certificates(what: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let found = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| unreadable(what, path, &error))?;
    if found.is_empty() {
        return Err(TlsError::File {
            what,
            path: path.display().to_string(),
            why: String::from("it holds no certificate"),
        });
    }
    Ok(found)
}

fn revocation_lists(path: &Path) -> Result<Vec<CertificateRevocationListDer<'static>>, TlsError> {
    let what = "list of revoked certificates";
    let found = CertificateRevocationListDer::pem_file_iter(path)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| unreadable(what, path, &error))?;
    match found.is_empty() {
        true => Err(unreadable(what, path, &"it holds no list (X509 CRL)")),
        false => Ok(found),
    }
}

fn unreadable(what: &'static str, path: &Path, error: &dyn std::fmt::Display) -> TlsError {
    TlsError::File {
        what,
        path: path.display().to_string(),
        why: error.to_string(),
    }
}
