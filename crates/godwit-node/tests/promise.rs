//! The promise of a migration to the guest, through the API.

mod support;

use std::os::unix::fs::FileExt as _;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use support::{RunningNode, plain, stop_all, until};

const MIB: u64 = 1 << 20;

/// Starts two nodes that know each other, the first with a disk.
async fn pair(dir: &Path) -> (RunningNode, RunningNode) {
    let (a, b) = support::pair(plain("a", dir), plain("b", dir)).await;
    let disk = json!({"name": "root", "size_bytes": 64 * MIB});
    a.call("POST /v1/disks", &disk, 201).await;
    (a, b)
}

/// Requests a move of the disk with these further options.
async fn migrate(node: &RunningNode, options: Value) -> (u16, Value) {
    let mut request = json!({"disk": "root", "to": "b"});
    let fields = request.as_object_mut().expect("an object");
    fields.extend(options.as_object().expect("an object").clone());
    let answer = node
        .request("POST", "/v1/migrations", &request.to_string())
        .await;
    (answer.status, answer.json())
}

async fn ended(node: &RunningNode, id: &str) -> Value {
    let path = format!("/v1/migrations/{id}");
    let ended = async || Some(node.get(&path).await.json()).filter(|it| it["ended_at"].is_string());
    until("the migration ends", ended).await
}

/// Reads a block of the disk again and again, as an NBD client.
fn read_often(socket: &Path, times: u32) {
    let mut stream = UnixStream::connect(socket).expect("the NBD socket");
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting).expect("a greeting");
    let name = b"root";
    let mut hello = vec![0, 0, 0, 3];
    hello.extend_from_slice(b"IHAVEOPT\x00\x00\x00\x01");
    hello.extend_from_slice(&(name.len() as u32).to_be_bytes());
    hello.extend_from_slice(name);
    stream.write_all(&hello).expect("sent");
    let mut export = [0; 10];
    stream.read_exact(&mut export).expect("the export");
    let mut request = vec![0x25, 0x60, 0x95, 0x13, 0, 0, 0, 0];
    request.extend_from_slice(&[0; 16]);
    request.extend_from_slice(&4096_u32.to_be_bytes());
    let mut answer = [0; 16 + 4096];
    for _ in 0..times {
        stream.write_all(&request).expect("sent");
        stream.read_exact(&mut answer).expect("an answer");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_promised_is_refused_before_anything_starts() {
    let dir = tempfile::tempdir().expect("a folder");
    let (a, b) = pair(dir.path()).await;
    let hurried = json!({"deadline_seconds": 1, "max_bandwidth": MIB, "policy": "double-write"});
    let path = dir.path().join("a/disks/root.raw");
    let image = std::fs::File::options().write(true).open(path);
    let data = vec![7; 64 * MIB as usize];
    let written = image.and_then(|image| image.write_all_at(&data, 0));
    written.expect("data that takes time to copy");
    for (options, given) in [
        (json!({"sla": "fast"}), "fast"),
        (json!({"sla": "p99<0ms"}), "p99<0ms"),
        (json!({"delayed_write_rate": 0}), "0"),
        (
            json!({"delayed_write_rate": MIB, "sla": "off"}),
            "without a promise",
        ),
        (
            json!({"delayed_write_rate": MIB, "delayed_writes": false}),
            "delayed writes",
        ),
        (json!({"deadline_seconds": 0}), "0 seconds"),
        (hurried, "64 MiB take at least 1m 04s"),
        (json!({"interface_budget": MIB}), "budget of an interface"),
        (json!({"interface": "lo"}), "interface"),
        (
            json!({"interface": "lo", "interface_budget": 0}),
            "interface",
        ),
        (
            json!({"interface": "no-such-if", "interface_budget": MIB}),
            "no-such-if",
        ),
    ] {
        let (status, error) = migrate(&a, options.clone()).await;
        assert_eq!(status, 400, "{options}: {error}");
        assert_eq!(error["code"], "invalid", "{options}: {error}");
        let message = error["message"].as_str().expect("a message");
        assert!(message.contains("root"), "{options}: {message}");
        assert!(message.contains(given), "{options}: {message}");
        assert!(error["hint"].is_string(), "{options}: {error}");
    }
    assert_eq!(a.get("/v1/migrations").await.json(), json!([]));
    let disk = a.get("/v1/disks/root").await.json();
    assert_eq!(disk["migration"], Value::Null, "{disk}");
    stop_all([a, b]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_promise_is_measured_against_the_guest() {
    let dir = tempfile::tempdir().expect("a folder");
    let (a, b) = pair(dir.path()).await;
    let socket = a.config.nbd_socket();
    tokio::task::spawn_blocking(move || read_often(&socket, 12_000))
        .await
        .expect("a client");
    let (status, error) = migrate(&a, json!({"sla": "p99.99<0.001us"})).await;
    assert_eq!(status, 400, "{error}");
    let message = error["message"].as_str().expect("a message");
    assert!(
        message.contains("disk root") && message.contains("half"),
        "{message}"
    );
    let (status, started) = migrate(&a, json!({"sla": "auto"})).await;
    assert_eq!(status, 201, "{started}");
    assert_eq!(started["options"]["sla_auto"], true, "{started}");
    let sla = started["options"]["sla"].as_str().expect("a target");
    assert!(sla.starts_with("p99.99<") && sla.ends_with("ms"), "{sla}");
    assert_ne!(sla, "p99.99<10ms", "the guest was not idle");
    let done = ended(&a, started["id"].as_str().expect("an id")).await;
    assert_eq!(done["phase"], "completed", "{done}");
    stop_all([a, b]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_migration_shows_what_it_promised_and_how_it_kept_it() {
    let dir = tempfile::tempdir().expect("a folder");
    let (a, b) = pair(dir.path()).await;
    let image = a.get("/v1/disks/root").await.json()["path"]
        .as_str()
        .expect("a path")
        .to_owned();
    // Zeroes would be copied in no time.
    std::fs::write(&image, vec![7; 64 << 20]).expect("written");
    let options = json!({
        "max_bandwidth": 16 * MIB, "deadline_seconds": 3600,
        "interface": "lo", "interface_budget": 1_u64 << 40,
    });
    let (status, started) = migrate(&a, options).await;
    assert_eq!(status, 201, "{started}");
    assert_eq!(
        started["options"]["sla"], "p99.99<10ms",
        "an idle guest: {started}"
    );
    assert_eq!(started["options"]["delayed_writes"], true, "{started}");
    assert_eq!(started["options"]["deadline_seconds"], 3600, "{started}");
    assert_eq!(started["warnings"], json!([]), "{started}");
    let id = started["id"].as_str().expect("an id").to_owned();
    let path = format!("/v1/migrations/{id}");
    let running = loop {
        let migration = a.get(&path).await.json();
        assert_eq!(migration["ended_at"], Value::Null, "{migration}");
        if migration["eta_seconds"].is_number() {
            break migration;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    let promise = &running["promise"];
    assert_eq!(promise["limit_us"], 10_000, "{promise}");
    assert_eq!(promise["obstacle"], Value::Null, "{promise}");
    assert_eq!(promise["pauses"]["guest_latency"], 0, "{promise}");
    let metrics = a.get("/metrics").await.body;
    for name in [
        "godwit_migration_pauses{disk=\"root\"",
        "reason=\"link_queue\"} 0",
        "godwit_migration_delayed_bytes{",
        "godwit_migration_breached_periods{",
    ] {
        assert!(metrics.contains(name), "{name}: {metrics}");
    }
    let done = ended(&a, &id).await;
    assert_eq!(done["phase"], "completed", "{done}");
    assert!(done["promise"].is_object(), "{done}");
    stop_all([a, b]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_for_the_end_is_not_answered_before_unless_it_takes_long() {
    let dir = tempfile::tempdir().expect("a folder");
    let (a, b) = pair(dir.path()).await;
    let disk = a.get("/v1/disks/root").await.json();
    let image = disk["path"].as_str().expect("a path");
    std::fs::write(image, vec![7; 64 << 20]).expect("written");
    let (status, started) = migrate(&a, json!({"max_bandwidth": 32 * MIB})).await;
    assert_eq!(status, 201, "{started}");
    let path = format!("/v1/migrations/{}", started["id"].as_str().expect("an id"));
    let mut asked = 0;
    let done = loop {
        // Longer than the longest allowed wait.
        let shown = a.get(&format!("{path}?wait_ms=60000")).await.json();
        asked += 1;
        if shown["ended_at"].is_string() {
            break shown;
        }
        assert!(asked < 20, "{shown}");
    };
    assert_eq!(done["phase"], "completed", "{done}");
    assert!(asked > 1, "at most a second: {done}");
    a.call(&format!("GET {path}?wait_ms=soon"), "", 400).await;
    stop_all([a, b]).await;
}
