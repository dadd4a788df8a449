//! Mistakes of people and peers: a clear refusal, and nothing lost.

use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use godwit_core::units::MigrationId;
use godwit_core::wire::{
    Features, Greeting, HEADER_SIZE, Header, Hello, Purpose, RefusalCode, Reply, TrafficClass,
};
use godwit_testkit::client::Initial;
use godwit_testkit::cluster::{ClusterOptions, godwit_binary, issue};
use godwit_testkit::image::write_random;
use godwit_testkit::nbd::NbdConnection;
use godwit_testkit::process::{run, words};
use godwit_testkit::scenario::{
    PATIENCE, Scenario, await_end, finish, import_pattern, load, migrate, migration, says,
    start_migration, verify,
};
use godwit_testkit::{Cluster, Model, Node};
use serde_json::Value;

const SIZE: u64 = 16 << 20;
const DISK: &str = "precious";

/// Expects the command to fail with all of these words, apart by `|` as in `one | two`.
fn refused(node: &Node, command: &str, said: &str) {
    refuses(node, &words(command), said);
}

/// Does the same with a command whose words have spaces.
fn refuses(node: &Node, command: &[&str], said: &str) {
    let failure = match node.godwit(command).text() {
        Ok(text) => panic!("{command:?} succeeded: {text}"),
        Err(failure) => failure,
    };
    println!("{failure}");
    assert!(failure.code.is_some_and(|code| code != 0), "{failure}");
    let text = failure.text.to_lowercase();
    let said = said.to_lowercase();
    says(&text, &said.split(" | ").collect::<Vec<_>>());
    assert!(!text.contains("panicked"), "{failure}");
    let advice = [
        "hint:",
        "for more information",
        "it may be cut short",
        "convert it with",
        "--setrw",
    ];
    let has_advice = advice.iter().any(|word| text.contains(word));
    assert!(has_advice, "no next step in: {failure}");
}

fn unharmed(node: &Node, model: &mut Model) {
    assert_eq!(node.disk_state(DISK), "serving");
    verify(node, DISK, model).unwrap();
}

fn plain_cluster(names: &[&str]) -> Cluster {
    let options = ClusterOptions {
        godwit: godwit_binary().unwrap(),
        tls: false,
    };
    Cluster::start_with(names, options).unwrap()
}

#[test]
fn sizes_names_and_peers_that_cannot_be() {
    let (turn, cluster) = Scenario::shared().start(&["a"]);
    let a = cluster.node("a");
    let mut model = import_pattern(a, DISK, SIZE, turn.seed).unwrap();
    let odd = cluster.dir().join("odd.img");
    write_random(&odd, 1000, 1).unwrap();
    let odd = odd.to_string_lossy();

    refused(a, "disk create odd --size 1000", "1000 | 512");
    refused(a, "disk create none --size 0", "0");
    refused(a, &format!("disk create odd --path {odd}"), "1000 | 512");
    refused(a, &format!("disk import odd {odd}"), "1000 | 512");
    refused(a, "disk import gone /nowhere/image", "/nowhere/image");
    refused(
        a,
        "disk create precious --size 1048576",
        "precious | exists",
    );
    refused(a, &format!("disk import precious {odd}"), DISK);
    for bad in ["a/b", "../up", "/abs", "", ".hidden", "with space"] {
        refuses(a, &["disk", "create", bad, "--size", "1048576"], "name");
    }
    let long = "x".repeat(129);
    refused(
        a,
        &format!("disk create {long} --size 1048576"),
        "name | 128",
    );
    refused(a, "disk show unknown", "unknown | disk");
    refused(a, "disk rm unknown", "unknown");
    refused(a, "disk attach unknown", "unknown");
    refused(a, "migrate unknown --to b", "unknown");
    refused(a, "migrate precious --to nobody", "nobody | --peer");
    refused(a, "migrate precious --to a", "a");
    refused(a, "migration show zz", "zz");
    refuses(a, &["migration", "cancel", &"0".repeat(32)], "migration");
    let list = a.json(&["disk", "list"]);
    assert!(
        !list.to_string().contains("odd"),
        "nothing is left of them: {list}"
    );
    unharmed(a, &mut model);
}

#[test]
fn a_peer_that_does_not_answer() {
    let (_turn, mut cluster, mut model) = Scenario::shared().with_disk(DISK, SIZE);
    cluster.node_mut("b").kill();
    let address = cluster.node("b").spec().listen.to_string();
    let a = cluster.node("a");
    refused(a, "migrate precious --to b", &format!("'b' | {address}"));
    let peers = a.json(&["peer", "list"]);
    assert!(peers.to_string().contains("\"reachable\":false"), "{peers}");
    unharmed(a, &mut model);

    cluster.node_mut("b").start(&[]).unwrap();
    let moved = migrate(cluster.node("a"), DISK, "b", &["--verify"]).unwrap();
    assert_eq!(
        moved["phase"], "completed",
        "it works as soon as the peer is back: {moved}"
    );
    verify(cluster.node("b"), DISK, &mut model).unwrap();
}

/// Lets node b present a certificate that node a must not accept.
fn b_shows(change: impl FnOnce(&mut Cluster), said: &str) {
    let (_turn, mut cluster, mut model) = Scenario::shared().with_disk(DISK, SIZE);
    cluster.node_mut("b").terminate(PATIENCE).unwrap();
    change(&mut cluster);
    match cluster.node_mut("b").start(&[]) {
        Ok(()) => refused(cluster.node("a"), "migrate precious --to b", said),
        // A node may notice by itself that its certificate is unfit; the node must then say so.
        Err(error) => {
            println!("{error}");
            let text = error.to_string().to_lowercase();
            assert!(text.contains("certificate"), "{error}");
            assert!(!text.contains("panicked"), "{error}");
        }
    }
    unharmed(cluster.node("a"), &mut model);
}

#[test]
fn a_certificate_from_another_authority() {
    let change = |cluster: &mut Cluster| {
        let other = cluster.dir().join("other-ca");
        let godwit = &cluster.options().godwit;
        run(Command::new(godwit)
            .args(["certs", "init", "--dir"])
            .arg(&other))
        .unwrap();
        issue(godwit, &other, "b", &[]).unwrap();
        cluster.node_mut("b").spec_mut().certificates = other;
    };
    b_shows(change, "b | certificate");
}

#[test]
fn an_expired_certificate() {
    let change = |cluster: &mut Cluster| {
        let more = ["--expired", "--force"];
        issue(
            &cluster.options().godwit,
            cluster.certificates(),
            "b",
            &more,
        )
        .unwrap();
    };
    b_shows(change, "b | certificate | expired");
}

#[test]
fn a_certificate_for_another_name() {
    let change = |cluster: &mut Cluster| {
        issue(&cluster.options().godwit, cluster.certificates(), "c", &[]).unwrap();
        cluster.node_mut("b").spec_mut().certificate_of = "c".to_owned();
    };
    b_shows(change, "b | certificate");
}

#[test]
fn a_peer_that_is_somebody_else() {
    let (_turn, mut cluster, mut model) = Scenario::shared().with_disk(DISK, SIZE);
    let address = cluster.node("b").spec().listen;
    cluster.node_mut("a").terminate(PATIENCE).unwrap();
    cluster.node_mut("a").spec_mut().peers = vec![("c".to_owned(), address)];
    cluster.node_mut("a").start(&[]).unwrap();
    refused(
        cluster.node("a"),
        "migrate precious --to c",
        "'c' | certificate",
    );
    unharmed(cluster.node("a"), &mut model);
    assert_eq!(cluster.node("b").disk_state(DISK), "unknown");
}

#[test]
fn a_protocol_from_the_future() {
    let turn = Scenario::shared();
    let cluster = plain_cluster(&["a", "b"]);
    let a = cluster.node("a");
    let mut model = import_pattern(a, DISK, SIZE, turn.seed).unwrap();
    let hello = Hello {
        min_version: 99,
        max_version: 120,
        features: Features(u32::MAX),
        class: TrafficClass::Control,
        purpose: Purpose::Migrate,
        migration: MigrationId([7; 16]),
        node: "b".to_owned(),
        disk: DISK.to_owned(),
    };
    let mut stream = TcpStream::connect(a.spec().listen).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(&Greeting::Hello(hello).encode()).unwrap();
    let mut header = [0; HEADER_SIZE];
    stream.read_exact(&mut header).unwrap();
    let header = Header::decode(&header).unwrap();
    let mut body = vec![0; header.payload_length as usize];
    stream.read_exact(&mut body).unwrap();
    let Greeting::Reply(Reply::Refused(refusal)) = Greeting::decode(&header, &body).unwrap() else {
        panic!("not refused: {header:?}");
    };
    println!("{refusal}");
    assert_eq!(refusal.code, RefusalCode::Version);
    assert!(
        refusal.text.contains("99") && refusal.text.contains('1'),
        "{refusal}"
    );
    unharmed(a, &mut model);
}

/// A small file system, mounted until dropped.
struct SmallDisk<'a>(&'a Path);

impl<'a> SmallDisk<'a> {
    fn mount(at: &'a Path, mib: u32) -> Self {
        std::fs::create_dir_all(at).unwrap();
        let size = format!("size={mib}m");
        run(Command::new("mount")
            .args(["-t", "tmpfs", "-o", &size, "godwit-test"])
            .arg(at))
        .unwrap();
        Self(at)
    }
}

impl Drop for SmallDisk<'_> {
    fn drop(&mut self) {
        // Lazily, because a node that failed the test may still hold files open.
        let _ = run(Command::new("umount").arg("-l").arg(self.0));
    }
}

#[test]
fn no_space_at_the_destination_before_the_copy() {
    let (turn, mut cluster) = Scenario::shared().start(&["a", "b"]);
    cluster.node_mut("b").terminate(PATIENCE).unwrap();
    let dir = cluster.node("b").spec().dir.clone();
    let _small = SmallDisk::mount(&dir, 24);
    cluster.node_mut("b").start(&[]).unwrap();
    let mut model = import_pattern(cluster.node("a"), DISK, 2 * SIZE, turn.seed).unwrap();
    refused(
        cluster.node("a"),
        "migrate precious --to b",
        "precious | space",
    );
    unharmed(cluster.node("a"), &mut model);
    assert_eq!(
        cluster.node("b").disk_state(DISK),
        "unknown",
        "nothing is left there"
    );
    cluster.node_mut("b").kill();
}

/// Gives node `b` a file system of 40 MiB.
fn small_destination<'a>(cluster: &mut Cluster, dir: &'a Path) -> SmallDisk<'a> {
    cluster.node_mut("b").terminate(PATIENCE).unwrap();
    let small = SmallDisk::mount(dir, 40);
    cluster.node_mut("b").start(&[]).unwrap();
    small
}

/// Migrates the disk to node `b`, whose file system another file fills as soon as the copy has begun, up to `left`
/// bytes. Returns the migration's end, and the file to delete for space.
fn fill_during_the_copy(cluster: &Cluster, left: u64) -> (Value, PathBuf) {
    let a = cluster.node("a");
    let id = start_migration(a, DISK, "b", &["--max-bandwidth", "4MiB"]).unwrap();
    let copying = || migration(a, &id)["phase"] == "copying";
    assert!(
        godwit_testkit::process::wait_for(PATIENCE, || copying().then_some(())).is_some(),
        "{}",
        migration(a, &id)
    );
    let filler = cluster.node("b").spec().dir.join("filler");
    let full = File::create(&filler).and_then(|mut file| {
        loop {
            file.write_all(&[1; 1 << 16])?;
        }
    });
    let full: std::io::Error = match full {
        Err(error) => error,
        Ok(()) => unreachable!("the loop ends with an error"),
    };
    println!("filled: {full}");
    let file = File::options().write(true).open(&filler).unwrap();
    file.set_len(file.metadata().unwrap().len() - left).unwrap();
    let ended = await_end(a, &id);
    println!("{ended}");
    (ended, filler)
}

#[test]
fn what_the_destination_has_set_aside_for_a_full_disk_does_not_run_out() {
    let (turn, mut cluster) = Scenario::shared().start(&["a", "b"]);
    let dir = cluster.node("b").spec().dir.clone();
    let _small = small_destination(&mut cluster, &dir);
    let mut model = import_pattern(cluster.node("a"), DISK, SIZE, turn.seed).unwrap();
    // Enough for the node's own files.
    let (ended, _) = fill_during_the_copy(&cluster, 1 << 20);
    assert_eq!(ended["phase"], "completed");
    verify(cluster.node("b"), DISK, &mut model).unwrap();
    cluster.node_mut("b").kill();
}

#[test]
fn no_space_at_the_destination_during_the_copy() {
    let (turn, mut cluster) = Scenario::shared().start(&["a", "b"]);
    let dir = cluster.node("b").spec().dir.clone();
    let _small = small_destination(&mut cluster, &dir);
    // Most of the disk is holes, for which no space is reserved.
    cluster.node("a").create_disk(DISK, &SIZE.to_string());
    let model = Model::new(turn.seed, SIZE, Initial::Zero);
    let client = load(cluster.node("a"), DISK, turn.seed, model).unwrap();
    assert!(client.progress(200, PATIENCE));
    let (ended, filler) = fill_during_the_copy(&cluster, 0);
    assert_eq!(ended["phase"], "aborted");
    assert!(
        ended["error"].to_string().to_lowercase().contains("space"),
        "{ended}"
    );
    assert!(client.progress(200, PATIENCE));
    println!("longest request: {:?}", client.stats().longest);
    let mut model = finish(client).unwrap();
    unharmed(cluster.node("a"), &mut model);
    std::fs::remove_file(&filler).unwrap();
    let moved = migrate(cluster.node("a"), DISK, "b", &["--verify"]).unwrap();
    assert_eq!(moved["phase"], "completed", "with space it works: {moved}");
    verify(cluster.node("b"), DISK, &mut model).unwrap();
    cluster.node_mut("b").kill();
}

#[test]
fn a_disk_that_is_already_migrating() {
    let (_turn, cluster, client) = Scenario::shared().under_load(DISK, SIZE);
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    let id = start_migration(a, DISK, "b", &["--max-bandwidth", "1MiB"]).unwrap();
    refused(a, "migrate precious --to b", "precious | migrat");
    refused(a, "disk rm precious", "precious | migrat");
    std::thread::sleep(Duration::from_millis(500));
    refused(b, "disk create precious --size 1048576", DISK);
    a.json(&["migration", "cancel", &id]);
    assert_eq!(await_end(a, &id)["phase"], "aborted");
    assert!(client.progress(100, PATIENCE));
    let mut model = finish(client).unwrap();
    unharmed(a, &mut model);

    // A disk of the same name in use at the destination is never overwritten.
    let (mine, theirs) = (b.nbd("shared"), a.nbd("shared"));
    for node in [a, b] {
        node.create_disk("shared", "1048576");
    }
    NbdConnection::connect(&theirs)
        .unwrap()
        .write_at(0, &[1; 4096])
        .unwrap();
    NbdConnection::connect(&mine)
        .unwrap()
        .write_at(0, &[2; 4096])
        .unwrap();
    refused(a, "migrate shared --to b", "shared | exists");
    let mut kept = [0; 4096];
    NbdConnection::connect(&mine)
        .unwrap()
        .read_at(0, &mut kept)
        .unwrap();
    assert_eq!(kept, [2; 4096]);
}

/// Creates images of one raw image with `qemu-img`, in other formats than raw.
fn other_formats(folder: &Path) -> Vec<(&'static str, PathBuf)> {
    let raw = folder.join("content");
    write_random(&raw, 1 << 20, 7).unwrap();
    [
        ("qcow2", "qcow2", ""),
        ("qed", "qed", ""),
        ("vmdk", "vmdk", ""),
        ("vmdk", "vmdk", "subformat=streamOptimized"),
        ("vhdx", "vhdx", ""),
        ("vdi", "vdi", ""),
        ("vpc", "vpc", ""),
        ("vpc", "vpc", "subformat=fixed"),
    ]
    .into_iter()
    .zip(0..)
    .map(|((named, format, options), number)| {
        let image = folder.join(format!("image{number}.{format}"));
        let mut convert = Command::new("qemu-img");
        convert.args(["convert", "-f", "raw", "-O", format]);
        if !options.is_empty() {
            convert.args(["-o", options]);
        }
        run(convert.arg(&raw).arg(&image)).unwrap();
        (named, image)
    })
    .collect()
}

#[test]
fn an_image_in_another_format_is_no_disk_unless_it_is_said_to_be_one() {
    let cluster = plain_cluster(&["a"]);
    let node = cluster.node("a");
    let images = other_formats(cluster.dir());
    for (format, image) in &images {
        let image = image.to_str().unwrap();
        let words = format!("{format} | qemu-img convert -O raw | --format raw");
        refused(node, &format!("disk import foreign {image}"), &words);
        refused(node, &format!("disk create foreign --path {image}"), &words);
        // The format is the reason even if the length is invalid, too.
        let odd = File::options().append(true).open(image).unwrap();
        let length = odd.metadata().unwrap().len();
        if *format != "vpc" {
            odd.set_len(length.next_multiple_of(512) + 8).unwrap();
            refused(node, &format!("disk import foreign {image}"), &words);
        }
        odd.set_len(length).unwrap();
    }
    // A raw disk may hold such a file on purpose.
    let (_, image) = &images[0];
    let length = image.metadata().unwrap().len().next_multiple_of(512);
    File::options()
        .append(true)
        .open(image)
        .unwrap()
        .set_len(length)
        .unwrap();
    let path = image.to_str().unwrap();
    let taken = ["disk", "create", "meant", "--path", path, "--format", "raw"];
    let disk = node.json(&taken);
    assert_eq!(disk["size_bytes"].as_u64(), Some(length));
}

#[test]
fn a_device_that_can_only_be_read_is_refused_at_once() {
    let cluster = plain_cluster(&["a"]);
    let file = cluster.dir().join("read-only");
    write_random(&file, 1 << 20, 7).unwrap();
    let mut attach = Command::new("losetup");
    let attached = attach
        .args(["--read-only", "--find", "--show"])
        .arg(&file)
        .output()
        .unwrap();
    assert!(attached.status.success(), "{attached:?}");
    let device = String::from_utf8(attached.stdout).unwrap();
    let device = device.trim();
    let create = ["disk", "create", "fixed", "--path", device];
    refuses(
        cluster.node("a"),
        &create,
        &format!("{device} | can only be read"),
    );
    run(Command::new("losetup").args(["--detach", device])).unwrap();
}
