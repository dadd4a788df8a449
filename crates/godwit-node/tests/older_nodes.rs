//! Requests unknown to older nodes.

mod support;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};

use godwit_core::wire::Features;
use serde_json::json;
use support::{MachineFolder, RunningNode, peer, plain, receive, until, welcome_with};

/// Welcomes all connections as a node that knows these features, and reads no further.
fn welcome_all(node: &'static str, features: Features) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("an address");
    let address = listener.local_addr().expect("it listens");
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            answer(stream.expect("a connection"), node, features);
        }
    });
    address
}

fn answer(mut stream: TcpStream, node: &str, features: Features) {
    receive(&mut stream);
    // A probing peer may be gone.
    let _ = stream.write_all(&welcome_with(node, features).encode());
    let _ = stream.read(&mut [0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_older_node_is_not_asked_for_what_it_does_not_know() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut config = plain("a", dir.path());
    config.peers = vec![peer("b", welcome_all("b", Features::default()))];
    let node = RunningNode::start(config).await;
    let disk = json!({ "name": "d", "size_bytes": 1 << 20 }).to_string();
    let made = node.request("POST", "/v1/disks", &disk).await;
    assert!(made.status < 300, "{}", made.body);
    for (asked, value, hint) in [
        ("policy", "mirror", "--policy"),
        ("policy", "pre-copy", "--policy"),
        ("pool", "fast", "where the disk is to be put"),
        ("into", "/dev/vg0/d", "where the disk is to be put"),
    ] {
        let request = json!({ "disk": "d", "to": "b", asked: value }).to_string();
        let refused = node.request("POST", "/v1/migrations", &request).await;
        assert_eq!(refused.status, 409, "{asked}: {}", refused.body);
        let error = refused.json();
        let (message, advice) = (error["message"].to_string(), error["hint"].to_string());
        assert!(message.contains("is older"), "{asked}: {message}");
        assert!(advice.contains(hint), "{asked}: {advice}");
    }
    assert_eq!(node.get("/v1/disks/d").await.json()["state"], "serving");
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_older_node_is_no_backup_of_a_machine() {
    let dir = MachineFolder::new();
    let mut config = plain("a", dir.path());
    config.peers = vec![
        peer("b", welcome_all("b", Features::default())),
        peer("c", welcome_all("c", Features::FOLLOWS)),
    ];
    let node = RunningNode::start(config).await;
    let disk = json!({ "name": "d", "size_bytes": 1 << 20 }).to_string();
    node.call("POST /v1/disks", &disk, 201).await;
    let machine = json!({
        "name": "v", "disks": ["d"], "memory_bytes": 64 << 20, "accelerator": "tcg", "arguments": ["-nodefaults"],
    });
    node.call("POST /v1/vms", &machine.to_string(), 201).await;
    let shown = async || node.get("/v1/vms/v").await.json();
    let runs = async || (shown().await["state"] == "running").then_some(());
    until("it runs", runs).await;
    let before = shown().await;
    for (to, why, hint) in [
        (
            "b",
            "is older and is no backup of machines",
            "choose another backup",
        ),
        (
            "c",
            "is older and takes no checkpoints",
            "or give --restart",
        ),
    ] {
        let request = json!({ "to": to, "when_alone": "stop" }).to_string();
        let refused = node.call("POST /v1/vms/v/protection", &request, 409).await;
        let error = refused.json();
        let (message, advice) = (error["message"].to_string(), error["hint"].to_string());
        assert!(message.contains(why) && advice.contains(hint), "{error}");
        assert_eq!(shown().await, before, "{to}");
    }
    node.stop_vm().await;
    node.stop().await;
}
