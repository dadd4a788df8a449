//! What a node is told when it starts.

use std::net::SocketAddr;
use std::path::PathBuf;

/// Everything that a node needs to know to run.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// The node's name, as in its certificate. The same characters as a disk's name.
    pub name: String,
    /// Where its images, store and sockets live; created when missing.
    pub data_dir: PathBuf,
    /// Where other nodes connect.
    pub listen: SocketAddr,
    /// The certificates of this node; `None` only with [`Self::insecure_loopback`].
    pub tls: Option<TlsFiles>,
    /// Plain TCP between nodes; refused unless every address is on loopback.
    pub insecure_loopback: bool,
    /// Where the API is served over mutual TLS, besides its unix socket.
    pub api_listen: Option<SocketAddr>,
    /// Where NBD clients connect over TCP, besides the unix socket. TLS with client certificates
    /// is required unless [`Self::nbd_plain`].
    pub nbd_listen: Option<SocketAddr>,
    /// NBD over plain TCP; refused unless the address is on loopback.
    pub nbd_plain: bool,
    /// The other nodes.
    pub peers: Vec<PeerConfig>,
}

/// PEM files that prove who a node is.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    /// The node's certificate chain.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The authority that every node's and client's certificate is checked against.
    pub authority: PathBuf,
}

/// Another node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerConfig {
    /// Its name, as in its certificate.
    pub name: String,
    /// Where it takes connections of nodes: `HOST:PORT`.
    pub address: String,
}

impl NodeConfig {
    /// The unix socket of the API.
    pub fn api_socket(&self) -> PathBuf {
        self.data_dir.join("godwit.sock")
    }

    /// The unix socket where NBD clients attach.
    pub fn nbd_socket(&self) -> PathBuf {
        self.data_dir.join("nbd.sock")
    }

    /// The path of the store.
    pub fn store_path(&self) -> PathBuf {
        self.data_dir.join("godwit.redb")
    }

    /// The folder of the images that the node made itself.
    pub fn disks_dir(&self) -> PathBuf {
        self.data_dir.join("disks")
    }
}
