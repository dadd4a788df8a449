//! Virtual machines, with a real QEMU and a guest that never runs.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::support::{MachineFolder, RunningNode, plain, says, until};
use godwit_node::{MemoryPoolConfig, NodeConfig};
use serde_json::{Value, json};

/// Starts node "a".
async fn node() -> (MachineFolder, RunningNode) {
    let dir = MachineFolder::new();
    let node = RunningNode::start(plain("a", dir.path())).await;
    (dir, node)
}

/// Returns a request for a machine whose guest never runs.
fn idle(name: &str) -> String {
    json!({
        "name": name,
        "memory_bytes": 16 << 20,
        "accelerator": "tcg",
        "arguments": ["-S", "-nodefaults"],
    })
    .to_string()
}

const DISK: &str = r#"{"name":"d","size_bytes":1048576}"#;

async fn run(node: &RunningNode, body: &str) -> Value {
    node.call("POST /v1/vms", body, 201).await.json()
}

fn alive(pid: u64) -> bool {
    // A zombie is dead, although still listed.
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

async fn gone(pid: u64) {
    until("the process ends", async || (!alive(pid)).then_some(())).await;
}

/// Waits until the node knows that VM "v" has no QEMU any more. Returns the VM's view.
async fn stopped(node: &RunningNode) -> Value {
    let seen = async || Some(node.get("/v1/vms/v").await.json());
    let stopped = async || seen().await.filter(|vm| vm["state"] == "stopped");
    until("it is stopped", stopped).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_outlives_its_node_and_ends_when_it_is_stopped() {
    let dir = MachineFolder::new();
    let first = RunningNode::start(plain("a", dir.path())).await;
    let vm = run(&first, &idle("v")).await;
    assert_eq!(vm["state"], "paused", "{vm}");
    assert_eq!(vm["origin"], "run", "{vm}");
    let pid = vm["pid"].as_u64().expect("a process");
    let console = vm["console"].as_str().expect("a console").to_owned();
    UnixStream::connect(&console).expect("the console takes connections");
    first.call("POST /v1/vms", &idle("v"), 409).await;
    first.stop().await;
    assert!(alive(pid), "the node's end is not the VM's");

    let second = RunningNode::start(plain("a", dir.path())).await;
    let vm = second.get("/v1/vms/v").await.json();
    assert_eq!(vm["pid"], pid, "{vm}");
    assert_eq!(vm["state"], "paused", "{vm}");
    second.stop_vm().await;
    gone(pid).await;
    assert_eq!(second.get("/v1/vms").await.json(), json!([]));
    second.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn qemu_runs_in_its_sandbox_unless_the_node_was_told_otherwise() {
    let mode = |process: &str| {
        let status = std::fs::read_to_string(format!("/proc/{process}/status")).expect("runs");
        let mode = status
            .lines()
            .find_map(|line| line.strip_prefix("Seccomp:"));
        mode.expect("a mode").trim().to_owned()
    };
    // This process may be confined itself.
    let unconfined = mode("self");
    for (sandbox, expected) in [(true, "2"), (false, &*unconfined)] {
        let dir = MachineFolder::new();
        let mut config = plain("a", dir.path());
        config.qemu_sandbox = sandbox;
        let node = RunningNode::start(config).await;
        let vm = run(&node, &idle("v")).await;
        assert_eq!(mode(&vm["pid"].to_string()), expected, "sandbox: {sandbox}");
        node.stop_vm().await;
        node.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_does_not_listen_is_stopped_by_force_only() {
    let (_dir, node) = node().await;
    let vm = run(&node, &idle("v")).await;
    let asked = node
        .call("POST /v1/vms/v/stop", r#"{"timeout_seconds":1}"#, 409)
        .await;
    says(&asked.body, "--force");
    assert_eq!(node.get("/v1/vms/v").await.json()["state"], "paused");
    node.stop_vm().await;
    gone(vm["pid"].as_u64().expect("a process")).await;
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_qemu_that_dies_is_noticed_and_its_name_is_free() {
    let (_dir, node) = node().await;
    let pid = run(&node, &idle("v")).await["pid"].to_string();
    let killed = Command::new("kill").args(["-9", &pid]).status();
    assert!(killed.expect("kill runs").success());
    let seen = stopped(&node).await;
    assert!(seen["problem"].as_str().is_some(), "{seen}");
    run(&node, &idle("v")).await;
    node.stop_vm().await;
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_cannot_start_says_why_and_leaves_nothing() {
    let (dir, node) = node().await;
    for (body, status, expected) in [
        (json!({ "name": "v", "disks": ["none"] }), 404, "none"),
        (
            json!({ "name": "v", "arguments": ["-nonsense"] }),
            400,
            "nonsense",
        ),
        (
            json!({ "name": "v", "qemu": "/no/such/qemu" }),
            400,
            "/no/such/qemu",
        ),
        (
            json!({ "name": "v", "machine": "no-such-machine" }),
            400,
            "no-such-machine",
        ),
        (json!({ "name": "../v" }), 400, "../v"),
    ] {
        let answer = node.request("POST", "/v1/vms", &body.to_string()).await;
        assert_eq!(answer.status, status, "{body}: {}", answer.body);
        assert!(answer.body.contains(expected), "{body}: {}", answer.body);
        if let Some(hint) = answer.json()["hint"].as_str() {
            let named = hint.split_whitespace().filter(|word| word.starts_with('/'));
            let gone: Vec<_> = named.filter(|path| !Path::new(path).exists()).collect();
            assert_eq!(gone, [""; 0], "{body} points at what is not there: {hint}");
        }
        assert_eq!(node.get("/v1/vms").await.json(), json!([]), "{body}");
    }
    let left: Vec<_> = std::fs::read_dir(dir.path().join("a/vms"))
        .expect("the folder of VMs")
        .collect();
    assert!(left.is_empty(), "{left:?}");
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_runs_is_told_and_not_its_disk() {
    let (_dir, node) = node().await;
    node.call("POST /v1/disks", DISK, 201).await;
    let body = json!({
        "name": "v", "disks": ["d"], "accelerator": "tcg", "memory_bytes": 16 << 20,
        "arguments": ["-S", "-nodefaults"],
    });
    run(&node, &body.to_string()).await;
    let again = node.call("POST /v1/vms", &body, 409).await;
    says(&again.body, "a VM named \\\"v\\\" is");
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_machine_tells_why_after_a_restart() {
    let dir = MachineFolder::new();
    let config = plain("a", dir.path());
    for (killed_while_node_runs, expected) in [(true, "QEMU ended"), (false, "did not run")] {
        let node = RunningNode::start(config.clone()).await;
        let pid = run(&node, &idle("v")).await["pid"].as_u64().expect("a pid");
        let kill = || {
            let pid = rustix::process::Pid::from_raw(pid as i32).expect("a pid");
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("kills");
        };
        if killed_while_node_runs {
            kill();
            stopped(&node).await;
            node.stop().await;
        } else {
            node.stop().await;
            kill();
            gone(pid).await;
        }
        let node = RunningNode::start(config.clone()).await;
        let seen = stopped(&node).await;
        let status = seen["status"].as_str().expect("a status");
        assert!(status.contains(expected), "{status}");
        assert!(
            seen["command"].to_string().contains("-nodefaults"),
            "{seen}"
        );
        node.stop().await;
    }
}

/// Writes a program that claims to be a QEMU of this version. Called without `--version`, the program prints its
/// arguments and fails.
fn fake_qemu(dir: &Path, version: &str) -> String {
    let path = dir.join("qemu-system-x86_64");
    let script = format!(
        "#!/bin/sh\ncase $1 in --version) echo QEMU emulator version {version};; *) echo \"$@\" >&2; exit 1; esac\n"
    );
    std::fs::write(&path, script).expect("writes");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&path, mode).expect("sets the mode");
    path.display().to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_qemu_is_told_to_reconnect_as_it_understands() {
    let (dir, node) = node().await;
    node.call("POST /v1/disks", DISK, 201).await;
    for (version, expected) in [("7.2.22", ",reconnect=1 "), ("9.2.0", ",reconnect-ms=100 ")] {
        let qemu = fake_qemu(dir.path(), version);
        let body = json!({ "name": "v", "disks": ["d"], "qemu": qemu }).to_string();
        let refused = node.request("POST", "/v1/vms", &body).await;
        assert!(
            refused.body.contains(expected),
            "{version}: {}",
            refused.body
        );
    }
    node.stop().await;
}

/// `GODWIT_OLD_QEMU` is the path of a QEMU before 9.2, such as Debian 12's.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a QEMU before 9.2"]
async fn a_real_qemu_before_9_2_runs_a_machine() {
    let qemu = std::env::var("GODWIT_OLD_QEMU").expect("GODWIT_OLD_QEMU is set");
    let (_dir, node) = node().await;
    node.call("POST /v1/disks", DISK, 201).await;
    let body = json!({
        "name": "v", "disks": ["d"], "qemu": qemu, "accelerator": "tcg", "memory_bytes": 64 << 20,
        "arguments": ["-nodefaults"],
    });
    let started = run(&node, &body.to_string()).await;
    let version = started["qemu_version"].as_str().expect("a version");
    assert!(!version.starts_with("10."), "{version}");
    node.stop_vm().await;
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_gets_no_kvm_says_why() {
    let (_dir, node) = node().await;
    let asked = |accelerator: &str| {
        let arguments = ["-S", "-nodefaults"];
        json!({ "name": "v", "memory_bytes": 16 << 20, "accelerator": accelerator, "arguments": arguments })
            .to_string()
    };
    for (accelerator, may_warn) in [("auto", true), ("tcg", false)] {
        let started = run(&node, &asked(accelerator)).await;
        let warned = started["warnings"].to_string().contains("instead of KVM: ");
        assert_eq!(
            warned,
            may_warn && started["accelerator"] == "tcg",
            "{started}"
        );
        node.stop_vm().await;
    }
    node.stop().await;
}

/// A QEMU not started by the node; killed on drop.
struct Foreign(Child);

impl Drop for Foreign {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn foreign(qmp: &Path, further: &[&str]) -> Foreign {
    let monitor = format!("unix:{},server=on,wait=off", qmp.display());
    let child = Command::new("qemu-system-x86_64")
        .args(["-S", "-nodefaults", "-display", "none"])
        .args(["-accel", "tcg", "-m", "16M"])
        .args(["-qmp", &monitor])
        .args(further)
        .stdin(Stdio::null())
        .spawn()
        .expect("QEMU starts");
    let foreign = Foreign(child);
    let listens = async || UnixStream::connect(qmp).ok();
    let mut monitor = until("QEMU listens", listens).await;
    // QEMU listens before opening its memory's files, and greets afterwards.
    let limit = monitor.set_read_timeout(Some(Duration::from_secs(20)));
    limit.expect("a limit");
    monitor.read_exact(&mut [0]).expect("QEMU greets");
    foreign
}

#[tokio::test(flavor = "multi_thread")]
async fn a_qemu_that_somebody_else_started_is_adopted_once() {
    let (dir, node) = node().await;
    let socket = dir.path().join("qmp");
    let missing = json!({ "name": "v", "qmp": socket }).to_string();
    node.call("POST /v1/vms/adopt", &missing, 409).await;
    let relative = r#"{"name":"v","qmp":"qmp"}"#;
    node.call("POST /v1/vms/adopt", relative, 400).await;

    let mut other = foreign(&socket, &[]).await;
    let adopted = node.call("POST /v1/vms/adopt", &missing, 201).await;
    let vm = adopted.json();
    assert_eq!(vm["pid"], other.0.id(), "{vm}");
    assert_eq!(vm["origin"], "adopted", "{vm}");
    assert_eq!(vm["console"], Value::Null, "{vm}");
    let twice = json!({ "name": "w", "qmp": socket }).to_string();
    node.call("POST /v1/vms/adopt", &twice, 409).await;
    node.stop_vm().await;
    other.0.wait().expect("QEMU ended");
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_adopted_qemu_brings_its_disks_if_its_memory_is_shared() {
    let (dir, node) = node().await;
    node.call(
        "POST /v1/disks",
        r#"{"name":"root","size_bytes":1048576}"#,
        201,
    )
    .await;
    let backend = format!(
        "socket,id=d,path={}",
        dir.path().join("a/disks/root.vhost").display()
    );
    let disk = [
        "-chardev",
        &backend,
        "-device",
        "vhost-user-blk-pci,chardev=d",
    ];
    let socket = dir.path().join("qmp");
    let request = json!({ "name": "v", "qmp": socket }).to_string();
    {
        let _private = foreign(&socket, &disk).await;
        let refused = node.call("POST /v1/vms/adopt", &request, 409).await;
        says(&refused.body, "share=on");
    }
    std::fs::remove_file(&socket).expect("the dead QEMU's socket is there");
    let memory = [
        "-object",
        "memory-backend-memfd,id=m,size=16M,share=on",
        "-machine",
        "memory-backend=m",
    ];
    let _shared = foreign(&socket, &[&disk[..], &memory[..]].concat()).await;
    let adopted = node.call("POST /v1/vms/adopt", &request, 201).await;
    assert_eq!(adopted.json()["disks"], json!(["root"]));
    node.stop().await;
}

/// An adoption is refused if the memory could not be given to another node. Otherwise a segment of the machine's name
/// is made.
#[tokio::test(flavor = "multi_thread")]
async fn an_adopted_qemu_s_memory_in_a_pool_is_a_segment_of_it() {
    let dir = MachineFolder::new();
    let (pool, other) = (dir.path().join("pool"), dir.path().join("other"));
    let node = RunningNode::start(with_pools(dir.path(), &[&pool, &other])).await;
    std::fs::create_dir(pool.join("sub")).expect("a folder");
    let socket = dir.path().join("qmp");
    let request = json!({ "name": "v", "qmp": socket }).to_string();
    let is_refused = async |why: &str| {
        let refused = node.call("POST /v1/vms/adopt", &request, 409).await;
        says(&refused.body, why);
    };
    let frees = || std::fs::remove_file(&socket).expect("the dead QEMU's socket is there");
    let memory = |file: &str, options: &str| {
        let path = pool.join(file);
        format!(
            "memory-backend-file,id=m,size=16M,mem-path={}{options}",
            path.display()
        )
    };
    let machine = ["-machine", "memory-backend=m"];
    let name = "adopt it under the name of its file";
    let in_json = json!({
        "qom-type": "memory-backend-file", "id": "m", "size": 16 << 20, "share": true,
        "mem-path": pool.join("v.memory"),
    });
    for (memory, why) in [
        (memory("w.memory", ",share=on"), name),
        (memory("v.ram", ",share=on"), name),
        (memory("sub/v.memory", ",share=on"), name),
        (in_json.to_string(), "told of it in JSON"),
        (memory("v.memory", ""), "it is not shared"),
        (memory("v.memory", ",share=false"), "it is not shared"),
        (memory("v.memory", ",share=on,discard-data=on"), "wipe it"),
    ] {
        let _foreign = foreign(&socket, &[&["-object", &memory], &machine[..]].concat()).await;
        is_refused(why).await;
        let none = node.get("/v1/vms").await.json();
        assert_eq!(none, json!([]));
        frees();
    }
    let shared = memory("v.memory", ",share=on");
    let words = [&["-object", &shared], &machine[..]].concat();
    {
        let _foreign = foreign(&socket, &words).await;
        // Another file replaces QEMU's.
        std::fs::remove_file(pool.join("v.memory")).expect("is there");
        std::fs::write(pool.join("v.memory"), vec![0; 16 << 20]).expect("writes");
        is_refused("where it should be").await;
        frees();
    }
    {
        let slot = [
            "-object",
            "memory-backend-ram,id=n,size=16M",
            "-device",
            "pc-dimm,memdev=n",
        ];
        let larger = [&words[..], &["-m", "16M,slots=1,maxmem=64M"], &slot[..]].concat();
        let _foreign = foreign(&socket, &larger).await;
        is_refused("32 MiB, and its file 16 MiB").await;
        frees();
    }
    assert!(!pool.join("v.segment").exists(), "nothing was taken");
    // The memory is in the pool however QEMU was told: here after other memory, and by a relative path.
    let beside = format!(
        "memory-backend-file,id=n,size=2M,share=on,mem-path={}",
        dir.path().join("beside").display()
    );
    let folder = std::env::current_dir().expect("a folder");
    let up = "../".repeat(folder.components().count());
    let shared = format!(
        "qom-type=memory-backend-file,id=m,size=16M,share=on,discard-data=n,mem-path={up}{}",
        pool.join("v.memory").display()
    );
    let words = [&["-object", &beside, "-object", &shared], &machine[..]].concat();
    let _foreign = foreign(&socket, &words).await;
    // The memory may be in a pool away for the moment.
    let away = dir.path().join("away");
    std::fs::rename(&other, &away).expect("goes");
    is_refused("memory pool other of node 'a'").await;
    std::fs::rename(&away, &other).expect("comes back");
    let adopted = node.call("POST /v1/vms/adopt", &request, 201).await;
    let memory = &adopted.json()["memory"];
    assert_eq!(memory["pool"], "pool", "{memory}");
    assert_eq!(memory["bytes_in_pool"], 16 << 20, "{memory}");
    let shown = node.get("/v1/memory-pools/pool").await.json();
    assert_eq!(shown["segments"][0]["owner"], "a", "{shown}");
    node.stop_vm().await;
    let left = std::fs::read_dir(&pool).expect("lists");
    let mut names: Vec<_> = left.flatten().map(|entry| entry.file_name()).collect();
    names.sort();
    let others = ["sub", "v.ram", "w.memory"];
    assert_eq!(names, others, "what was its own is free again");
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_adoption_that_is_refused_leaves_the_stopped_vm_of_its_name() {
    let dir = MachineFolder::new();
    let pool = dir.path().join("pool");
    let node = RunningNode::start(with_pools(dir.path(), &[&pool])).await;
    let pid = run(&node, &idle("v")).await["pid"].to_string();
    let killed = Command::new("kill").args(["-9", &pid]).status();
    assert!(killed.expect("kill runs").success());
    stopped(&node).await;
    let socket = dir.path().join("qmp");
    let memory = format!(
        "memory-backend-file,id=m,size=16M,share=on,mem-path={}",
        pool.join("w.memory").display()
    );
    let words = ["-object", &memory, "-machine", "memory-backend=m"];
    let _foreign = foreign(&socket, &words).await;
    let request = json!({ "name": "v", "qmp": socket }).to_string();
    node.call("POST /v1/vms/adopt", &request, 409).await;
    let left = stopped(&node).await;
    assert_eq!(left["origin"], "run", "{left}");
    node.stop().await;
}

/// Returns the configuration of node "a" with memory pools in these folders, which are made. A pool has the folder's
/// name.
fn with_pools(data: &Path, folders: &[&Path]) -> NodeConfig {
    let mut config = plain("a", data);
    let pools = folders.iter().map(|folder| {
        std::fs::create_dir(folder).expect("a folder");
        let name = folder.file_name().expect("a name").to_string_lossy();
        MemoryPoolConfig {
            name: name.into_owned(),
            folder: folder.to_path_buf(),
        }
    });
    config.memory_pools = pools.collect();
    config
}
