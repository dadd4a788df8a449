//! A host whose file system is full: the virtual machine stands still instead of seeing I/O errors, reports the reason,
//! and goes on when there is room.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Duration;

use godwit_memory::pool::segment::Segment;
use godwit_memory::pool::{Pool, PoolError};
use godwit_testkit::Cluster;
use godwit_testkit::cluster::Node;
use godwit_testkit::process::wait_for;
use godwit_testkit::scenario::{PATIENCE, Scenario, says};
use godwit_testkit::small_fs::SmallFileSystem;
use godwit_testkit::vm::{GuestLoad, NodeGuest, VM, format_disk};
use rustix::fs::FallocateFlags;

const DISK: &str = "disk0";
const SIZE: u64 = 96 << 20;
/// Time in which a guest that must stand still would go on.
const MOMENT: Duration = Duration::from_secs(3);

struct Site {
    cluster: Cluster,
    small: SmallFileSystem,
    guest: NodeGuest,
}

impl Site {
    fn start() -> Self {
        let mut cluster = Cluster::secure(&["a", "b"]);
        // The node's own records lie on the same file system, as they usually do.
        let small = SmallFileSystem::new(2 * SIZE).unwrap();
        let records = small.path().join("a");
        std::fs::create_dir(&records).unwrap();
        cluster.node_mut("a").spec_mut().dir = records;
        cluster.start_all().unwrap();
        let image = small.path().join("disk.raw");
        format_disk(&image, SIZE).unwrap();
        let path = image.to_string_lossy();
        let a = cluster.node("a");
        a.json(&["disk", "create", DISK, "--path", &path]);
        let disks = vec![DISK.to_owned()];
        let guest = NodeGuest::boot(&cluster, a, disks, &GuestLoad::default()).unwrap();
        Self {
            cluster,
            small,
            guest,
        }
    }

    fn a(&self) -> &Node {
        self.cluster.node("a")
    }

    fn state(&self) -> String {
        let shown = self.a().godwit(&["vm", "show", VM]).json();
        shown.map_or_else(
            |e| e.to_string(),
            |vm| vm["state"].as_str().unwrap().to_owned(),
        )
    }

    fn becomes(&self, state: &str) {
        let seen = wait_for(PATIENCE, || (self.state() == state).then_some(()));
        seen.unwrap_or_else(|| panic!("it is {}", self.state()));
    }

    /// Returns true if the disk lacks room, by its description and by the node's metrics, which must agree.
    fn lacks_room(&self) -> bool {
        let shown = || {
            let disk = self.a().json(&["disk", "show", DISK]);
            disk["lacks_room"].as_bool().unwrap()
        };
        let mut lacks = shown();
        let metrics = loop {
            let metrics = self.a().metrics().unwrap();
            // There may be room since the disk was shown.
            let before = std::mem::replace(&mut lacks, shown());
            if before == lacks {
                break metrics;
            }
        };
        let value = f64::from(u8::from(lacks));
        let sample = format!("godwit_disk_lacks_room{{disk=\"{DISK}\"}} {value:.1}\n");
        assert!(metrics.contains(&sample), "no {sample} in {metrics}");
        lacks
    }

    /// Waits until the guest goes on and nothing waits for room any more.
    fn goes_on(&self) {
        self.becomes("running");
        self.guest.alive().unwrap();
        wait_for(PATIENCE, || (!self.lacks_room()).then_some(())).unwrap();
    }

    /// Takes the room away. Returns the file that holds it.
    fn run_out(&self) -> PathBuf {
        let filler = self.small.fill().unwrap();
        self.becomes("paused");
        filler
    }
}

/// A guest reuses pages given back by the balloon. If another machine got their room, the guest has no memory.
#[test]
fn a_pool_keeps_the_room_of_pages_that_were_given_back() {
    const MIB: u64 = 1 << 20;
    let small = SmallFileSystem::new(8 * MIB).unwrap();
    let pool = Pool::open(&small.path()).unwrap();
    let first = Segment::allocate(&pool, "first", 4 * MIB, "a").unwrap();
    let free = pool.room().unwrap().free;
    let memory = File::options().write(true).open(&first.place().path);
    let memory = memory.unwrap();
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let give_back = || rustix::fs::fallocate(&memory, punch, MIB, 3 * MIB).unwrap();
    give_back();
    assert_eq!(pool.room().unwrap().free, free);
    let full = Segment::allocate(&pool, "second", 4 * MIB, "b");
    assert!(matches!(full, Err(PoolError::Full { .. })), "{full:?}");
    let second = Segment::allocate(&pool, "second", 3 * MIB, "b").unwrap();
    memory.write_all_at(&[7; 3 << 20], MIB).unwrap();
    second.remove(&pool).unwrap();
    // Memory that has moved out of the pool leaves its room to others, and takes it back if the room is still free.
    give_back();
    rustix::fs::fallocate(&memory, punch, 0, MIB).unwrap();
    first.give_up(4 * MIB);
    let second = Segment::allocate(&pool, "second", 6 * MIB, "b").unwrap();
    let full = first.take_back(&pool);
    assert!(matches!(full, Err(PoolError::Full { .. })), "{full:?}");
    second.remove(&pool).unwrap();
    first.take_back(&pool).unwrap();
    Segment::allocate(&pool, "second", 4 * MIB, "b").expect_err("it is the first machine's again");
}

#[test]
fn a_machine_stands_still_until_there_is_room() {
    let _turn = Scenario::shared();
    let mut site = Site::start();
    let filler = site.run_out();
    assert!(site.lacks_room());
    let listed = site.a().text(&["vm", "list"]);
    says(&listed, &["no space is left for disk disk0"]);
    let refused = site.guest.try_migrate(site.a(), "b", &[]).unwrap_err();
    assert!(refused.to_string().contains("no space"), "{refused}");
    std::thread::sleep(MOMENT);
    assert_eq!(site.state(), "paused");
    // The machine goes on by itself, even if the node was away and came back before there was room.
    site.cluster.die_and_start("a");
    site.becomes("paused");
    std::thread::sleep(MOMENT);
    assert_eq!(site.state(), "paused");
    std::fs::remove_file(filler).unwrap();
    site.goes_on();

    // Or by command: as long as there is no room, the machine stands still again.
    let filler = site.run_out();
    site.a().json(&["vm", "resume", VM]);
    site.becomes("paused");
    std::thread::sleep(MOMENT);
    assert_eq!(site.state(), "paused");
    std::fs::remove_file(filler).unwrap();
    site.goes_on();

    // And the machine can still move.
    site.guest.migrate(site.a(), "b", &[]).unwrap();
    let finished = site.guest.finish(site.cluster.node("b")).unwrap();
    println!("{finished:?}");
}

#[test]
fn more_is_promised_than_there_is_only_with_a_warning() {
    let cluster = Cluster::start(&["a"]).unwrap();
    let create = |words: &[&str]| {
        let command = [&["disk", "create"], words].concat();
        cluster.node("a").godwit(&command).json()
    };
    let small = create(&["small", "--size", "8MiB"]).unwrap();
    assert_eq!(small["warnings"], serde_json::json!([]), "{small}");
    let huge = create(&["huge", "--size", "8TiB"]).unwrap();
    let warning = huge["warnings"][0].as_str().unwrap();
    says(warning, &["may come to need"]);

    let full = create(&["full", "--size", "8MiB", "--preallocate"]).unwrap();
    assert!(full["allocated_bytes"].as_u64() >= Some(8 << 20), "{full}");
    let refused = create(&["fuller", "--size", "8TiB", "--preallocate"]).unwrap_err();
    assert!(refused.to_string().contains("has no space"), "{refused}");
    assert_eq!(cluster.node("a").disk_state("fuller"), "unknown");
}
