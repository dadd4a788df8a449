//! Places of arriving disks: in a pool, at a path, on a block device, and nowhere outside of the destination's
//! configuration.

use std::fs::File;
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use godwit_testkit::Cluster;
use godwit_testkit::process::{run, wait_for};
use godwit_testkit::random::Random;
use godwit_testkit::scenario::{PATIENCE, Scenario, migrate, moves, says, start_migration, until};
use serde_json::Value;

const SIZE: u64 = 16 << 20;

/// Two nodes, of which `b` has the pool `fast`.
struct Site {
    cluster: Cluster,
    pool: PathBuf,
    content: Vec<u8>,
}

impl Site {
    fn start(seed: u64) -> Self {
        let mut cluster = Cluster::secure(&["a", "b"]);
        let pool = cluster.dir().join("fast");
        std::fs::create_dir(&pool).unwrap();
        let pool = std::fs::canonicalize(pool).unwrap();
        let b = cluster.node_mut("b").spec_mut();
        b.dir = pool.join("b");
        std::fs::create_dir(&b.dir).unwrap();
        b.pools = vec![
            ("fast".to_owned(), pool.clone()),
            ("devices".to_owned(), "/dev".into()),
        ];
        cluster.start_all().unwrap();
        // Data, with holes around.
        let mut content = vec![0; SIZE as usize];
        Random::new(seed).fill(&mut content[3 << 20..5 << 20]);
        Self {
            cluster,
            pool,
            content,
        }
    }

    /// Creates a disk at `a`.
    fn create(&self, disk: &str) {
        let path = self.cluster.dir().join(format!("{disk}.source"));
        let image = File::create_new(&path).unwrap();
        image.set_len(SIZE).unwrap();
        image
            .write_all_at(&self.content[3 << 20..5 << 20], 3 << 20)
            .unwrap();
        let create = ["disk", "create", disk, "--path", &path.to_string_lossy()];
        self.cluster.node("a").json(&create);
    }

    fn moves(&self, disk: &str, options: &[&str]) {
        let options = [options, &["--verify"]].concat();
        moves(self.cluster.node("a"), disk, "b", &options);
    }

    /// Lets `b` pause once, between the admission of an offer and the creation of files.
    fn hold_the_first_offer(&mut self) {
        self.cluster
            .restart("b", &[("offer::admitted", "1*sleep(2000)->off")]);
    }

    fn first_offer_is_held(&self) {
        let held = || {
            let log = self.cluster.node("b").log();
            log.contains("offer::admitted").then_some(())
        };
        wait_for(PATIENCE, held).expect("the first is about to be put there");
    }

    /// Returns the refusal of a move; checks that the disk stays at `a` and nothing is at `b`.
    fn refused(&self, disk: &str, options: &[&str]) -> String {
        let refused = migrate(self.cluster.node("a"), disk, "b", options).unwrap_err();
        assert_eq!(self.cluster.node("a").disk_state(disk), "serving");
        assert_eq!(self.cluster.node("b").disk_state(disk), "unknown");
        refused.to_string()
    }

    fn at_b(&self, disk: &str) -> Value {
        self.cluster.node("b").disk(disk).unwrap()
    }

    fn removed(&self, disk: &str) {
        let b = self.cluster.node("b");
        b.text(&["disk", "rm", disk]);
    }
}

fn holds(path: &Path, content: &[u8]) {
    assert!(
        std::fs::read(path).unwrap() == content,
        "{}",
        path.display()
    );
}

#[test]
fn a_disk_arrives_in_a_pool_or_at_a_path_in_one() {
    let turn = Scenario::shared();
    let site = Site::start(turn.seed);
    let named = site.pool.join("named.img");
    let text = named.to_string_lossy();
    for (disk, options, path) in [
        ("pooled", ["--pool", "fast"], &site.pool.join("pooled.raw")),
        ("named", ["--into", &text], &named),
    ] {
        site.create(disk);
        site.moves(disk, &options);
        assert_eq!(site.at_b(disk)["path"], path.to_string_lossy().as_ref());
        holds(path, &site.content);
        // The disk comes back to the former place, and goes there again.
        let b = site.cluster.node("b");
        migrate(b, disk, "a", &[]).unwrap();
        site.moves(disk, &options);
        site.removed(disk);
        assert!(!path.exists(), "the node made it and removes it");
    }
}

#[test]
fn a_machines_disks_arrive_in_a_pool() {
    let turn = Scenario::shared();
    let site = Site::start(turn.seed);
    let (a, b) = (site.cluster.node("a"), site.cluster.node("b"));
    let mut run = vec!["vm", "run", "m", "--accel", "tcg", "--memory", "64M"];
    for disk in ["root", "data"] {
        site.create(disk);
        run.extend(["--disk", disk]);
    }
    a.json(&[&run[..], &["--", "-nic", "none"]].concat());
    let into = site.pool.join("x");
    let refused = migrate(a, "vm/m", "b", &["--into", &into.to_string_lossy()]);
    let refused = refused.unwrap_err().to_string();
    says(&refused, &["--pool NAME"]);
    moves(a, "vm/m", "b", &["--pool", "fast"]);
    for disk in ["root", "data"] {
        let path = site.pool.join(format!("{disk}.raw"));
        assert_eq!(site.at_b(disk)["path"], path.to_string_lossy().as_ref());
    }
    b.stop_vm("m");
}

#[test]
fn a_disk_arrives_nowhere_else() {
    let turn = Scenario::shared();
    let site = Site::start(turn.seed);
    site.create("d");
    let elsewhere = std::fs::canonicalize(site.cluster.dir()).unwrap();
    symlink(&elsewhere, site.pool.join("out")).unwrap();
    let taken = site.pool.join("taken");
    std::fs::write(&taken, b"somebody's").unwrap();
    let dangling = site.pool.join("dangling");
    symlink(elsewhere.join("nothing"), &dangling).unwrap();
    let path = |path: &str| elsewhere.join(path).to_string_lossy().into_owned();
    for (options, told) in [
        (["--pool", "slow"], "has no pool"),
        (["--into", &path("d.img")], "in none of its pools"),
        (["--into", &path("fast/../d.img")], "in none of its pools"),
        (["--into", &path("fast/out/d.img")], "in none of its pools"),
        (["--into", &path("fast/none/d.img")], "No such file"),
        (["--into", &path("fast/taken")], "has a file"),
        (["--into", &path("fast/b/d.img")], "data directory"),
        (["--into", &path("fast/dangling")], "link to nothing"),
        (["--into", "/dev/no-such-volume"], "has no device"),
        (["--into", "d.img"], "no path that an image can have"),
    ] {
        let refused = site.refused("d", &options);
        assert!(refused.contains(told), "{options:?}: {refused}");
    }
    assert_eq!(std::fs::read(&taken).unwrap(), b"somebody's");
    assert!(!elsewhere.join("d.img").exists());
    assert!(dangling.is_symlink(), "it is somebody's");
    // A disk that was there before stays at its place.
    site.moves("d", &["--pool", "fast"]);
    migrate(site.cluster.node("b"), "d", "a", &[]).unwrap();
    let other = path("fast/other");
    let moved = migrate(site.cluster.node("a"), "d", "b", &["--into", &other]);
    let refused = moved.unwrap_err().to_string();
    says(&refused, &["had disk d before"]);
}

#[test]
fn a_file_that_somebody_makes_there_meanwhile_stays() {
    let turn = Scenario::shared();
    let mut site = Site::start(turn.seed);
    site.hold_the_first_offer();
    site.create("d");
    let place = site.pool.join("one");
    let into = place.to_string_lossy();
    let id = start_migration(site.cluster.node("a"), "d", "b", &["--into", &into]).unwrap();
    site.first_offer_is_held();
    std::fs::write(&place, b"somebody's").unwrap();
    let watch = ["migration", "watch", &id];
    let refused = site.cluster.node("a").godwit(&watch).json();
    assert!(refused.is_err(), "{refused:?}");
    assert_eq!(site.cluster.node("a").disk_state("d"), "serving");
    until("nothing of it is left at the other node", || {
        site.cluster.node("b").disk_state("d") == "unknown"
    });
    assert_eq!(std::fs::read(&place).unwrap(), b"somebody's");
}

#[test]
fn of_two_disks_that_come_at_once_one_gets_the_place() {
    let turn = Scenario::shared();
    let mut site = Site::start(turn.seed);
    site.hold_the_first_offer();
    let place = site.pool.join("one");
    let into = place.to_string_lossy();
    site.create("first");
    site.create("second");
    let a = site.cluster.node("a");
    let id = start_migration(a, "first", "b", &["--into", &into]).unwrap();
    site.first_offer_is_held();
    let refused = site.refused("second", &["--into", &into]);
    says(&refused, &["is the image of disk first"]);
    let moved = a.json(&["migration", "watch", &id]);
    assert_eq!(moved["phase"], "completed", "{moved}");
    holds(&place, &site.content);
}

/// A loop device, until dropped.
struct Device(PathBuf);

impl Device {
    fn new(backing: &Path, size: u64) -> Self {
        let file = File::create_new(backing).unwrap();
        // Data of an earlier owner must not be seen.
        file.write_all_at(&vec![0xa5; size as usize], 0).unwrap();
        let mut attach = Command::new("losetup");
        let attached = run(attach.args(["--find", "--show"]).arg(backing)).unwrap();
        Self(String::from_utf8(attached.stdout).unwrap().trim().into())
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let detached = run(Command::new("losetup").arg("--detach").arg(&self.0));
        detached.expect("the device is detached");
    }
}

#[test]
fn a_disk_arrives_on_a_block_device() {
    let turn = Scenario::shared();
    let site = Site::start(turn.seed);
    site.create("d");
    let dir = site.cluster.dir();
    let device = Device::new(&dir.join("fits"), SIZE);
    let short = Device::new(&dir.join("short"), SIZE / 2);
    symlink(&device.0, site.pool.join("volume")).unwrap();
    symlink(&short.0, site.pool.join("short")).unwrap();
    let path = |name: &str| site.pool.join(name).to_string_lossy().into_owned();
    let refused = site.refused("d", &["--into", &path("short")]);
    says(&refused, &["make it at least as large"]);

    let into = path("volume");
    site.moves("d", &["--into", &into]);
    assert_eq!(site.at_b("d")["path"], into.as_str());
    holds(&device.0, &site.content);
    site.create("e");
    let refused = site.refused("e", &["--into", &into]);
    says(&refused, &["is the image of disk d"]);
    site.removed("d");
    holds(&device.0, &site.content);
}

#[test]
fn a_larger_device_is_taken_and_the_disk_stays_as_large() {
    let turn = Scenario::shared();
    let mut site = Site::start(turn.seed);
    site.create("d");
    // As LVM rounds up to whole extents.
    const REST: u64 = 4 << 20;
    let device = Device::new(&site.cluster.dir().join("larger"), SIZE + REST);
    symlink(&device.0, site.pool.join("larger")).unwrap();
    let into = site.pool.join("larger").to_string_lossy().into_owned();
    site.moves("d", &["--into", &into]);
    for restarted in [false, true] {
        if restarted {
            site.cluster.restart("b", &[]);
        }
        assert_eq!(site.at_b("d")["size_bytes"], SIZE);
        let b = site.cluster.node("b");
        let mut client = b.connect("d");
        let mut sector = [0; 512];
        client.read_at(SIZE - 512, &mut sector).unwrap();
        assert!(client.read_at(SIZE, &mut sector).is_err());
    }
    let exported = site.cluster.dir().join("exported");
    let export = ["disk", "export", "d", &exported.to_string_lossy()];
    let done = || site.cluster.node("b").godwit(&export).text().ok();
    wait_for(PATIENCE, done).expect("no client uses it any more");
    holds(&exported, &site.content);
    let all = std::fs::read(&device.0).unwrap();
    assert!(all[..SIZE as usize] == site.content);
    assert!(
        all[SIZE as usize..].iter().all(|byte| *byte == 0xa5),
        "it is not the disk's"
    );
    let b = site.cluster.node("b");
    moves(b, "d", "a", &["--verify"]);
    assert_eq!(
        site.cluster.node("a").disk("d").unwrap()["size_bytes"],
        SIZE
    );
}
