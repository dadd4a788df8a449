//! Virtual machines moving between two nodes, with real QEMUs.

use std::path::Path;
use std::time::Duration;

use crate::support::{self, MachineFolder, RunningNode, plain, says, stop_all, until};
use serde_json::{Value, json};

/// Starts two nodes with each other as peers.
async fn pair(dir: &Path) -> (RunningNode, RunningNode) {
    support::pair(plain("a", dir), plain("b", dir)).await
}

/// Returns a request for a machine whose firmware waits for something to boot from.
fn machine(disks: &[&str], arguments: &[&str]) -> String {
    json!({
        "name": "v",
        "disks": disks,
        "memory_bytes": 64 << 20,
        "accelerator": "tcg",
        "arguments": ([&["-nodefaults"], arguments].concat()),
    })
    .to_string()
}

async fn run(node: &RunningNode, arguments: &[&str]) -> Value {
    let started = node
        .call("POST /v1/vms", &machine(&[], arguments), 201)
        .await;
    started.json()
}

async fn ended(node: &RunningNode, id: &str) -> Value {
    let path = format!("/v1/migrations/{id}");
    let over = |seen: &Value| matches!(seen["phase"].as_str(), Some("completed" | "aborted"));
    until("it ends", async || {
        Some(node.get(&path).await.json()).filter(over)
    })
    .await
}

async fn migrate(node: &RunningNode, to: &str, memory: &str) -> Value {
    let body = json!({ "to": to, "memory": memory }).to_string();
    let started = node.call("POST /v1/vms/v/migrate", &body, 201).await;
    let id = started.json()["id"].as_str().expect("an id").to_owned();
    ended(node, &id).await
}

/// Moves the machine, which has to arrive.
async fn moves(node: &RunningNode, to: &str, memory: &str) -> Value {
    let moved = migrate(node, to, memory).await;
    assert_eq!(moved["phase"], "completed", "{moved}");
    moved
}

async fn state(node: &RunningNode) -> Value {
    node.get("/v1/vms/v").await.json()["state"].clone()
}

/// Returns the value of `godwit_NAME{LABELS}`.
async fn metric(node: &RunningNode, sample: &str) -> f64 {
    let metrics = node.get("/metrics").await.body;
    let wanted = format!("godwit_{sample} ");
    let value = metrics.lines().find_map(|line| line.strip_prefix(&*wanted));
    let value = value.unwrap_or_else(|| panic!("no {wanted} in:\n{metrics}"));
    value.parse().expect("a number")
}

async fn state_becomes(node: &RunningNode, wanted: &str) {
    let reached = async || (state(node).await == wanted).then_some(());
    until(wanted, reached).await;
}

/// Waits until the node has no machine and no disk.
async fn has_nothing(node: &RunningNode) {
    for path in ["/v1/vms", "/v1/disks"] {
        let none = async || (node.get(path).await.json() == json!([])).then_some(());
        until("nothing is left", none).await;
    }
}

/// Checks that the former node of a machine refuses all requests for the machine and names the owner.
async fn is_not_touched_from_where_it_was(node: &RunningNode, is_at: &str) {
    for (path, body) in [
        ("stop", r#"{"force":true}"#),
        ("stop", "{}"),
        ("migrate", r#"{"to":"elsewhere"}"#),
    ] {
        let path = format!("/v1/vms/v/{path}");
        let body = body.replace("elsewhere", is_at);
        let refused = node.request("POST", &path, &body).await;
        assert_eq!(refused.status, 409, "{path} {body}: {}", refused.body);
        let message = refused.json()["message"].to_string();
        assert!(
            message.contains(&format!("VM v moved to node '{is_at}'")),
            "{message}"
        );
    }
    assert_eq!(state(node).await, "departed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_left_is_forgotten_when_asked_and_one_that_is_here_is_not() {
    let dir = MachineFolder::new();
    let (a, b) = pair(dir.path()).await;
    run(&a, &[]).await;
    a.call("DELETE /v1/vms/v?force=true", "", 409).await;
    state_becomes(&a, "running").await;
    migrate(&a, "b", "pre-copy").await;
    a.call("DELETE /v1/vms/v", "", 204).await;
    assert_eq!(a.get("/v1/vms").await.json(), json!([]));
    state_becomes(&b, "running").await;
    b.stop_vm().await;
    stop_all([a, b]).await;
}

/// Returns QEMU's description of the guest's state.
async fn status(node: &RunningNode) -> String {
    node.get("/v1/vms/v").await.json()["status"].to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_stood_still_stands_still_after_its_move() {
    let dir = MachineFolder::new();
    let (a, b) = pair(dir.path()).await;
    // The QEMU left behind would remove a socket as it ends.
    let pipe = dir.path().join("own");
    for end in ["in", "out"] {
        let made = std::process::Command::new("mkfifo")
            .arg(pipe.with_extension(end))
            .status();
        assert!(made.expect("mkfifo").success());
    }
    let device = format!("pipe,id=own,path={}", pipe.display());
    let own = ["-chardev", &device, "-mon", "chardev=own,mode=readline"];
    let tell = |command: &str| {
        std::fs::write(pipe.with_extension("in"), format!("{command}\n")).expect("writes");
    };
    for memory in ["pre-copy", "post-copy", "hybrid"] {
        // A guest never started, and a guest stopped by its administrator.
        run(&a, &[&own[..], &["-S"]].concat()).await;
        let moved = moves(&a, "b", memory).await;
        assert_eq!(moved["blackout_ms"], Value::Null, "{moved}");
        assert_eq!(state(&b).await, "paused", "{}", status(&b).await);
        let still = status(&b).await;
        if memory == "pre-copy" {
            says(&still, "prelaunch");
        }
        tell("cont");
        state_becomes(&b, "running").await;
        tell("stop");
        state_becomes(&b, "paused").await;
        moves(&b, "a", memory).await;
        assert_eq!(state(&a).await, "paused", "{}", status(&a).await);
        tell("cont");
        state_becomes(&a, "running").await;
        // A running guest still runs afterwards.
        moves(&a, "b", memory).await;
        state_becomes(&b, "running").await;
        b.stop_vm().await;
        a.call("DELETE /v1/vms/v", "", 204).await;
    }
    stop_all([a, b]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_goes_there_and_back_with_its_memory() {
    let dir = MachineFolder::new();
    let (a, b) = pair(dir.path()).await;
    run(&a, &[]).await;
    for (from, to, name) in [(&a, &b, "b"), (&b, &a, "a")] {
        state_becomes(from, "running").await;
        let moved = moves(from, name, "pre-copy").await;
        let blackout = moved["blackout_ms"].as_f64().expect("a blackout");
        assert!(blackout > 0.0 && blackout < 5000.0, "{moved}");
        assert!(moved["memory_bytes"].as_u64() > Some(0), "{moved}");
        state_becomes(to, "running").await;
        assert_eq!(state(from).await, "departed");
        is_not_touched_from_where_it_was(from, name).await;
        assert_eq!(state(to).await, "running");
        println!("{moved}");
        assert_eq!(metric(to, r#"vm_state{vm="v",state="running"}"#).await, 1.0);
        assert_eq!(
            metric(from, r#"vm_state{vm="v",state="running"}"#).await,
            0.0
        );
        assert_eq!(
            metric(from, r#"vm_state{vm="v",state="departed"}"#).await,
            1.0
        );
        let told = metric(from, r#"vm_migration_blackout_seconds{vm="v"}"#).await;
        assert!(
            (told * 1000.0 - blackout).abs() < 0.001,
            "{told} s, {blackout} ms"
        );
        let done = r#"vm_migrations_remembered{outcome="completed"}"#;
        assert_eq!(metric(from, done).await, 1.0);
    }
    a.stop_vm().await;
    stop_all([a, b]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_may_follow_the_machine() {
    let dir = MachineFolder::new();
    let (a, b) = pair(dir.path()).await;
    run(&a, &[]).await;
    for (from, to, name, memory) in [(&a, &b, "b", "post-copy"), (&b, &a, "a", "hybrid")] {
        state_becomes(from, "running").await;
        let moved = moves(from, name, memory).await;
        state_becomes(to, "running").await;
        println!("{moved}");
    }
    a.stop_vm().await;
    stop_all([a, b]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_that_stands_in_the_way_is_named_at_once() {
    let dir = MachineFolder::new();
    let (a, b) = pair(dir.path()).await;
    let image = dir.path().join("own.raw");
    std::fs::write(&image, vec![0; 1 << 20]).expect("writes an image");
    let drive = format!("file={},format=raw,if=virtio", image.display());
    run(&a, &["-drive", &drive]).await;
    let own = json!({
        "name": "v", "memory_bytes": 16 << 20, "accelerator": "tcg",
        "arguments": ["-S", "-nodefaults"],
    });
    b.call("POST /v1/vms", &own, 201).await;
    let body = r#"{"to":"b"}"#;
    let refused = a.call("POST /v1/vms/v/migrate", body, 409).await;
    let message = refused.json()["message"].as_str().expect("text").to_owned();
    for part in ["2 things", "own.raw", "node 'b' has a VM named v"] {
        assert!(message.contains(part), "{part}: {message}");
    }
    assert_eq!(state(&a).await, "running");
    a.stop_vm().await;
    b.stop_vm().await;
    stop_all([a, b]).await;
}

/// Sends a command to QEMU on a monitor of the test's own.
fn tell(monitor: &Path, command: &Value) {
    use std::io::{BufRead as _, Write as _};
    let stream = std::os::unix::net::UnixStream::connect(monitor).expect("a monitor");
    let mut lines = std::io::BufReader::new(stream.try_clone().expect("a second end")).lines();
    for command in [&json!({ "execute": "qmp_capabilities" }), command] {
        writeln!(&stream, "{command}").expect("writes");
        let answer = lines.find_map(|line| {
            let line: Value = serde_json::from_str(&line.expect("reads")).expect("JSON");
            (line.get("return").is_some() || line.get("error").is_some()).then_some(line)
        });
        let answer = answer.expect("an answer");
        assert!(answer.get("error").is_none(), "{command}: {answer}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn devices_that_were_plugged_in_are_found_before_anything_is_copied() {
    let dir = MachineFolder::new();
    let (a, b) = pair(dir.path()).await;
    let monitor = dir.path().join("own.sock");
    let socket = format!(
        "socket,id=own,path={},server=on,wait=off",
        monitor.display()
    );
    let own = ["-chardev", &socket, "-mon", "chardev=own,mode=control"];
    let devices = [
        "-device",
        "pcie-root-port,id=port1,chassis=1",
        "-device",
        "pcie-root-port,id=port2,chassis=2",
        "-device",
        "virtio-rng-pci,id=rng0",
        "-device",
        "virtio-balloon-pci",
    ];
    run(&a, &[&own[..], &devices].concat()).await;
    for plugged in [
        json!({ "driver": "virtio-net-pci", "bus": "port1", "id": "net9" }),
        json!({ "driver": "virtio-rng-pci", "bus": "port2" }),
    ] {
        tell(
            &monitor,
            &json!({ "execute": "device_add", "arguments": plugged }),
        );
    }
    let body = r#"{"to":"b"}"#;
    let refused = a.call("POST /v1/vms/v/migrate", body, 409).await;
    let message = refused.json()["message"].as_str().expect("text").to_owned();
    let expected = "devices net9 (virtio-net-pci), device[1] (virtio-rng-pci) were plugged in";
    assert!(message.contains(expected), "{message}");
    assert_eq!(state(&a).await, "running");
    has_nothing(&b).await;
    a.stop_vm().await;
    // Without the plugged devices nothing prevents the move.
    run(&a, &[&own[..], &devices].concat()).await;
    moves(&a, "b", "pre-copy").await;
    b.stop_vm().await;
    stop_all([a, b]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_destination_that_cannot_take_the_machine_leaves_it_running_here() {
    let dir = MachineFolder::new();
    let (a, b) = pair(dir.path()).await;
    run(&a, &[]).await;
    // The folder of QEMU's sockets cannot be made.
    std::fs::write(dir.path().join("b/vms/v"), "").expect("writes a file");
    let moved = migrate(&a, "b", "pre-copy").await;
    assert_eq!(moved["phase"], "aborted", "{moved}");
    assert!(moved["error"]["message"].as_str().is_some(), "{moved}");
    assert_eq!(state(&a).await, "running");
    has_nothing(&b).await;
    a.call("POST /v1/vms/v/migrate", r#"{"to":"a"}"#, 400).await;
    a.call("POST /v1/vms/v/migrate", r#"{"to":"c"}"#, 422).await;
    a.stop_vm().await;
    stop_all([a, b]).await;
}

/// Makes disks on a node and runs a machine with these disks.
async fn run_on_disks(node: &RunningNode, disks: &[&str]) {
    for disk in disks {
        let body = json!({ "name": disk, "size_bytes": 16 << 20 }).to_string();
        node.call("POST /v1/disks", &body, 201).await;
    }
    node.call("POST /v1/vms", &machine(disks, &[]), 201).await;
}

async fn disk_states(node: &RunningNode) -> Vec<String> {
    let disks = node.get("/v1/disks").await.json();
    let disks = disks.as_array().expect("a list");
    let state = |disk: &Value| disk["state"].as_str().expect("a state").to_owned();
    disks.iter().map(state).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn all_disks_go_with_their_machine_and_come_back() {
    let dir = MachineFolder::new();
    let (a, b) = pair(dir.path()).await;
    run_on_disks(&a, &["root", "data"]).await;
    for (from, to, name, memory) in [
        (&a, &b, "b", "pre-copy"),
        (&b, &a, "a", "post-copy"),
        (&a, &b, "b", "hybrid"),
        (&b, &a, "a", "pre-copy"),
    ] {
        state_becomes(from, "running").await;
        let moved = moves(from, name, memory).await;
        assert_eq!(moved["disks"].as_array().map(Vec::len), Some(2), "{moved}");
        assert!(moved["switchover_ms"].as_f64().is_some(), "{moved}");
        state_becomes(to, "running").await;
        assert_eq!(disk_states(to).await, ["serving"; 2]);
        assert_eq!(disk_states(from).await, ["departed"; 2]);
        assert_eq!(state(from).await, "departed");
    }
    a.stop_vm().await;
    stop_all([a, b]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_belongs_to_its_machine() {
    let dir = MachineFolder::new();
    let (a, b) = pair(dir.path()).await;
    run_on_disks(&a, &["root"]).await;
    let alone = r#"{"disk":"root","to":"b"}"#;
    let refused = a.call("POST /v1/migrations", alone, 409).await;
    says(&refused.body, "vm/v");
    a.call("DELETE /v1/disks/root?force=true", "", 409).await;
    let second = json!({ "name": "w", "disks": ["root"], "accelerator": "tcg" }).to_string();
    a.call("POST /v1/vms", &second, 409).await;
    a.stop_vm().await;
    a.call("DELETE /v1/disks/root", "", 204).await;
    stop_all([a, b]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_move_that_is_cancelled_leaves_machine_and_disks_here() {
    let dir = MachineFolder::new();
    let (a, b) = pair(dir.path()).await;
    run_on_disks(&a, &["root", "data"]).await;
    state_becomes(&a, "running").await;
    // Slow enough to be cancelled while copying.
    let body = r#"{"to":"b","max_bandwidth":2097152}"#;
    let image = dir.path().join("a/disks/root.raw");
    std::fs::write(&image, vec![7; 16 << 20]).expect("writes what takes time to copy");
    let started = a.call("POST /v1/vms/v/migrate", body, 201).await;
    let id = started.json()["id"].as_str().expect("an id").to_owned();
    for (kind, subject) in [("vm", "vm/v"), ("disk", "root"), ("disk", "data")] {
        let listed = async || {
            let moves = a.get("/v1/migrations").await.json();
            let is = |one: &&Value| one["kind"] == kind && one["subject"] == subject;
            (moves.as_array()?.iter().filter(is).count() == 1).then_some(())
        };
        until(subject, listed).await;
    }
    let path = format!("/v1/migrations/{id}/cancel");
    let cancelled = a.call(&format!("POST {path}"), "{}", 200).await;
    assert_eq!(cancelled.json()["phase"], "aborted", "{}", cancelled.body);
    assert_eq!(state(&a).await, "running");
    assert_eq!(disk_states(&a).await, ["serving"; 2]);
    has_nothing(&b).await;
    moves(&a, "b", "pre-copy").await;
    b.stop_vm().await;
    stop_all([a, b]).await;
}

/// Returns a boot sector that writes to 512 KiB of memory, a byte of each page, over and over.
fn busy_sector() -> Vec<u8> {
    let mut sector = vec![
        0xb8, 0x00, 0x10, // start: mov ax, 0x1000
        0x8e, 0xc0, // page: mov es, ax
        0x26, 0xfe, 0x06, 0x00, 0x00, // inc byte [es:0]
        0x05, 0x00, 0x01, // add ax, 0x100
        0x3d, 0x00, 0x90, // cmp ax, 0x9000
        0x72, 0xf1, // jb page
        0xeb, 0xec, // jmp start
    ];
    sector.resize(510, 0);
    sector.extend([0x55, 0xaa]);
    sector
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_that_is_written_faster_than_it_is_sent_is_warned_of() {
    let dir = MachineFolder::new();
    let (a, b) = pair(dir.path()).await;
    let body = r#"{"name":"root","size_bytes":1048576}"#;
    a.call("POST /v1/disks", body, 201).await;
    let image = dir.path().join("a/disks/root.raw");
    let image = std::fs::File::options().write(true).open(image);
    let image = image.expect("the disk's image");
    std::os::unix::fs::FileExt::write_all_at(&image, &busy_sector(), 0).expect("a boot sector");
    let request = machine(&["root"], &[]);
    a.call("POST /v1/vms", &request, 201).await;
    state_becomes(&a, "running").await;
    // Until the firmware has read the boot sector, the guest writes next to nothing.
    let read = async || {
        a.get("/v1/disks/root").await.json()["io"]["reads"]
            .as_u64()
            .filter(|reads| *reads > 0)
    };
    until("the firmware reads", read).await;
    // In each pass the guest writes half of this, which is more than may be left for the blackout.
    let body = r#"{"to":"b","max_bandwidth":1048576}"#;
    let started = a.call("POST /v1/vms/v/migrate", body, 201).await;
    let id = started.json()["id"].as_str().expect("an id").to_owned();
    let path = format!("/v1/migrations/{id}");
    let warned = async || Some(a.get(&path).await.json()).filter(|it| it["warnings"] != json!([]));
    let seen = until("it is warned of", warned).await;
    let warning = seen["warnings"][0].as_str().unwrap_or_default();
    assert!(warning.contains("--memory post-copy or hybrid"), "{seen}");
    assert!(warning.contains("MiB/s sent"), "{seen}");
    assert_eq!(seen["phase"], "copying_memory", "it goes on");
    let cancelled = a.request("POST", &format!("{path}/cancel"), "{}").await;
    assert_eq!(cancelled.json()["phase"], "aborted", "{}", cancelled.body);
    assert_eq!(state(&a).await, "running");
    a.stop_vm().await;
    stop_all([a, b]).await;
}

/// Returns the arguments of the machine's QEMU.
async fn command_line(node: &RunningNode) -> Vec<String> {
    let pid = node.get("/v1/vms/v").await.json()["pid"].to_string();
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).expect("a process");
    let words = line.split(|&byte| byte == 0);
    words
        .map(|word| String::from_utf8_lossy(word).into_owned())
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn network_cards_keep_addresses_of_their_own() {
    let dir = MachineFolder::new();
    let (a, b) = pair(dir.path()).await;
    // The network card added by QEMU by default, with the same address for every machine.
    let usual = json!({ "name": "v", "memory_bytes": 64 << 20, "accelerator": "tcg" }).to_string();
    let mut seen = Vec::new();
    for _ in 0..2 {
        a.call("POST /v1/vms", &usual, 201).await;
        let card = |line: Vec<String>| {
            let cards: Vec<_> = line.into_iter().filter(|w| w.contains("mac=")).collect();
            let [card] = &cards[..] else {
                panic!("{cards:?}")
            };
            card.clone()
        };
        seen.push(card(command_line(&a).await));
        moves(&a, "b", "pre-copy").await;
        seen.push(card(command_line(&b).await));
        b.stop_vm().await;
    }
    assert!(seen[0].starts_with("user,mac="), "{seen:?}");
    // The cost is told in a warning before the move.
    let moves = a.get("/v1/migrations").await.json();
    says(&moves[0]["warnings"][0], "network card");
    assert!(seen.iter().all(|card| *card == seen[0]), "{seen:?}");
    stop_all([a, b]).await;
}

/// QEMU itself announces the machine's new place too early, before the move is decided. QEMU must announce again when
/// the guest runs.
#[tokio::test(flavor = "multi_thread")]
async fn cards_that_qemu_serves_are_announced_when_the_guest_runs() {
    const BY_ITSELF: usize = 5;
    let dir = MachineFolder::new();
    let (a, b) = pair(dir.path()).await;
    let network = std::net::UdpSocket::bind("127.0.0.1:0").expect("a socket");
    let port = network.local_addr().expect("an address").port();
    let own = std::net::UdpSocket::bind("127.0.0.1:0").expect("a socket");
    let theirs = own.local_addr().expect("an address").port();
    drop(own);
    let net = format!("socket,id=n,udp=127.0.0.1:{port},localaddr=127.0.0.1:{theirs}");
    run(&a, &["-netdev", &net, "-device", "e1000,netdev=n"]).await;
    moves(&a, "b", "pre-copy").await;
    network
        .set_read_timeout(Some(Duration::from_secs(2)))
        .expect("a limit");
    let mut frame = [0; 2048];
    let mut announced = 0;
    while let Ok(length) = network.recv(&mut frame) {
        announced += usize::from(frame[..length].get(12..14) == Some(&[0x80, 0x35]));
    }
    assert!(announced > BY_ITSELF, "{announced} announcements");
    b.stop_vm().await;
    stop_all([a, b]).await;
}
