//! QEMU runs as a user without access to the node's keys and images, and machines move all the same.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use godwit_testkit::Cluster;
use godwit_testkit::cluster::Node;
use godwit_testkit::scenario::moves;

const USER: &str = "nobody";
const NUMBER: u32 = 65_534;
const MACHINE: &str = "caged";

/// Returns the users of the machine's QEMU: real, effective, saved, of the file system.
fn users(node: &Node) -> String {
    let shown = node.json(&["vm", "show", MACHINE]);
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
    let mut cluster = Cluster::secure(&["a", "b"]);
    // The user must be able to pass to the folders below.
    std::fs::set_permissions(cluster.dir(), Permissions::from_mode(0o711)).unwrap();
    for name in ["a", "b"] {
        let node = cluster.node_mut(name);
        node.spec_mut().qemu_user = Some(USER.to_owned());
        node.start(&[]).unwrap();
    }
    let a = cluster.node("a");
    a.run_vm_on(MACHINE, "disk0", &[]);
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
    moves(a, &machine, "b", &[]);
    assert_eq!(users(cluster.node("b")), expected);
    // QEMU finds the sockets of a restarted node, and the node finds QEMU.
    cluster.die_and_start("b");
    let b = cluster.node("b");
    b.vm_comes_to(MACHINE, "running");
    moves(b, &machine, "a", &[]);
    assert_eq!(users(cluster.node("a")), expected);
    cluster.node("a").stop_vm(MACHINE);
}
