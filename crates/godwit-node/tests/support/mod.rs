//! A node in the test's own process, and a small HTTP client for its socket.

#![allow(
    dead_code,
    reason = "not every test that shares this file uses all of it"
)]

use std::fmt::Display;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use godwit_core::units::MigrationId;
use godwit_core::wire::{
    Features, Greeting, HEADER_SIZE, Header, Hello, PROTOCOL_VERSION, Purpose, Reply, TrafficClass,
};
use godwit_node::certificates::{self, IssueRequest, Validity};
use godwit_node::{NodeConfig, NodeError, PeerConfig, Role, TlsFiles};
use rustix::process::{Pid, Signal, kill_process};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

pub(crate) struct RunningNode {
    pub(crate) config: NodeConfig,
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), NodeError>>,
}

pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {} {}", self.status, self.body))
    }
}

/// Returns the configuration of a node that trusts all of loopback.
pub(crate) fn plain(name: &str, dir: &Path) -> NodeConfig {
    NodeConfig {
        listen: free_address(),
        ..NodeConfig::on_loopback(name, dir.join(name))
    }
}

/// Returns the configuration of a node with the certificate of `certificate` from the authority in `authority`.
pub(crate) fn secure(name: &str, dir: &Path, authority: &Path, certificate: &str) -> NodeConfig {
    NodeConfig {
        tls: Some(TlsFiles {
            certificate: authority.join(format!("{certificate}.pem")),
            key: authority.join(format!("{certificate}.key")),
            authority: authority.join("ca.pem"),
            revoked: None,
        }),
        insecure_loopback: false,
        ..plain(name, dir)
    }
}
pub(crate) fn peer(name: &str, address: SocketAddr) -> PeerConfig {
    PeerConfig {
        name: name.to_owned(),
        address: address.to_string(),
    }
}
pub(crate) fn issue(authority: &Path, name: &str, role: Role, validity: Validity) {
    certificates::issue(&IssueRequest {
        directory: authority,
        name,
        dns: &[],
        ip: &[],
        role,
        disks: &[],
        validity,
        force: true,
    })
    .expect("issues");
}

/// Returns the settings of a client with `NAME.pem` of this authority.
pub(crate) fn shows(authority: &Path, name: &str) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    let root = CertificateDer::from_pem_file(authority.join("ca.pem")).expect("a certificate");
    roots.add(root).expect("an authority");
    let file = |end: &str| authority.join(format!("{name}.{end}"));
    let own = CertificateDer::from_pem_file(file("pem")).expect("a certificate");
    let key = PrivateKeyDer::from_pem_file(file("key")).expect("a key");
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_client_auth_cert(vec![own], key)
        .expect("they fit together");
    Arc::new(config)
}

/// A folder removed at the end of the test, however the test ends. The QEMUs with files in the folder outlive their
/// node, and are killed.
pub(crate) struct MachineFolder(tempfile::TempDir);
impl MachineFolder {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().expect("a folder"))
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for MachineFolder {
    fn drop(&mut self) {
        let wanted = self.path().as_os_str().as_encoded_bytes().to_owned();
        for process in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
            let line = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
            let number = process
                .file_name()
                .to_str()
                .and_then(|name| name.parse().ok());
            if line.starts_with(b"qemu-system")
                && line.windows(wanted.len()).any(|part| part == wanted)
                && let Some(process) = number.and_then(Pid::from_raw)
            {
                // QEMU may be about to end by itself.
                let _ = kill_process(process, Signal::KILL);
            }
        }
    }
}

/// Returns an address without a listener, with a port never given to outgoing connections by the kernel.
pub(crate) fn free_address() -> SocketAddr {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = (std::process::id() % 10_000) as u16;
    loop {
        let port = 10_000 + (first + NEXT.fetch_add(1, Ordering::Relaxed)) % 20_000;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        if TcpListener::bind(address).is_ok() {
            return address;
        }
    }
}

/// Sends a request with a JSON body on a connection of its own.
pub(crate) async fn request(
    mut socket: impl AsyncRead + AsyncWrite + Unpin,
    method: &str,
    path: &str,
    body: &str,
) -> Answer {
    let request = format!(
        "{method} {path} HTTP/1.1\r\nhost: node\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    // A node may answer before it has read all of an overlong body.
    let _ = socket.write_all(request.as_bytes()).await;
    let mut answer = Vec::new();
    let _ = socket.read_to_end(&mut answer).await;
    let answer = String::from_utf8(answer).expect("text");
    let (head, body) = answer.split_once("\r\n\r\n").expect("an HTTP answer");
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok());
    Answer {
        status: status.expect("a status"),
        body: body.to_owned(),
    }
}

impl RunningNode {
    /// Starts a node and waits for an answer.
    pub(crate) async fn start(config: NodeConfig) -> Self {
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(godwit_node::run(config.clone(), async {
            let _ = stopped.await;
        }));
        let node = Self { config, stop, task };
        for _ in 0..500 {
            assert!(
                !node.task.is_finished(),
                "the node ended: {:?}",
                node.task.await
            );
            if UnixStream::connect(node.config.api_socket()).await.is_ok() {
                // The socket listens before the node has taken up its former work. An answer comes after that.
                node.get("/health").await;
                return node;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("the node does not answer");
    }

    /// Ends the node in order.
    pub(crate) async fn stop(self) {
        let _ = self.stop.send(());
        self.task
            .await
            .expect("the node does not panic")
            .expect("the node ends well");
    }

    /// Sends a request with a JSON body.
    pub(crate) async fn request(&self, method: &str, path: &str, body: &str) -> Answer {
        let socket = UnixStream::connect(self.config.api_socket())
            .await
            .expect("the API's socket is there");
        request(socket, method, path, body).await
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.request("GET", path, "").await
    }

    /// Sends a request to a route such as `GET /health`, and expects this status.
    pub(crate) async fn call(&self, route: &str, body: impl Display, status: u16) -> Answer {
        let (method, path) = route.split_once(' ').expect("a method and a path");
        let answer = self.request(method, path, &body.to_string()).await;
        assert_eq!(answer.status, status, "{route}: {}", answer.body);
        answer
    }

    /// Ends VM "v" at once.
    pub(crate) async fn stop_vm(&self) {
        self.call("POST /v1/vms/v/stop", FORCE, 204).await;
    }
}

/// A request to end a machine at once.
pub(crate) const FORCE: &str = r#"{"force":true}"#;

/// Ends the nodes in order.
pub(crate) async fn stop_all(nodes: [RunningNode; 2]) {
    for node in nodes {
        node.stop().await;
    }
}

/// Starts two nodes with each other as peers.
pub(crate) async fn pair(mut a: NodeConfig, mut b: NodeConfig) -> (RunningNode, RunningNode) {
    a.peers = vec![peer(&b.name, b.listen)];
    b.peers = vec![peer(&a.name, a.listen)];
    (RunningNode::start(a).await, RunningNode::start(b).await)
}

/// Creates an authority, and a certificate for each of these names.
pub(crate) fn authority(dir: &Path, names: &[(&str, Role)]) -> PathBuf {
    let authority = dir.join("ours");
    certificates::init(&authority, false).expect("makes an authority");
    for (name, role) in names {
        issue(&authority, name, *role, Validity::Days(3));
    }
    authority
}

/// Expects these words in a text or a JSON value.
#[track_caller]
pub(crate) fn says(text: &(impl Display + ?Sized), words: &str) {
    let text = text.to_string();
    assert!(text.contains(words), "'{words}' is not in: {text}");
}

/// Asks again and again until there is an answer.
pub(crate) async fn until<T>(what: &str, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    for _ in 0..3000 {
        if let Some(answer) = ask().await {
            return answer;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("not in time: {what}");
}

/// Returns the first words of a node to a peer.
pub(crate) fn hello(purpose: Purpose, node: &str, migration: u8, disk: &str) -> Greeting {
    Greeting::Hello(Hello {
        min_version: PROTOCOL_VERSION,
        max_version: PROTOCOL_VERSION,
        features: Features::default(),
        class: TrafficClass::Control,
        purpose,
        migration: MigrationId([migration; 16]),
        node: node.to_owned(),
        disk: disk.to_owned(),
    })
}

/// Returns the answer to them of a node that knows no features.
pub(crate) fn welcome(node: &str) -> Greeting {
    welcome_with(node, Features::default())
}

/// Returns the answer to them of a node that knows these features.
pub(crate) fn welcome_with(node: &str, features: Features) -> Greeting {
    Greeting::Reply(Reply::Welcome {
        version: PROTOCOL_VERSION,
        features,
        node: node.to_owned(),
    })
}

pub(crate) fn send(stream: &mut (impl Write + ?Sized), greeting: &Greeting) {
    stream.write_all(&greeting.encode()).expect("it is there");
    stream.flush().expect("it is there");
}

pub(crate) fn receive(stream: &mut (impl Read + ?Sized)) -> Greeting {
    let mut header = [0; HEADER_SIZE];
    stream.read_exact(&mut header).expect("an answer");
    let header = Header::decode(&header).expect("a frame");
    let mut body = vec![0; header.payload_length as usize];
    stream.read_exact(&mut body).expect("all of it");
    Greeting::decode(&header, &body).expect("a greeting")
}
