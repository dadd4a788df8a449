//! Machines and backups that cannot have checkpoints: each is refused in a sentence, and nothing was changed.

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use godwit_testkit::cluster::{MemoryPool, Node};
use godwit_testkit::process::words;
use godwit_testkit::{Cluster, scenario::Scenario};
use serde_json::{Value, json};

use crate::{ip, two_nodes};

/// Returns the parts of a node's machines and disks that a refusal could have changed.
fn described(node: &Node) -> Vec<Value> {
    let of = |kind: &str| node.json(&[kind, "list"]).as_array().cloned();
    let all = ["vm", "disk"].into_iter().filter_map(of).flatten();
    let parts = |one: Value| {
        let own = [
            "name",
            "state",
            "pid",
            "problem",
            "migration",
            "counterpart",
        ];
        let protection = ["peer", "state", "term"].map(|part| &one["protection"][part]);
        json!([own.map(|part| &one[part]), protection])
    };
    all.map(parts).collect()
}

/// Expects node `a` to refuse to protect a machine with these words, apart by `|`, and nothing to be different afterwards.
fn refuses(cluster: &Cluster, vm: &str, how: &str, said: &str) {
    let all = || {
        let node = |node: &Node| (described(node), node.qemus());
        cluster.nodes().iter().map(node).collect::<Vec<_>>()
    };
    let before = all();
    let command = format!("vm protect {vm} {how}");
    let said: Vec<_> = said.split(" | ").collect();
    println!("{}", cluster.node("a").refuses(&words(&command), &said));
    assert_eq!(all(), before, "after: {command}");
}

const TO_B: &str = "--to b --when-alone stop";

#[test]
fn a_machine_that_cannot_be_captured_is_refused() -> io::Result<()> {
    let _turn = Scenario::shared();
    let mut cluster = Cluster::secure(&["a", "b"]);
    let pool = MemoryPool::new()?;
    pool.give_to(&mut cluster);
    let cluster = cluster.started();
    let a = cluster.node("a");
    let drive = cluster.dir().join("own.raw");
    std::fs::File::create(&drive)?.set_len(1 << 20)?;
    let drive = format!("file={},if=none,id=own,format=raw", drive.display());
    let card = ["-nic", "hubport,hubid=0,model=virtio-net-pci"];
    let machines: [(&str, &[&str], &[&str], &str); 5] = [
        ("still", &[], &["-S"], "its guest does not run"),
        (
            "card",
            &[],
            &card,
            "QEMU itself serves its network card (hubport), whose packets cannot be held back",
        ),
        (
            "drive",
            &[],
            &["-drive", &drive, "-device", "virtio-blk-pci,drive=own"],
            "drive own",
        ),
        (
            "fixed",
            &[],
            &["-drive", &drive, "-device", "nvme,serial=1,drive=own"],
            "QEMU saves no state of it: non-migratable device: 0000:00:03.0/nvme",
        ),
        (
            "pooled",
            &["--memory-pool", MemoryPool::NAME],
            &[],
            "its memory is in a memory pool, which a backup does not map",
        ),
    ];
    for (vm, options, qemu, said) in machines {
        a.create_disk(vm, "16MiB");
        a.run_vm(vm, &[&["--disk", vm], options].concat(), qemu);
        refuses(&cluster, vm, TO_B, &format!("{said} | nothing was changed"));
        a.stop_vm(vm);
    }
    Ok(())
}

#[test]
fn a_request_that_cannot_be_met_is_refused() -> io::Result<()> {
    let _turn = Scenario::shared();
    let cluster = Cluster::start(&["a", "b"])?;
    let a = cluster.node("a");
    a.run_vm_on("plain", "disk", &[]);
    for (how, said) in [
        (
            "--to a --when-alone stop",
            "its backup cannot be its own node",
        ),
        ("--to x --when-alone stop", "no peer named"),
        ("--to b", "who decides between two nodes"),
        ("--to b --when-alone stop --frequency 101", "give 1 to 100"),
        (
            "--to b --when-alone stop --frequency 20 --restart",
            "cannot be used with",
        ),
        ("--to b --witness node:x", "no peer named"),
        (
            "--to b --witness node:b",
            "node 'b' is one of its two nodes, and cannot be its witness",
        ),
    ] {
        refuses(&cluster, "plain", how, said);
    }
    a.json(&words(&format!("vm protect plain {TO_B}")));
    refuses(
        &cluster,
        "plain",
        TO_B,
        "is protected by node 'b': it cannot be protected again",
    );
    a.text(&["vm", "unprotect", "plain"]);
    a.stop_vm("plain");
    Ok(())
}

/// Writes a QEMU that says that it has another version.
fn other_qemu(folder: &Path) -> io::Result<()> {
    let path = folder.join("qemu-system-x86_64");
    let script = "#!/bin/sh\ncase $1 in --version) echo QEMU emulator version 10.7.0;; \
                  *) exec /usr/bin/qemu-system-x86_64 \"$@\";; esac\n";
    std::fs::write(&path, script)?;
    std::fs::set_permissions(&path, Permissions::from_mode(0o755))
}

#[test]
fn a_backup_that_has_no_place_for_the_machine_is_refused() -> io::Result<()> {
    let _turn = Scenario::shared();
    let mut cluster = Cluster::secure(&["a", "b"]).started();
    let a = cluster.node("a");
    a.run_vm_on("one", "disk", &[]);
    cluster.node("b").create_disk("disk", "1MiB");
    refuses(
        &cluster,
        "one",
        TO_B,
        "node 'b' has a disk disk, which is serving",
    );
    cluster.node("b").text(&["disk", "rm", "disk", "--force"]);
    cluster.node("b").run_vm("one", &[], &[]);
    refuses(
        &cluster,
        "one",
        TO_B,
        "node 'b' has a VM named one, which is running",
    );
    cluster.node("b").stop_vm("one");
    // More than a host of this test has free, and nothing of it is touched.
    let run = "vm run huge --memory 512GiB --accel tcg --disk huge -- -nic none";
    a.create_disk("huge", "1MiB");
    a.json(&words(run));
    refuses(
        &cluster,
        "huge",
        TO_B,
        "of memory available, the VM needs 512 GiB",
    );
    a.stop_vm("huge");

    let programs = tempfile::tempdir()?;
    other_qemu(programs.path())?;
    let path = std::env::var("PATH").unwrap_or_default();
    let path = format!("{}:{path}", programs.path().display());
    let environment = vec![(String::from("PATH"), path)];
    cluster.node_mut("b").spec_mut().environment = environment;
    cluster.restart("b", &[]);
    refuses(
        &cluster,
        "one",
        TO_B,
        "node 'b' has QEMU 10.7.0, and the VM runs in QEMU 10.0 | nothing was changed",
    );
    Ok(())
}

#[test]
fn a_backup_without_the_uplink_of_a_nic_is_refused() -> io::Result<()> {
    let Some((lan, cluster)) = two_nodes(&[])? else {
        return Ok(());
    };
    let [here, there] = lan.hosts() else {
        return Err(io::Error::other("two hosts"));
    };
    ip(here, "link add br7 type bridge")?;
    ip(here, "link set br7 up")?;
    ip(there, "link del tap0")?;
    let a = cluster.node("a");
    for (vm, nic, said) in [
        ("tap", "tap=tap0", "there is no interface tap0"),
        ("bridge", "bridge=br7", "there is no bridge br7"),
    ] {
        a.create_disk(vm, "16MiB");
        a.run_vm(vm, &["--disk", vm, "--nic", nic], &[]);
        refuses(&cluster, vm, TO_B, said);
        a.stop_vm(vm);
    }
    Ok(())
}
