//! Disks on an image that leave now: data missing at the destination is in the image, and at the source.

use godwit_testkit::client::Model;
use godwit_testkit::nbd::NbdConnection;
use godwit_testkit::process::wait_for;
use godwit_testkit::scenario::{
    PATIENCE, await_end, finish, load, migration, start_migration, verify,
};
use serde_json::Value;

use crate::fixture::{DISK, Fixture, MIB, SIZE, turn};

/// Writes whole MiB at the disk's node.
fn write(fixture: &Fixture, model: &mut Model, from: u64, many: u64) {
    let mut client = fixture.connect();
    for at in from..from + many {
        let ticket = model.begin_write(at * 2048..(at + 1) * 2048, true);
        client.write_at(at * MIB, &vec![0; MIB as usize]).unwrap();
        model.end_write(&ticket);
    }
    client.flush().unwrap();
}

/// Returns the amount of data at a that the disk at b still lacks, from the disk's status.
fn at_source(fixture: &Fixture) -> Option<String> {
    let disk = fixture.cluster.node("b").disk(DISK).ok()?;
    let status = disk["status"].as_str()?;
    let (_, rest) = status.split_once("elsewhere: ")?;
    assert!(rest.contains("the rest in image 'base'"), "{status}");
    Some(rest.split_once(" at node 'a'")?.0.to_owned())
}

#[test]
fn a_disk_on_an_image_leaves_now_and_lacks_something_in_two_places() {
    let turn = turn("a_disk_on_an_image_leaves_now");
    let mut fixture = Fixture::start(&["a", "b"], &[]);
    let a = fixture.cluster.node_mut("a");
    a.terminate(PATIENCE).unwrap();
    a.start(&[("pull::connect", "sleep(600000)")]).unwrap();
    let mut model = fixture.push_pattern(turn.seed);
    fixture.create(&["--prefetch", "off"]);
    // The written range ends within a block.
    write(&fixture, &mut model, 8, 16);
    let mut client = fixture.connect();
    let ticket = model.begin_write(30 * 2048 + 3..30 * 2048 + 5, true);
    client.write_at(30 * MIB + 3 * 512, &[0; 2 * 512]).unwrap();
    model.end_write(&ticket);
    client.flush().unwrap();
    drop(client);
    let a = fixture.a();
    // Without the switch the move would take half a minute.
    let id = start_migration(a, DISK, "b", &["--max-bandwidth", "512K"]).unwrap();
    let words = ["migration", "switch", &id, "--policy", "post-copy"];
    let switched = wait_for(PATIENCE, || a.godwit(&words).json().ok()).expect("it is switched");
    assert_eq!(switched["options"]["policy"], "post-copy", "{switched}");
    let moved = await_end(a, &id);
    assert_eq!(moved["phase"], "completed", "{moved}");
    assert!(moved["lm_seconds"].as_f64().unwrap() < 20.0, "{moved}");

    // Data in the image is read while the source is away; reads of data at the source wait.
    let lacks = at_source(&fixture).expect("a part of it is at node 'a'");
    println!("{lacks} are at the source");
    assert_eq!(migration(a, &id)["source_needed"], true);
    let text = a.refusal(&["disk", "rm", DISK]);
    assert!(text.contains("'b'"), "{text}");
    let b = fixture.cluster.node("b");
    let mut reader = NbdConnection::connect(&b.nbd(DISK)).unwrap();
    reader
        .read_at(50 * MIB, &mut vec![0; MIB as usize])
        .unwrap();
    assert!(at_source(&fixture).is_some(), "it is not there yet");
    drop(reader);

    // Both nodes are killed and started again.
    for name in ["a", "b"] {
        let node = fixture.cluster.node_mut(name);
        node.kill();
        node.start(&[]).unwrap();
    }
    let repaid = || {
        let here = fixture.cluster.node("b").disk(DISK).ok()?;
        let there = fixture.a().disk(DISK).ok()?;
        (there["owes"] == false).then_some(here)
    };
    let here = wait_for(PATIENCE, repaid).expect("the source is needed no more");
    assert_eq!(here["image"]["fetching"], true, "{here}");
    assert!(here["missing_bytes"].as_u64().unwrap() > SIZE / 2, "{here}");
    assert_eq!(at_source(&fixture), None);
    assert_eq!(
        migration(fixture.cluster.node("b"), &id)["source_needed"],
        false
    );
    fixture.cluster.node_mut("a").kill();
    verify(fixture.cluster.node("b"), DISK, &mut model).unwrap();
}

#[test]
fn a_disk_on_an_image_is_left_at_its_deadline_by_the_node_s_own_choice() {
    let turn = turn("a_disk_on_an_image_is_left_at_its_deadline");
    let fixture = Fixture::start(&["a", "b"], &[]);
    let mut model = fixture.push_pattern(turn.seed);
    fixture.create(&[]);
    write(&fixture, &mut model, 8, 40);
    let client = load(fixture.a(), DISK, turn.seed, model).unwrap();
    assert!(client.progress(300, PATIENCE), "{:?}", client.stats());
    let slow = ["--max-bandwidth", "1M", "--deadline", "3s"];
    let id = start_migration(fixture.a(), DISK, "b", &slow).unwrap();
    let moved = await_end(fixture.a(), &id);
    assert_eq!(moved["phase"], "completed", "{moved}");
    let options = &moved["options"];
    assert_eq!(options["policy"], "push-pull", "{moved}");
    let reason = options["policy_reason"].as_str().unwrap();
    println!("{reason}, after {} s", moved["lm_seconds"]);
    assert!(reason.contains("its deadline has come"), "{reason}");
    let all_is_there = || {
        let here: Value = fixture.cluster.node("b").disk(DISK).ok()?;
        let there = fixture.a().disk(DISK).ok()?;
        (here["missing_bytes"].is_null() && there["owes"] == false).then_some(())
    };
    assert!(client.progress(300, PATIENCE), "{:?}", client.stats());
    assert!(wait_for(PATIENCE, all_is_there).is_some());
    let mut model = finish(client).unwrap();
    verify(fixture.cluster.node("b"), DISK, &mut model).unwrap();
}
