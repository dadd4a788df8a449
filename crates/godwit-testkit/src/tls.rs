//! TLS settings of two nodes that trust one freshly made certificate.

use std::sync::{Arc, OnceLock};

use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::{PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore, ServerConfig, version};

/// The TLS configurations of both sides: TLS 1.3, with secret extraction for sessions that take over the records.
#[derive(Debug)]
pub struct TlsSettings {
    /// Configuration that trusts the other side's certificate.
    pub client: Arc<ClientConfig>,
    /// Configuration that asks for no certificate.
    pub server: Arc<ServerConfig>,
}

impl TlsSettings {
    /// Creates settings with a certificate of their own for [`node_name`].
    pub fn new(provider: CryptoProvider) -> Self {
        let own = rcgen::generate_simple_self_signed([NODE.to_owned()]).expect("a certificate");
        let certificate = own.cert.der().clone();
        let key = PrivateKeyDer::Pkcs8(own.signing_key.serialize_der().into());
        let mut roots = RootCertStore::empty();
        roots.add(certificate.clone()).expect("a root");
        let provider = Arc::new(provider);
        let mut client = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&version::TLS13])
            .expect("versions")
            .with_root_certificates(roots)
            .with_no_client_auth();
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&version::TLS13])
            .expect("versions")
            .with_no_client_auth()
            .with_single_cert(vec![certificate], key)
            .expect("they fit together");
        client.enable_secret_extraction = true;
        server.enable_secret_extraction = true;
        Self {
            client: Arc::new(client),
            server: Arc::new(server),
        }
    }

    /// Returns the same settings each time, with the usual ciphers.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<TlsSettings> = OnceLock::new();
        SHARED.get_or_init(|| Self::new(aws_lc_rs::default_provider()))
    }
}

const NODE: &str = "node";

pub fn node_name() -> ServerName<'static> {
    ServerName::try_from(NODE).expect("a name")
}
