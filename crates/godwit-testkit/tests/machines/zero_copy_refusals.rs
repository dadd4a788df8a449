//! Obstacles to a move of a machine without its memory: a sentence each, all at once, before anything moves.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use godwit_testkit::Cluster;
use godwit_testkit::cluster::{ClusterOptions, MemoryPool, Node};
use godwit_testkit::process::{run, words};
use godwit_testkit::scenario::{Scenario, until};
use godwit_testkit::vm::idle_qemu;

/// A file system whose mount needs root, until dropped.
struct Mounted {
    folder: tempfile::TempDir,
}

impl Mounted {
    /// Mounts the file system; without the right to mount returns `None`.
    fn new(kind: &str, options: &str) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let mut mount = Command::new("mount");
        mount
            .args(["-t", kind, "-o", options, "none"])
            .arg(folder.path());
        match run(&mut mount) {
            Ok(_) => Some(Self { folder }),
            Err(error) => {
                println!("not tried, for want of the right to mount {kind}: {error}");
                None
            }
        }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().to_owned()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = run(Command::new("umount").arg(self.folder.path()));
    }
}

/// The command for a machine with its memory in a pool.
fn run_in<'a>(pool: &'a str, memory: &'a str) -> Vec<&'a str> {
    let run = ["vm", "run", "web", "--memory", memory, "--accel", "tcg"];
    [&run[..], &["--memory-pool", pool, "--", "-nodefaults"]].concat()
}

const ZERO_COPY: &str = "migrate vm/web --to b --memory zero-copy";

/// Expects the command to be refused with all of these words, apart by `|`, and with a hint.
fn refused(node: &Node, command: &[&str], said: &str) {
    let said: Vec<&str> = said.split(" | ").chain(["hint:"]).collect();
    println!("{}\n", node.refuses(command, &said));
}

fn no_machine(node: &Node) {
    let all = node.json(&["vm", "list"]);
    assert_eq!(all.as_array().map(Vec::len), Some(0), "{all}");
}

#[test]
fn a_pool_that_cannot_be_used_is_named_before_anything_starts() {
    let _turn = Scenario::shared();
    let small = Mounted::new("tmpfs", "size=32m");
    let read_only = Mounted::new("tmpfs", "ro,size=32m");
    let huge = Mounted::new("hugetlbfs", "pagesize=2M");
    let folder = tempfile::tempdir().unwrap();
    let (missing, file) = (folder.path().join("missing"), folder.path().join("file"));
    std::fs::write(&file, "").unwrap();
    let mounted = |name, mounted: &Option<Mounted>| Some((name, mounted.as_ref()?.path()));
    let pools = [
        Some(("missing", missing)),
        Some(("file", file)),
        mounted("small", &small),
        mounted("ro", &read_only),
        mounted("huge", &huge),
    ];
    let mut cluster = Cluster::secure(&["a"]);
    for (name, path) in pools.iter().flatten() {
        cluster.node_mut("a").spec_mut().add_memory_pool(name, path);
    }
    cluster.start_all().unwrap();
    let a = cluster.node("a");
    let words: [(&str, &str); 6] = [
        (
            "nope",
            "no memory pool named \"nope\" | it has missing | --memory-pool NAME=PATH",
        ),
        ("missing", "memory pool missing of node 'a' | mount it"),
        (
            "file",
            "memory pool file of node 'a' | has 0 bytes | another --memory-pool",
        ),
        (
            "small",
            "has 32 MiB free, and 64 MiB | make the pool larger",
        ),
        (
            "ro",
            "memory pool ro of node 'a' | let the node's user write there",
        ),
        (
            "huge",
            "memory pool huge of node 'a' | its pages have 2097152 bytes | a multiple of them with --memory",
        ),
    ];
    for (name, words) in words {
        if name == "nope" || pools.iter().flatten().any(|(known, _)| *known == name) {
            // No number of whole huge pages.
            let memory = if name == "huge" { "65M" } else { "64M" };
            refused(a, &run_in(name, memory), words);
        }
    }
    no_machine(a);
}

/// Creates a file of `mib` MiB with this beginning.
fn file(folder: &Path, name: &str, mib: u64, begin: &str) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, begin).unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_len(mib << 20).unwrap();
    path
}

#[test]
fn a_device_that_is_no_pool_is_named_and_nothing_of_it_is_overwritten() {
    let _turn = Scenario::shared();
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let cut = MemoryPool::file(128).unwrap();
    let cut_file = std::fs::File::options().write(true).open(cut.path());
    cut_file.unwrap().set_len(64 << 20).unwrap();
    let odd = MemoryPool::file(128).unwrap();
    let read_only = Mounted::new("tmpfs", "size=32m");
    if let Some(mounted) = &read_only {
        file(&mounted.path(), "device", 16, "");
        let mut again = Command::new("mount");
        run(again.args(["-o", "remount,ro"]).arg(mounted.path())).unwrap();
    }
    let mut pools = vec![
        ("blank", file(folder.path(), "blank", 128, "")),
        (
            "foreign",
            file(folder.path(), "foreign", 128, "a file system"),
        ),
        ("short", file(folder.path(), "short", 2, "")),
        ("null", PathBuf::from("/dev/null")),
        ("cut", cut.path().to_owned()),
        ("odd", odd.path().to_owned()),
        ("folder", folder.path().to_owned()),
    ];
    pools.extend(
        read_only
            .as_ref()
            .map(|mounted| ("ro", mounted.path().join("device"))),
    );
    let mut cluster = Cluster::secure(&["a"]);
    for (name, path) in &pools {
        cluster.node_mut("a").spec_mut().add_memory_pool(name, path);
    }
    cluster.start_all().unwrap();
    let a = cluster.node("a");
    let words: [(&str, &str); 7] = [
        (
            "blank",
            "was not made a pool yet | godwit memory-pool format",
        ),
        ("foreign", "holds something else | --overwrite"),
        (
            "short",
            "has 2097152 bytes, and a pool has at least 4194304 | make it larger",
        ),
        ("null", "/dev/null is neither a folder, nor a DAX device"),
        (
            "cut",
            "it was made for 134217728 bytes, and 67108864 are there",
        ),
        ("odd", "its pages have 2097152 bytes | a multiple of them"),
        ("ro", "may not write to | let the node's user write there"),
    ];
    for (name, words) in words {
        if pools.iter().any(|(known, _)| *known == name) {
            let memory = if name == "odd" { "65M" } else { "64M" };
            refused(a, &run_in(name, memory), words);
        }
    }
    no_machine(a);
    let formats: [(&str, &str); 5] = [
        ("foreign", "holds something else | --overwrite"),
        ("short", "make it larger"),
        ("null", "/dev/null"),
        ("folder", "is a folder, which is a pool as it is"),
        ("nope", "no memory pool named \"nope\""),
    ];
    for (name, words) in formats {
        refused(a, &["memory-pool", "format", name], words);
    }
    let untouched = std::fs::read(folder.path().join("foreign")).unwrap();
    assert!(untouched.starts_with(b"a file system"), "it is as it was");
    a.json(&run_in("odd", "64M"));
    let overwrite = ["memory-pool", "format", "odd", "--overwrite"];
    refused(
        a,
        &overwrite,
        "with the memory of 1 machines | stop the machines",
    );
    a.stop_vm("web");
    a.json(&overwrite);
    a.json(&["memory-pool", "format", "foreign", "--overwrite"]);
    a.json(&run_in("foreign", "64M"));
    a.stop_vm("web");
}

/// Two devices of one name, each a pool with a machine of this name.
#[test]
fn another_device_of_the_same_name_is_refused() {
    let _turn = Scenario::shared();
    let (here, there) = (MemoryPool::file(96).unwrap(), MemoryPool::file(96).unwrap());
    let mut cluster = Cluster::secure(&["a", "b"]);
    for (name, pool) in [("a", &here), ("b", &there)] {
        let spec = cluster.node_mut(name).spec_mut();
        spec.add_memory_pool("cxl", pool.path());
    }
    cluster.start_all().unwrap();
    let a = cluster.node("a");
    a.json(&run_in("cxl", "64M"));
    let migrate = words(ZERO_COPY);
    let other = "memory pool cxl of node 'b' cannot be used: it is other memory there | give both nodes \
                 the same memory under this name";
    refused(a, &migrate, other);
    // A copy of the device from before does not know the new question.
    std::fs::copy(here.path(), there.path()).unwrap();
    refused(a, &migrate, other);
    a.stop_vm("web");
    assert!(here.is_empty().unwrap(), "the pool is free again");
}

#[test]
fn all_that_keeps_memory_where_it_is_comes_at_once() {
    let _turn = Scenario::shared();
    let (here, there) = (MemoryPool::new().unwrap(), MemoryPool::new().unwrap());
    let mut cluster = Cluster::secure(&["a", "b"]);
    for (name, pool) in [("a", &here), ("b", &there)] {
        let spec = cluster.node_mut(name).spec_mut();
        spec.add_memory_pool("cxl", pool.path());
    }
    cluster.start_all().unwrap();
    let a = cluster.node("a");
    a.create_disk("foreign", "16M");
    let socket = a.spec().dir.join("disks/foreign.vhost");
    let chardev = format!("socket,id=other,reconnect-ms=100,path={}", socket.display());
    let file = cluster.dir().join("beside");
    let beside = format!(
        "memory-backend-file,id=beside,size=1M,share=on,mem-path={}",
        file.display()
    );
    let mut command = run_in("cxl", "64M");
    // From QEMU's arguments alone the device is a foreign one.
    command.extend(["-device", "vhost-user-blk-pci,chardev=other"]);
    command.extend(["-chardev", &chardev, "-object", &beside]);
    command.extend(["-overcommit", "mem-lock=on"]);
    a.json(&command);
    let file = file.display();
    let said = format!(
        "device vhost-user-blk-pci is served by a process that maps the memory itself | \
         remove the device, or leave the memory in its pool with --stay-in-pool | \
         its QEMU locks its memory (mem-lock=on) | \
         start it without that, or leave the memory in its pool with --stay-in-pool | \
         it has memory in {file} as well, which | node 'b' has the file {file}, in which | \
         memory pool cxl of node 'b' cannot be used: it is other memory there | \
         give both nodes the same memory under this name"
    );
    refused(a, &words(ZERO_COPY), &said);
    a.stop_vm("web");
    assert!(here.is_empty().unwrap() && there.is_empty().unwrap());
}

/// QEMU is there, and the node does not watch it yet.
#[test]
fn a_machine_that_is_being_adopted_is_nobody_else_s() {
    let _turn = Scenario::shared();
    let pool = MemoryPool::new().unwrap();
    let mut cluster = Cluster::secure(&["a"]);
    pool.give_to(&mut cluster);
    let adopting = ("vm::adopting", "1*sleep(5000)");
    cluster.node_mut("a").start(&[adopting]).unwrap();
    let a = cluster.node("a");
    let monitor = cluster.dir().join("monitor.sock");
    let file = pool.path().join("web.memory");
    let memory = format!("memory-backend-file,mem-path={}", file.display());
    let _qemu = idle_qemu(&monitor, &memory, &[]).unwrap();
    std::thread::scope(|scope| {
        let monitor = monitor.to_string_lossy().into_owned();
        let adopted =
            scope.spawn(move || a.godwit(&["vm", "adopt", "web", "--qmp", &monitor]).json());
        until("it has the name", || !a.vm("web").is_null());
        let stop = ["vm", "stop", "web", "--force"];
        refused(a, &stop, "VM web is being started");
        let run = run_in("cxl", "64M");
        refused(a, &run, "a VM named \"web\" is being started");
        adopted.join().unwrap().unwrap();
    });
    let vm = a.vm("web");
    assert!(
        vm["state"] == "paused" && vm["memory"]["pool"] == "cxl",
        "{vm}"
    );
    a.stop_vm("web");
    assert!(pool.is_empty().unwrap(), "the pool is free again");
}

/// Writes a program that runs another one without any access to userfaultfd: without the right to trace other
/// processes, and with nothing behind the device. Returns `None` without the right to take access away.
fn without_userfault(folder: &Path, program: &Path) -> Option<PathBuf> {
    let script = folder.join("without-userfault");
    let text = format!(
        "#!/bin/sh\nexec unshare --mount sh -c '\
         if [ -e /dev/userfaultfd ]; then mount --bind /dev/null /dev/userfaultfd || exit 70; fi; \
         exec setpriv --bounding-set=-sys_ptrace --inh-caps=-sys_ptrace \"$0\" \"$@\"' '{}' \"$@\"\n",
        program.display()
    );
    std::fs::write(&script, text).unwrap();
    std::fs::set_permissions(&script, Permissions::from_mode(0o755)).unwrap();
    let userfault = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd");
    if userfault.is_ok_and(|text| text.trim() == "1") {
        println!("not tried: here everybody may have a userfaultfd");
        return None;
    }
    match run(Command::new(&script).arg("--version")) {
        Ok(_) => Some(script),
        Err(error) => {
            println!("not tried, for want of the right to take rights away: {error}");
            None
        }
    }
}

/// The node to which the memory would follow may not hold pages, nor may the QEMUs of this node.
#[test]
fn a_node_that_may_not_hold_pages_is_named() {
    let _turn = Scenario::shared();
    let pool = MemoryPool::new().unwrap();
    let options = ClusterOptions::secure().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let Some(program) = without_userfault(folder.path(), &options.godwit) else {
        return;
    };
    let mut cluster = Cluster::prepare(&["a", "b"], options).unwrap();
    pool.give_to(&mut cluster);
    cluster.node_mut("b").spec_mut().godwit = program;
    cluster.start_all().unwrap();
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    a.json(&run_in("cxl", "64M"));
    let migrate = words(ZERO_COPY);
    refused(
        a,
        &migrate,
        "node 'b' may not hold pages of memory that follows a VM (userfaultfd:  | give it CAP_SYS_PTRACE or access to /dev/userfaultfd, or leave the memory in its pool",
    );
    // Memory that stays is not held.
    let mut stay = migrate.to_vec();
    stay.push("--stay-in-pool");
    a.json(&stay);
    refused(
        b,
        &["vm", "memory", "web", "--to", "local"],
        "its QEMU may not hold pages of memory (userfaultfd:  | let the node run as root, or set vm.unprivileged_userfaultfd to 1",
    );
    b.stop_vm("web");
    assert!(pool.is_empty().unwrap(), "the pool is free again");
}

/// Without a pool at the source there is nothing to share; without one at the destination there is no one to share
/// with.
#[test]
fn memory_that_is_not_shared_is_refused() {
    let _turn = Scenario::shared();
    let pool = MemoryPool::new().unwrap();
    let mut cluster = Cluster::secure(&["a", "b"]);
    let a = cluster.node_mut("a").spec_mut();
    a.add_memory_pool("cxl", pool.path());
    cluster.start_all().unwrap();
    let a = cluster.node("a");
    let mut command = run_in("cxl", "64M");
    a.json(&command);
    let migrate = words(ZERO_COPY);
    refused(
        a,
        &migrate,
        "node 'b' has no memory pool named \"cxl\" | it has none; start the node with --memory-pool NAME=PATH",
    );
    a.stop_vm("web");
    command.drain(7..9);
    a.json(&command);
    refused(
        a,
        &migrate,
        "its memory is in no memory pool | start it with 'godwit vm run --memory-pool'",
    );
    refused(
        a,
        &["vm", "memory", "web", "--to", "local"],
        "it is in no memory pool",
    );
    a.stop_vm("web");
}
