//! Pools on one device, of which each machine's memory is a part. A file stands for the device: the code path is the
//! same, except that memory on tmpfs can also follow a machine out of the pool.

use godwit_testkit::scenario::says;
use std::os::unix::fs::FileExt;

use godwit_testkit::vm::idle_qemu;

use super::*;

/// MiB of a pool's table, of a small machine, and of the guest's memory.
const TABLE_MIB: u64 = 2;
const SMALL_MIB: u64 = 64;
const GUEST_MIB: u64 = 192;

/// Returns the command to start a machine of 64 MiB without disks.
fn small<'a>(name: &'a str, memory: &'a str) -> Vec<&'a str> {
    let mut command = vec!["vm", "run", name, "--memory", memory, "--accel", "tcg"];
    command.extend(["--memory-pool", MemoryPool::NAME, "--", "-nodefaults"]);
    command
}

/// Returns the segment of a machine's memory, in this node's view of the pool.
fn segment(node: &Node, vm: &str) -> Value {
    let shown = node.godwit(&["memory-pool", "show", MemoryPool::NAME]);
    let shown = shown.json().unwrap();
    let all = shown["segments"].as_array().unwrap();
    let found = all.iter().find(|segment| segment["vm"] == vm);
    found
        .unwrap_or_else(|| panic!("{vm} is not in {shown}"))
        .clone()
}

/// Overwrites a free part of the pool.
fn fill(pool: &MemoryPool, offset: u64, bytes: u64) {
    let file = std::fs::File::options().write(true).open(pool.path());
    let secret = vec![0x5a; bytes as usize];
    file.unwrap().write_all_at(&secret, offset).unwrap();
}

/// Beside another machine's memory: there and back, with the memory staying and following, while nodes die.
#[test]
fn a_guest_in_a_part_of_a_device_moves_there_and_back() {
    let turn = Scenario::alone();
    let room = TABLE_MIB + SMALL_MIB + GUEST_MIB;
    let pool = MemoryPool::blank_file(room).unwrap();
    let mut cluster = cluster(&pool);
    let a = cluster.node("a");
    a.refuses(&small("web", "64M"), &["godwit memory-pool format"]);
    let format = ["memory-pool", "format", MemoryPool::NAME];
    cluster.node("b").json(&format);
    a.refuses(&format, &["is a pool already"]);
    // The remains of an earlier guest must not show: a new guest expects zeroes.
    fill(&pool, TABLE_MIB << 20, (room - TABLE_MIB) << 20);
    a.json(&small("web", "64M"));
    let guest = pooled_guest(&cluster, turn.seed, 1);
    let at = segment(a, VM)["offset"].as_u64().unwrap();
    assert_eq!(at, (TABLE_MIB + SMALL_MIB) << 20, "behind the other one's");
    a.refuses(&small("more", "2M"), &["has 0 bytes free"]);

    moves(&guest, a, "b", STAYS);
    for node in ["a", "b"] {
        let segment = segment(cluster.node(node), VM);
        assert_eq!(segment["owner"], "b", "as {node} sees it: {segment}");
        assert_eq!(segment["offset"], at, "{segment}");
    }
    cluster.die_and_start("b");
    guest.alive().unwrap();

    let b = cluster.node("b");
    moves(&guest, b, "a", FOLLOWS);
    let a = cluster.node("a");
    has_followed(&guest, a);
    // The memory's room stays reserved, and anything there is overwritten when the memory goes back.
    fill(&pool, at, GUEST_MIB << 20);

    dies_while_memory_moves(&mut cluster, "pool");
    let a = cluster.node("a");
    let memory = memory_of(a);
    let in_pool = memory["bytes_in_pool"].as_u64().unwrap();
    assert!(0 < in_pool && in_pool < GUEST_MIB << 20, "{memory}");
    assert_eq!(
        allocated(pool.path()),
        room << 20,
        "the pool keeps its room"
    );
    guest.alive().unwrap();
    goes(&guest, a, "pool");
    guest.migrate(a, "b", STAYS).unwrap();
    let b = cluster.node("b");
    println!("{:?}", guest.finish(b).unwrap());
    b.stop_vm(VM);
    a.stop_vm("web");
    assert!(pool.is_empty().unwrap(), "the pool is free again");
}

/// A third party started QEMU with its memory in an unreserved part of the pool, which the next machine gets.
#[test]
fn a_guest_in_a_part_of_a_device_that_nobody_reserved_is_not_adopted() {
    let _turn = Scenario::alone();
    let pool = MemoryPool::file(TABLE_MIB + GUEST_MIB).unwrap();
    let cluster = cluster(&pool);
    let a = cluster.node("a");
    let monitor = cluster.dir().join("monitor.sock");
    let memory = format!(
        "memory-backend-file,offset={}M,align=2M,mem-path={}",
        TABLE_MIB,
        pool.path().display()
    );
    let _qemu = idle_qemu(&monitor, &memory, &[]).unwrap();
    let monitor = monitor.to_string_lossy().into_owned();
    let refused = a.refusal(&["vm", "adopt", "web", "--qmp", &monitor]);
    for words in [
        "nobody reserved that part of the device for it",
        "start it with 'godwit vm run --memory-pool cxl'",
    ] {
        says(&refused, &[words]);
    }
    assert!(a.godwit(&["vm", "show", "web"]).json().is_err());
    assert!(pool.is_empty().unwrap(), "nothing is reserved");
}

/// A program that claims to be a QEMU which frees the wrong pages.
#[test]
fn an_old_qemu_gets_no_part_of_a_device() {
    let _turn = Scenario::alone();
    let pool = MemoryPool::file(TABLE_MIB + SMALL_MIB).unwrap();
    let cluster = cluster(&pool);
    let a = cluster.node("a");
    let old = cluster.dir().join("qemu-system-old");
    let text = "#!/bin/sh\n[ \"$1\" = --version ] && echo 'QEMU emulator version 9.2.4' && exit\n\
                exec qemu-system-x86_64 \"$@\"\n";
    std::fs::write(&old, text).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&old, mode).unwrap();
    let old = old.to_string_lossy().into_owned();
    let mut command = small("web", "64M");
    let at = command.iter().position(|word| *word == "--").unwrap();
    command.splice(at..at, ["--qemu", &old]);
    let refused = a.refusal(&command);
    for words in [
        "QEMU 9.2.4 can free memory of other machines",
        "--qemu PATH",
    ] {
        says(&refused, &[words]);
    }
    assert!(pool.is_empty().unwrap(), "nothing is reserved");
    a.json(&small("web", "64M"));
    a.stop_vm("web");
    assert!(pool.is_empty().unwrap(), "the pool is free again");
}
