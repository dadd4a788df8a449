//! Authentication between nodes, and their agreement on features. Certificates must come from one authority, be valid
//! now and bear the right name.

mod support;

use std::path::Path;

use godwit_core::wire::PROTOCOL_VERSION;
use godwit_node::Role;
use godwit_node::certificates::{self, Validity};
use serde_json::Value;
use support::{RunningNode, authority, free_address, issue, peer, plain, says, secure};

fn node_certificate(authority: &Path, name: &str) {
    issue(authority, name, Role::Node, Validity::Days(1));
}

/// Returns node `a`'s view of its only peer, with this configuration of `a`.
async fn seen(config: godwit_node::NodeConfig) -> Value {
    let a = RunningNode::start(config).await;
    let peers = a.get("/v1/peers").await.json();
    a.stop().await;
    peers[0].clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_of_one_authority_reach_each_other_and_others_are_told_why_not() {
    let dir = tempfile::tempdir().expect("a folder");
    let (ours, theirs) = (dir.path().join("ours"), dir.path().join("theirs"));
    for authority in [&ours, &theirs] {
        certificates::init(authority, false).expect("makes an authority");
        node_certificate(authority, "a");
        node_certificate(authority, "b");
    }
    let mut config = secure("b", dir.path(), &ours, "b");
    config.peers = vec![peer("a", free_address())];
    let b = RunningNode::start(config).await;
    let towards = |authority: &Path, name: &str| {
        let mut config = secure("a", dir.path(), authority, "a");
        config.peers = vec![peer(name, b.config.listen)];
        config
    };

    let friend = seen(towards(&ours, "b")).await;
    assert_eq!(friend["reachable"], true, "{friend}");
    assert_eq!(friend["protocol_version"], PROTOCOL_VERSION, "{friend}");

    let stranger = seen(towards(&theirs, "b")).await;
    assert_eq!(stranger["error"]["code"], "peer_identity", "{stranger}");
    says(&stranger, "another authority");

    let misnamed = seen(towards(&ours, "c")).await;
    assert_eq!(misnamed["error"]["code"], "peer_identity", "{misnamed}");
    says(&misnamed, "not for the name");

    issue(&ours, "a", Role::Node, Validity::Expired);
    let expired = seen(towards(&ours, "b")).await;
    assert_eq!(expired["error"]["code"], "peer_identity", "{expired}");
    says(&expired, "this node's certificate");
    b.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_nbd_clients_certificate_is_no_nodes() {
    let dir = tempfile::tempdir().expect("a folder");
    let ours = authority(dir.path(), &[("b", Role::Node)]);
    issue(&ours, "a", Role::NbdClient, Validity::Days(1));
    let b = RunningNode::start(secure("b", dir.path(), &ours, "b")).await;
    let mut config = secure("a", dir.path(), &ours, "a");
    config.tls = Some(godwit_node::TlsFiles {
        certificate: ours.join("a/client-cert.pem"),
        key: ours.join("a/client-key.pem"),
        authority: ours.join("ca.pem"),
        revoked: None,
    });
    config.peers = vec![peer("b", b.config.listen)];
    let guest = seen(config).await;
    assert_eq!(guest["error"]["code"], "peer_identity", "{guest}");
    says(&guest, "not one of a node");
    b.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_no_peer_is_refused_whatever_its_certificate_and_told_what_to_set() {
    let dir = tempfile::tempdir().expect("a folder");
    let ours = authority(dir.path(), &[("a", Role::Node), ("b", Role::Node)]);
    let mut config = secure("b", dir.path(), &ours, "b");
    config.peers = vec![peer("c", free_address())];
    let b = RunningNode::start(config).await;
    let mut config = secure("a", dir.path(), &ours, "a");
    config.peers = vec![peer("b", b.config.listen)];
    let unlisted = seen(config).await;
    assert_eq!(unlisted["error"]["code"], "peer_identity", "{unlisted}");
    says(
        &unlisted["error"]["message"],
        "start node 'b' with --peer a=",
    );
    b.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_for_another_role_opens_no_connection_of_nodes() {
    let dir = tempfile::tempdir().expect("a folder");
    let ours = authority(dir.path(), &[("b", Role::Node)]);
    let mut config = secure("b", dir.path(), &ours, "b");
    config.peers = vec![peer("a", free_address())];
    let b = RunningNode::start(config).await;
    for role in [Role::Operator, Role::Reader] {
        issue(&ours, "a", role, Validity::Days(1));
        let mut config = secure("a", dir.path(), &ours, "a");
        config.peers = vec![peer("b", b.config.listen)];
        let other = seen(config).await;
        assert_eq!(other["error"]["code"], "peer_identity", "{other}");
        says(&other, "not one of a node");
    }
    b.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_does_not_start_with_a_certificate_for_another_name() {
    let dir = tempfile::tempdir().expect("a folder");
    let ours = authority(dir.path(), &[("c", Role::Node)]);
    let config = secure("a", dir.path(), &ours, "c");
    let error = godwit_node::run(config, std::future::pending()).await;
    let text = error.expect_err("the name is wrong").to_string();
    assert!(
        text.contains("certificate") && text.contains("\"a\""),
        "{text}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn disks_are_compressed_only_between_nodes_that_both_want_it() {
    for (here, there) in [(true, true), (true, false), (false, true)] {
        let dir = tempfile::tempdir().expect("a folder");
        let mut b = plain("b", dir.path());
        b.compression = there;
        b.peers = vec![peer("a", free_address())];
        let b = RunningNode::start(b).await;
        let mut a = plain("a", dir.path());
        a.compression = here;
        a.peers = vec![peer("b", b.config.listen)];
        let seen = seen(a).await;
        assert_eq!(seen["compression"], here && there, "{seen}");
        b.stop().await;
    }
}
