//! Moves of processes: all obstacles are reported at once, and a hostile peer gets nowhere.

mod support;
#[path = "processes/turns.rs"]
mod turns;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use godwit_core::units::MigrationId;
use godwit_core::wire::{Greeting, Purpose, Reply};
use godwit_node::{NodeConfig, ProcessesConfig};
use serde_json::{Value, json};
use support::{RunningNode, hello, pair, peer, plain, receive, says, send, stop_all};

fn taking_part(name: &str, dir: &std::path::Path) -> NodeConfig {
    NodeConfig {
        processes: Some(ProcessesConfig {
            files: vec![dir.join("jobs")],
        }),
        ..plain(name, dir)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_moves_processes_only_if_it_was_told_to() {
    let dir = tempfile::tempdir().expect("a folder");
    let node = RunningNode::start(plain("a", dir.path())).await;
    for path in ["/v1/processes", "/v1/processes/1"] {
        let answer = node.call(&format!("GET {path}"), "", 409).await;
        says(&answer.body, "--processes");
    }
    node.call("POST /v1/processes/1/migrate", r#"{"to":"b"}"#, 409)
        .await;
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_in_the_way_is_told_at_once_and_nothing_is_touched() {
    let dir = tempfile::tempdir().expect("a folder");
    std::fs::create_dir(dir.path().join("jobs")).expect("a folder");
    let (a, b) = (taking_part("a", dir.path()), taking_part("b", dir.path()));
    let (a, b) = pair(a, b).await;
    // A process without RDMA and without children.
    let mut process = std::process::Command::new("sleep")
        .arg("1000")
        .spawn()
        .expect("it starts");
    let own = process.id();
    let path = format!("/v1/processes/{own}/migrate");
    let answer = a
        .call(
            &format!("POST {path}"),
            r#"{"to":"b","files":["/etc/hostname","relative"]}"#,
            409,
        )
        .await;
    let message = answer.json()["message"]
        .as_str()
        .expect("a message")
        .to_owned();
    for reason in [
        format!("the destination has a process {own} already"),
        "the destination takes no file /etc/hostname".to_owned(),
        "the destination takes no file relative".to_owned(),
        "the file \"relative\"".to_owned(),
    ] {
        let named = message
            .lines()
            .filter(|line| line.contains(&reason))
            .count();
        assert_eq!(named, 1, "{reason}: {message}");
    }
    for (body, status, word) in [
        (r#"{"to":"c"}"#, 422, "no peer named"),
        (r#"{"to":"a"}"#, 400, "already"),
        (
            r#"{"to":"b","address":"10.0.0.1/24"}"#,
            400,
            "no IP address",
        ),
        (r#"{"to":"b","address":"fd00::1"}"#, 400, "IPv6"),
        (r#"{"to":"b","more":1}"#, 400, "not valid"),
    ] {
        let answer = a.request("POST", &path, body).await;
        assert_eq!(answer.status, status, "{}", answer.body);
        assert!(answer.body.contains(word), "{}", answer.body);
    }
    for path in [
        "/v1/processes/x",
        "/v1/processes/4294967296",
        "/v1/migrations/77777777777777777777777777777777",
    ] {
        assert_eq!(a.get(path).await.status, 404, "{path}");
    }
    // With or without runc, this host has no such container.
    let path = "/v1/containers/no-such-container/migrate";
    let answer = a.request("POST", path, r#"{"to":"b"}"#).await;
    assert!([404, 409].contains(&answer.status), "{}", answer.body);
    says(&answer.body, "runc");
    a.call(
        &format!("POST {path}"),
        r#"{"to":"b","pre_setup":true}"#,
        400,
    )
    .await;
    assert_eq!(a.get("/v1/migrations").await.json(), json!([]));
    for node in [&a, &b] {
        let kept = std::fs::read_dir(node.config.data_dir.join("processes")).expect("a folder");
        assert_eq!(kept.count(), 0);
    }
    let runs = process.try_wait().expect("it is a child");
    assert!(runs.is_none(), "{runs:?}");
    process.kill().expect("it runs");
    process.wait().expect("it ends");
    stop_all([a, b]).await;
}

/// A connection of node `a` about a move.
struct Peer(TcpStream);

impl Peer {
    fn connect(to: &NodeConfig, migration: u8) -> Self {
        Self::connect_as("a", to, migration)
    }

    fn connect_as(name: &str, to: &NodeConfig, migration: u8) -> Self {
        let mut stream = TcpStream::connect(to.listen).expect("it listens");
        stream
            .set_read_timeout(Some(Duration::from_secs(20)))
            .expect("a timeout");
        send(&mut stream, &hello(Purpose::Process, name, migration, ""));
        let reply = receive(&mut stream);
        assert!(
            matches!(reply, Greeting::Reply(Reply::Welcome { .. })),
            "{reply:?}"
        );
        Self(stream)
    }

    fn ask(&mut self, message: &Value) -> Value {
        let body = message.to_string();
        self.0
            .write_all(&(body.len() as u32).to_le_bytes())
            .expect("it is there");
        self.0.write_all(body.as_bytes()).expect("it is there");
        self.hear()
    }

    fn hear(&mut self) -> Value {
        let mut length = [0; 4];
        self.0.read_exact(&mut length).expect("an answer");
        let mut body = vec![0; u32::from_le_bytes(length) as usize];
        self.0.read_exact(&mut body).expect("all of it");
        serde_json::from_slice(&body).expect("JSON")
    }
}

fn image(name: &str, bytes: u64) -> Value {
    let file = json!({"name": name, "bytes": bytes, "mode": 0o600, "uid": 0, "gid": 0});
    json!({"image": {"pid": 7, "layout": "1 2 3 4 5", "address": null, "image": [file], "files": []}})
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hostile_peer_gets_nowhere() {
    let dir = tempfile::tempdir().expect("a folder");
    std::fs::create_dir(dir.path().join("jobs")).expect("a folder");
    let mut config = taking_part("b", dir.path());
    config.peers = vec![peer("a", support::free_address())];
    let node = RunningNode::start(config).await;
    let config = node.config.clone();
    let checked = tokio::task::spawn_blocking(move || {
        let mut hostile = Peer::connect(&config, 9);
        // A process not found on this connection is not held, connected or let go.
        let own = std::process::id();
        for request in [
            json!({"do": "suspend", "only": null}),
            json!({"do": "suspend", "only": [1]}),
            json!({"do": "release"}),
            json!({"do": "recreate", "device": null}),
            json!({"do": "connect", "connections": []}),
            json!({"do": "prepare", "connections": []}),
            json!({"do": "switch", "numbers": [], "remote_keys": []}),
            json!({"do": "abandon", "only": []}),
            json!({"do": "tidy"}),
            json!({"do": "plan"}),
        ] {
            let said = hostile.ask(&json!({"partner": {"pid": own, "request": request}}));
            assert!(said["refused"].is_string(), "{said}");
        }
        for request in [
            json!({"do": "resume", "only": null}),
            json!({"do": "release"}),
            json!({"do": "status"}),
            json!({"do": "attach", "holder": 1}),
        ] {
            let said = hostile.ask(&json!({"moved": {"request": request}}));
            assert!(said["refused"].is_string(), "{said}");
        }
        // Nothing is made ahead for a missing device, and nothing unmade is connected.
        let object = json!({"id": 1, "call": {"kind": "context"}, "cookie": 0, "details": {"device": "none"}});
        let path = std::env::var_os("PATH").unwrap_or_default();
        let holds = std::env::split_paths(&path).any(|dir| dir.join("godwit-verbs").exists());
        let why = if holds {
            "this host has no RDMA device"
        } else {
            "`godwit-verbs hold` cannot be run"
        };
        let threads: Vec<u32> = (0..=1 << 15).collect();
        for (ask, why) in [
            (
                json!({"connect_held": {"connections": []}}),
                "nothing was made ahead",
            ),
            (
                json!({"hold": {"pid": 7, "threads": threads, "plan": {"name": 1, "objects": []}}}),
                "threads",
            ),
            (
                json!({"hold": {"pid": 7, "plan": {"name": 1, "objects": [object]}}}),
                why,
            ),
            (
                json!({"connect_held": {"connections": []}}),
                "nothing was made ahead",
            ),
        ] {
            let said = hostile.ask(&ask);
            says(&said["refused"], why);
        }
        assert_eq!(hostile.ask(&json!("give_up_held")), json!("done"));
        // A missing image is not restored, and the answer stands.
        for ask in ["restore", "settle", "restore"] {
            assert!(hostile.ask(&json!(ask))["not_here"].is_string());
        }
        assert!(hostile.ask(&json!("recreate"))["refused"].is_string());
        // Names, lengths and numbers of an image.
        for name in ["../x.img", "/etc/x.img", "x", "-D.img", ""] {
            let said = hostile.ask(&image(name, 1));
            says(&said["refused"], "no name");
        }
        let said = hostile.ask(&image("core-7.img", u64::MAX));
        says(&said["refused"], "are free");
        for (key, value) in [
            ("pid", json!(1)),
            ("pid", json!(u32::MAX)),
            ("layout", json!("1 2 3")),
            (
                "address",
                json!({"address": "10.0.0.1", "prefix": 24, "interface": "x; reboot"}),
            ),
            (
                "files",
                json!([{"name": "/etc/shadow", "bytes": 0, "mode": 0o4777, "uid": 0, "gid": 0}]),
            ),
            (
                "files",
                json!([{"name": dir_of(&config, "jobs/../x"), "bytes": 0, "mode": 0, "uid": 0, "gid": 0}]),
            ),
        ] {
            let mut offer = image("core-7.img", 1);
            offer["image"][key] = value.clone();
            let said = hostile.ask(&offer);
            assert!(said["refused"].is_string(), "{key} {value}: {said}");
        }
        // An image with the wrong hash leaves nothing.
        assert_eq!(hostile.ask(&image("core-7.img", 4)), json!("ready"));
        hostile.0.write_all(&[7; 4 + 32]).expect("it is there");
        says(&hostile.hear(), "another content");
        // Bytes other than a message end the connection, and do no more.
        for bytes in [&b"\xff\xff\xff\xff"[..], b"\x02\0\0\0{}", b"\x04\0\0\0oops"] {
            let mut other = Peer::connect(&config, 8);
            other.0.write_all(bytes).expect("it is there");
            let mut rest = Vec::new();
            let _ = other.0.read_to_end(&mut rest);
            assert_eq!(rest, b"");
        }
        let kept = std::fs::read_dir(config.data_dir.join("processes")).expect("a folder");
        assert_eq!(kept.count(), 0);
    });
    checked.await.expect("all is refused");
    assert_eq!(node.get("/v1/node").await.status, 200);
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_destination_keeps_its_answer_and_no_image_and_denies_nothing_that_it_cannot_read() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut config = taking_part("b", dir.path());
    config.peers = vec![peer("a", support::free_address())];
    let node = RunningNode::start(config).await;
    let config = node.config.clone();
    let checked = tokio::task::spawn_blocking(move || {
        let place = |migration: u8| {
            let id = MigrationId([migration; 16]).to_string();
            config.data_dir.join("processes").join(id)
        };
        // An image from which CRIU cannot restore a process.
        let mut source = Peer::connect(&config, 3);
        assert_eq!(source.ask(&image("core-7.img", 4)), json!("ready"));
        source.0.write_all(b"none").expect("it is there");
        source
            .0
            .write_all(blake3::hash(b"none").as_bytes())
            .expect("it is there");
        assert_eq!(source.hear(), json!("done"));
        assert!(place(3).join("image/core-7.img").exists());
        assert!(source.ask(&json!("restore"))["not_here"].is_string());
        assert!(!place(3).exists());
        assert!(source.ask(&json!("settle"))["not_here"].is_string());
        let said = source.ask(&image("core-7.img", 4));
        assert!(
            said["refused"]
                .as_str()
                .is_some_and(|why| why.contains("known here already")),
            "{said}"
        );
        // An unreadable record of the last version tells nothing of the process.
        let mut other = Peer::connect(&config, 4);
        std::fs::create_dir_all(place(4).join("arrival.json")).expect("a folder");
        for ask in ["restore", "settle", "recreate"] {
            let said = other.ask(&json!(ask));
            says(&said["refused"], "cannot be read");
        }
    });
    checked.await.expect("all is so");
    node.stop().await;
}

fn dir_of(config: &NodeConfig, below: &str) -> String {
    let base = config.data_dir.parent().expect("a folder");
    base.join(below).display().to_string()
}
