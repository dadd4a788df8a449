//! Disks are made larger while served.

mod support;

use std::os::unix::fs::FileExt as _;

use serde_json::{Value, json};
use support::{RunningNode, plain};

const MIB: u64 = 1 << 20;

async fn create(node: &RunningNode, body: &Value) {
    node.call("POST /v1/disks", &body, 201).await;
}

async fn resize(node: &RunningNode, size: Option<u64>) -> support::Answer {
    let body = json!({ "size_bytes": size }).to_string();
    node.request("POST", "/v1/disks/d/resize", &body).await
}

/// Returns the size of disk "d", which must be served.
async fn size(node: &RunningNode) -> u64 {
    let disk = node.get("/v1/disks/d").await.json();
    assert_eq!(disk["serves"], true, "{disk}");
    disk["size_bytes"].as_u64().expect("a size")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_grows_durably_and_never_shrinks() {
    let dir = tempfile::tempdir().expect("a folder");
    let config = plain("a", dir.path());
    let node = RunningNode::start(config.clone()).await;
    create(&node, &json!({ "name": "d", "size_bytes": MIB })).await;
    let image = dir.path().join("a/disks/d.raw");
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(&image)
        .expect("opens");
    file.write_all_at(b"kept", MIB - 4).expect("writes");
    let grown = resize(&node, Some(3 * MIB)).await;
    assert_eq!(grown.status, 200, "{}", grown.body);
    assert_eq!(size(&node).await, 3 * MIB);
    for (wanted, status) in [(MIB, 400), (3 * MIB, 400), (3 * MIB + 1, 400)] {
        let refused = resize(&node, Some(wanted)).await;
        assert_eq!(refused.status, status, "{wanted}: {}", refused.body);
    }
    assert_eq!(
        resize(&node, None).await.status,
        409,
        "the image is as large as the disk"
    );
    node.stop().await;
    let node = RunningNode::start(config).await;
    assert_eq!(size(&node).await, 3 * MIB);
    let content = std::fs::read(&image).expect("reads");
    assert_eq!(content.len() as u64, 3 * MIB);
    assert_eq!(&content[MIB as usize - 4..][..8], b"kept\0\0\0\0");
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_was_made_larger_is_taken_as_it_is() {
    let dir = tempfile::tempdir().expect("a folder");
    let image = dir.path().join("own.raw");
    let file = std::fs::File::create(&image).expect("creates");
    file.set_len(MIB).expect("sets the length");
    let config = plain("a", dir.path());
    let node = RunningNode::start(config.clone()).await;
    create(
        &node,
        &json!({ "name": "d", "path": image, "format": "raw" }),
    )
    .await;
    file.set_len(2 * MIB).expect("sets the length");
    assert_eq!(resize(&node, None).await.status, 200);
    assert_eq!(size(&node).await, 2 * MIB);
    node.stop().await;
    // The same for a node that found the image larger at the start, and did not serve the disk.
    file.set_len(4 * MIB).expect("sets the length");
    let node = RunningNode::start(config).await;
    let failed = node.get("/v1/disks/d").await.json();
    let problem = failed["problem"].to_string();
    assert!(problem.contains("but its image"), "{failed}");
    assert_eq!(resize(&node, None).await.status, 200);
    assert_eq!(size(&node).await, 4 * MIB);
    node.stop().await;
}
