//! Machines whose disks are images. They work long before their disks are here, send only their writes when they move,
//! and need no repository beside a node with the image.

use std::process::Command;
use std::time::Duration;

use godwit_testkit::Node;
use godwit_testkit::image::write_random;
use godwit_testkit::process::{run, wait_for};
use godwit_testkit::vm::{GuestLoad, NodeGuest, check_disk, format_image};

use crate::fixture::{DISK, Fixture, MIB};

/// A disk with the whole image and no user.
const KEPT: &str = "kept";
/// Longest time for fetching this disk.
const FETCHING: Duration = Duration::from_secs(900);
/// The disk of the machine to start while the repository is away.
const LATE: &str = "late";

/// Checks the file system of a disk with parts elsewhere, by reading the whole disk.
fn check_all_of(fixture: &Fixture, node: &Node, disk: &str) {
    let copy = fixture.cluster.dir().join("copy");
    let uri = node.nbd(disk).uri();
    let mut convert = Command::new("qemu-img");
    run(convert
        .args(["convert", "-f", "raw", "-O", "raw", &uri])
        .arg(&copy))
    .unwrap();
    check_disk(&copy).unwrap();
    std::fs::remove_file(copy).unwrap();
}

fn share(part: u64, of: u64) -> String {
    format!(
        "{part} of {of} bytes, {:.1} %",
        part as f64 * 100.0 / of as f64
    )
}

/// Starts and moves a machine on an image of this size, and starts another while the repository is away.
fn starts_moves_and_starts_without_the_repository(size: u64) {
    let fixture = Fixture::start(&["a", "b"], &[]);
    let path = fixture.cluster.dir().join("guest");
    // Blocks unused by the file system are random data, too, and would have to be fetched.
    write_random(&path, size, fixture.turn.seed).unwrap();
    format_image(&path).unwrap();
    fixture.push(&path, &[]);
    std::fs::remove_file(path).unwrap();
    let made = fixture.create(&["--prefetch", "off"]);
    // Blocks to which mke2fs wrote zeroes are no data.
    let data = made["missing_bytes"].as_u64().unwrap();
    assert!(data > size / 10 * 8, "{made}");
    let load = GuestLoad {
        seed: fixture.turn.seed,
        file_mb: 8,
        ..GuestLoad::default()
    };
    let boot = |node: &str, disk: &str| {
        let node = fixture.cluster.node(node);
        NodeGuest::boot(&fixture.cluster, node, vec![disk.to_owned()], &load).unwrap()
    };

    let guest = boot("a", DISK);
    let fetched = data - fixture.missing();
    println!(
        "the guest works: fetched or written {}",
        share(fetched, data)
    );
    assert!(fetched < data / 10, "{}", share(fetched, data));

    let (a, b) = (fixture.cluster.node("a"), fixture.b());
    let (moved, gaps) = guest.migrate(a, "b", &[]).unwrap();
    let sent = moved["disk_bytes"].as_u64().unwrap();
    let written = a.disk(DISK).unwrap()["io"]["written_bytes"].as_u64();
    let written = written.unwrap();
    println!(
        "moved: {sent} bytes of its disk were sent, {written} written, and the guest waited {:.0} ms",
        gaps.host_ms
    );
    assert!(sent <= written + MIB, "{moved}");
    let missing = b.disk(DISK).unwrap()["missing_bytes"].as_u64().unwrap();
    assert!(missing > data / 10 * 8, "{missing} bytes are missing");
    let finished = guest.end(b).unwrap();
    assert_eq!((finished.errors, finished.mismatches), (0, 0));
    // The guest's writes there and the rest of the image fit together.
    check_all_of(&fixture, b, DISK);
    let (from_peers, from_repository) = fixture.fetched_at("b");
    println!("b fetched {from_peers} bytes from a, {from_repository} from the repository");
    assert!(from_peers > 0);

    fixture.create_at("a", KEPT, &[]);
    let whole = || (a.disk(KEPT).ok()?["image"]["fetching"] == false).then_some(());
    assert!(wait_for(FETCHING, whole).is_some(), "{:?}", a.disk(KEPT));
    fixture.create_at("b", LATE, &["--prefetch", "off"]);
    b.text(&["disk", "rm", DISK]);
    fixture.is_there(false);
    let before = fixture.fetched_at("b");
    let guest = boot("b", LATE);
    let after = fixture.fetched_at("b");
    println!(
        "without the repository the guest works with {} bytes from a",
        after.0 - before.0
    );
    assert_eq!(after.1, before.1);
    assert!(after.0 > before.0 && after.0 - before.0 < data / 10);
    let finished = guest.end(b).unwrap();
    assert_eq!((finished.errors, finished.mismatches), (0, 0));
}

#[test]
fn a_machine_starts_from_an_image_moves_what_it_wrote_and_needs_no_repository_beside_another_node()
{
    starts_moves_and_starts_without_the_repository(256 * MIB);
}

#[test]
#[ignore = "16 GiB of storage and some minutes: make test-slow ONLY='--test image_disks'"]
fn a_machine_on_an_image_of_4_gib_starts_moves_and_needs_no_repository_beside_another_node() {
    starts_moves_and_starts_without_the_repository(4096 * MIB);
}
