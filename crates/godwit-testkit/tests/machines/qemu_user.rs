//! QEMU runs as a user without access to the node's keys and images, and machines move all the same.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use godwit_testkit::Cluster;
use godwit_testkit::cluster::{ClusterOptions, Node};
use godwit_testkit::process::wait_for;
use godwit_testkit::scenario::{PATIENCE, migrate, run_small_machine};

const USER: &str = "nobody";
const NUMBER: u32 = 65_534;
const MACHINE: &str = "caged";

/// Returns the users of the machine's QEMU: real, effective, saved, of the file system.
fn users(node: &Node) -> String {
    let shown = node.godwit(&["vm", "show", MACHINE]).json().unwrap();
    let status = std::fs::read_to_string(format!("/proc/{}/status", shown["pid"])).unwrap();
    let users = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    users.unwrap().trim().to_owned()
}

/// Returns true if the user can read a file, or list a folder, with the program `word`.
fn can(word: &str, path: &Path) -> bool {
    let mut command = Command::new(word);
    command.arg(path).uid(NUMBER).gid(NUMBER);
    command.output().unwrap().status.success()
}

#[test]
fn machines_run_as_a_user_who_has_nothing_of_the_nodes_and_move() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can start programs as other users");
        return;
    }
    let mut cluster = Cluster::prepare(&["a", "b"], ClusterOptions::secure().unwrap()).unwrap();
    // The user must be able to pass to the folders below.
    std::fs::set_permissions(cluster.dir(), Permissions::from_mode(0o711)).unwrap();
    for name in ["a", "b"] {
        let node = cluster.node_mut(name);
        node.spec_mut().qemu_user = Some(USER.to_owned());
        node.start(&[]).unwrap();
    }
    let a = cluster.node("a");
    run_small_machine(a, MACHINE, "disk0", &[]).unwrap();
    let expected = [NUMBER.to_string().as_str(); 4].join("\t");
    assert_eq!(users(a), expected);

    let data = &a.spec().dir;
    let image = data.join("disks/disk0.raw");
    for secret in [&image, &data.join("godwit.redb"), &data.join("lock")] {
        assert!(secret.exists(), "{}", secret.display());
        assert!(!can("cat", secret), "{}", secret.display());
    }
    for folder in [data.clone(), data.join("disks"), data.join("vms")] {
        assert!(!can("ls", &folder), "{}", folder.display());
    }
    assert!(can("ls", &data.join("vms").join(MACHINE)));

    let machine = format!("vm/{MACHINE}");
    let ended = |moved: serde_json::Value| {
        assert_eq!(moved["phase"], "completed", "{moved}");
    };
    ended(migrate(a, &machine, "b", &[]).unwrap());
    assert_eq!(users(cluster.node("b")), expected);
    // QEMU finds the sockets of a restarted node, and the node finds QEMU.
    cluster.node_mut("b").kill();
    cluster.node_mut("b").start(&[]).unwrap();
    let b = cluster.node("b");
    let runs = || {
        let shown = b.godwit(&["vm", "show", MACHINE]).json().ok()?;
        (shown["state"] == "running").then_some(())
    };
    wait_for(PATIENCE, runs).expect("it runs");
    ended(migrate(b, &machine, "a", &[]).unwrap());
    assert_eq!(users(cluster.node("a")), expected);
    cluster
        .node("a")
        .godwit(&["vm", "stop", "--force", MACHINE])
        .text()
        .unwrap();
}
