//! Certificates are renewed while the node runs.

mod support;

use std::fs;
use std::path::Path;
use std::time::Duration;

use godwit_node::Role;
use godwit_node::certificates::{self, Revoked, Validity};
use rustix::process::{Signal, getpid, kill_process};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use support::{
    RunningNode, authority, free_address, issue, pair, request, says, secure, shows, stop_all,
    until,
};
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

async fn connect(node: &RunningNode, authority: &Path) -> TlsStream<TcpStream> {
    let address = node.config.api_listen.expect("an address");
    let socket = TcpStream::connect(address).await.expect("it listens");
    let name = ServerName::try_from("a").expect("a name");
    let connector = TlsConnector::from(shows(authority, "reader"));
    connector.connect(name, socket).await.expect("a session")
}

/// Returns the certificate shown to a new connection.
async fn shown(node: &RunningNode, authority: &Path) -> CertificateDer<'static> {
    let session = connect(node, authority).await;
    let chain = session.get_ref().1.peer_certificates();
    chain.expect("a chain")[0].clone().into_owned()
}

fn on_disk(authority: &Path) -> CertificateDer<'static> {
    CertificateDer::from_pem_file(authority.join("a.pem")).expect("a certificate")
}

/// Returns the end of the node's certificate in seconds since 1970, from the metrics.
async fn end(node: &RunningNode) -> i64 {
    let metrics = node.get("/metrics").await.body;
    let name = "godwit_certificate_end_timestamp_seconds{certificate=\"node\"} ";
    let line = metrics.lines().find_map(|line| line.strip_prefix(name));
    let value: f64 = line.expect("the metric").parse().expect("a number");
    value as i64
}

fn hang_up() {
    kill_process(getpid(), Signal::HUP).expect("signals");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_certificate_is_used_after_a_signal_and_a_broken_one_is_not() {
    let dir = tempfile::tempdir().expect("a folder");
    let ours = authority(dir.path(), &[("a", Role::Node), ("reader", Role::Reader)]);
    let mut config = secure("a", dir.path(), &ours, "a");
    config.api_listen = Some(free_address());
    let a = RunningNode::start(config).await;
    let first = on_disk(&ours);
    assert_eq!(shown(&a, &ours).await, first);
    let open = connect(&a, &ours).await;
    let first_end = end(&a).await;

    // A wrong key, and half a file.
    issue(&ours, "a", Role::Node, Validity::Days(9));
    let (good, key) = (ours.join("a.pem"), ours.join("a.key"));
    let (pem, secret) = (
        fs::read(&good).expect("reads"),
        fs::read(&key).expect("reads"),
    );
    fs::copy(ours.join("ca.key"), &key).expect("copies");
    hang_up();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(
        shown(&a, &ours).await,
        first,
        "a key of another certificate"
    );
    fs::write(&key, secret).expect("writes");
    fs::write(&good, &pem[..pem.len() / 2]).expect("writes");
    hang_up();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(shown(&a, &ours).await, first, "half a file");

    fs::write(&good, pem).expect("writes");
    let second = on_disk(&ours);
    hang_up();
    let used = async || (shown(&a, &ours).await == second).then_some(());
    until("the new certificate is used", used).await;
    let days = (end(&a).await - first_end) as f64 / (24.0 * 3600.0);
    assert!((5.9..6.1).contains(&days), "ends {days} days later");
    let answer = request(open, "GET", "/metrics", "").await;
    assert_eq!(answer.status, 200, "what was open goes on");
    a.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_certificate_is_refused_and_its_connections_end() {
    let dir = tempfile::tempdir().expect("a folder");
    let nodes = [("a", Role::Node), ("b", Role::Node)];
    let readers = [("reader", Role::Reader), ("other", Role::Reader)];
    let ours = authority(dir.path(), &[nodes, readers].concat());
    let revoke = |name| certificates::revoke(&ours, Revoked::Name(name)).expect("revokes");
    let list = revoke("other").path;
    let mut config = secure("a", dir.path(), &ours, "a");
    config.tls.as_mut().expect("certificates").revoked = Some(list);
    config.api_listen = Some(free_address());
    let (a, b) = pair(config, secure("b", dir.path(), &ours, "b")).await;
    let seen_from_b = async || b.get("/v1/peers").await.body;
    let peers = seen_from_b().await;
    says(&peers, "\"reachable\":true");
    let mut open = connect(&a, &ours).await;

    revoke("reader");
    revoke("b");
    hang_up();
    let end = tokio::time::timeout(Duration::from_secs(10), open.read(&mut [0])).await;
    assert!(matches!(end, Ok(Ok(0) | Err(_))), "it goes on: {end:?}");
    let mut again = connect(&a, &ours).await;
    let mut answer = [0];
    let refused = again.read(&mut answer).await;
    assert!(refused.is_err(), "{refused:?}");
    let peers = seen_from_b().await;
    says(&peers, "it has been revoked");
    let peers = a.get("/v1/peers").await.body;
    says(&peers, "has been revoked");
    stop_all([a, b]).await;
}
