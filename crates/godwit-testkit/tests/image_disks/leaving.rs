//! Disks on an image that leave now: data missing at the destination is in the image, and at the source.

use godwit_testkit::client::Model;
use godwit_testkit::process::wait_for;
use godwit_testkit::scenario::{
    PATIENCE, becomes_whole, ends, finish, load, migration, says, start_migration, verify,
};

use crate::fixture::{DISK, Fixture, MIB, SIZE, write};

/// Writes sectors at the disk's node.
fn write_at_a(fixture: &Fixture, model: &mut Model, start: u64, sectors: u64) {
    let mut client = fixture.connect();
    write(&mut client, model, start, sectors);
    client.flush().unwrap();
}

/// Returns the amount of data at a that the disk at b still lacks, from the disk's status.
fn at_source(fixture: &Fixture) -> Option<String> {
    let disk = fixture.b().disk(DISK).ok()?;
    let status = disk["status"].as_str()?;
    let (_, rest) = status.split_once("elsewhere: ")?;
    assert!(rest.contains("the rest in image 'base'"), "{status}");
    Some(rest.split_once(" at node 'a'")?.0.to_owned())
}

#[test]
fn a_disk_on_an_image_leaves_now_and_lacks_something_in_two_places() {
    let mut fixture = Fixture::start(&["a", "b"], &[]);
    fixture
        .cluster
        .restart("a", &[("pull::connect", "sleep(600000)")]);
    let mut model = fixture.push_pattern();
    fixture.create(&["--prefetch", "off"]);
    // The written range ends within a block.
    write_at_a(&fixture, &mut model, 8 * 2048, 16 * 2048);
    write_at_a(&fixture, &mut model, 30 * 2048 + 3, 2);
    let a = fixture.a();
    // Without the switch the move would take half a minute.
    let id = start_migration(a, DISK, "b", &["--max-bandwidth", "512K"]).unwrap();
    let words = ["migration", "switch", &id, "--policy", "post-copy"];
    let switched = wait_for(PATIENCE, || a.godwit(&words).json().ok()).expect("it is switched");
    assert_eq!(switched["options"]["policy"], "post-copy", "{switched}");
    let moved = ends(a, &id, "completed");
    assert!(moved["lm_seconds"].as_f64().unwrap() < 20.0, "{moved}");

    // Data in the image is read while the source is away; reads of data at the source wait.
    let lacks = at_source(&fixture).expect("a part of it is at node 'a'");
    println!("{lacks} are at the source");
    assert_eq!(migration(a, &id)["source_needed"], true);
    a.refuses(&["disk", "rm", DISK], &["'b'"]);
    let b = fixture.b();
    let mut reader = b.connect(DISK);
    reader
        .read_at(50 * MIB, &mut vec![0; MIB as usize])
        .unwrap();
    assert!(at_source(&fixture).is_some(), "it is not there yet");
    drop(reader);

    // Both nodes are killed and started again.
    for name in ["a", "b"] {
        fixture.cluster.die_and_start(name);
    }
    let repaid = || {
        let here = fixture.b().disk(DISK).ok()?;
        let there = fixture.a().disk(DISK).ok()?;
        (there["owes"] == false).then_some(here)
    };
    let here = wait_for(PATIENCE, repaid).expect("the source is needed no more");
    assert_eq!(here["image"]["fetching"], true, "{here}");
    assert!(here["missing_bytes"].as_u64().unwrap() > SIZE / 2, "{here}");
    assert_eq!(at_source(&fixture), None);
    assert_eq!(migration(fixture.b(), &id)["source_needed"], false);
    fixture.cluster.node_mut("a").kill();
    verify(fixture.b(), DISK, &mut model).unwrap();
}

#[test]
fn a_disk_on_an_image_is_left_at_its_deadline_by_the_node_s_own_choice() {
    let fixture = Fixture::start(&["a", "b"], &[]);
    let mut model = fixture.push_pattern();
    fixture.create(&[]);
    write_at_a(&fixture, &mut model, 8 * 2048, 40 * 2048);
    let client = load(fixture.a(), DISK, fixture.turn.seed, model).unwrap();
    assert!(client.progress(300, PATIENCE), "{:?}", client.stats());
    let slow = ["--max-bandwidth", "1M", "--deadline", "3s"];
    let id = start_migration(fixture.a(), DISK, "b", &slow).unwrap();
    let moved = ends(fixture.a(), &id, "completed");
    let options = &moved["options"];
    assert_eq!(options["policy"], "push-pull", "{moved}");
    let reason = options["policy_reason"].as_str().unwrap();
    println!("{reason}, after {} s", moved["lm_seconds"]);
    says(reason, &["its deadline has come"]);
    assert!(client.progress(300, PATIENCE), "{:?}", client.stats());
    becomes_whole(fixture.b(), fixture.a(), DISK);
    let mut model = finish(client).unwrap();
    verify(fixture.b(), DISK, &mut model).unwrap();
}
