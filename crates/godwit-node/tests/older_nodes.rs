//! Requests unknown to older nodes.

mod support;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};

use serde_json::json;
use support::{RunningNode, peer, plain, receive, welcome};

/// Welcomes all connections as node `b`, which knows no features, and reads no further.
fn welcome_all() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("an address");
    let address = listener.local_addr().expect("it listens");
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            answer(stream.expect("a connection"));
        }
    });
    address
}

fn answer(mut stream: TcpStream) {
    receive(&mut stream);
    // A probing peer may be gone.
    let _ = stream.write_all(&welcome("b").encode());
    let _ = stream.read(&mut [0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_older_node_is_not_asked_for_what_it_does_not_know() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut config = plain("a", dir.path());
    config.peers = vec![peer("b", welcome_all())];
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
