//! A disk from an image is usable at once, and fetched or written data stays.

use godwit_testkit::process::wait_for;
use godwit_testkit::scenario::{PATIENCE, finish, load, migrate, says, verify};

use crate::fixture::{DISK, Fixture, MIB, SIZE};

#[test]
fn a_disk_is_an_image_at_once_and_fetches_what_is_read() {
    let fixture = Fixture::start(&["a", "b"], &[]);
    let mut model = fixture.push_pattern();
    let made = fixture.create(&["--prefetch", "off"]);
    assert_eq!(made["missing_bytes"], SIZE, "{made}");
    assert_eq!(
        (&made["serves"], &made["state"]),
        (&true.into(), &"serving".into())
    );
    let status = made["status"].as_str().unwrap();
    says(status, &["64 MiB of it still in image 'base'"]);

    let mut client = fixture.connect();
    let mut sector = [0; 512];
    client.read_at(20 * MIB, &mut sector).unwrap();
    let read = wait_for(PATIENCE, || {
        Some(fixture.missing()).filter(|left| *left < SIZE)
    });
    let read = read.unwrap();
    assert!(read >= SIZE - 256 * 1024, "{read} bytes are missing");
    drop(client);
    let stored = fixture.disk()["allocated_bytes"].as_u64().unwrap();
    assert!(stored <= MIB, "{stored} bytes are stored");

    // As long as something is missing, the disk stays at the node and the image in the repository.
    let text = fixture.image(&["rm", "base"]).unwrap_err().to_string();
    says(
        &text,
        &["image 'base' is in use: disk a/d still fetches from it"],
    );
    let text = migrate(fixture.a(), DISK, "b", &["--verify"])
        .unwrap_err()
        .to_string();
    says(
        &text,
        &["cannot be moved like that: a part of it is still in image 'base'"],
    );

    // Reading the whole disk fetches the whole image.
    verify(fixture.a(), DISK, &mut model).unwrap();
    fixture.becomes_whole();
    fixture.is_needed_no_more();
    let moved = migrate(fixture.a(), DISK, "b", &["--verify"]).unwrap();
    assert_eq!(moved["verified"], true, "{moved}");
    verify(fixture.b(), DISK, &mut model).unwrap();
}

#[test]
fn what_is_written_and_fetched_stays_whoever_dies_and_wherever_the_repository_is() {
    let mut fixture = Fixture::start(&["a"], &[]);
    // Without a pause the whole image would be fetched before anything can happen.
    let slow = ("image::chunk", "sleep(15)");
    fixture.cluster.restart("a", &[slow]);
    let model = fixture.push_pattern();
    fixture.create(&[]);
    let mut model = Some(model);
    let mut kills = 0;
    while fixture.disk()["image"]["fetching"] == true {
        let client = load(fixture.a(), DISK, fixture.turn.seed, model.take().unwrap()).unwrap();
        assert!(client.progress(100, PATIENCE), "{:?}", client.stats());
        if kills < 3 {
            // The clients' requests without an answer may have happened or not.
            fixture.cluster.node_mut("a").kill();
            let lost = client.stop(PATIENCE).clean().unwrap();
            fixture.cluster.node_mut("a").start(&[slow]).unwrap();
            model = Some(lost);
            kills += 1;
        } else {
            fixture.becomes_whole();
            assert!(client.progress(100, PATIENCE), "{:?}", client.stats());
            model = Some(finish(client).unwrap());
        }
    }
    assert!(kills > 0, "it was whole too soon");
    fixture.is_there(false);
    verify(fixture.a(), DISK, &mut model.unwrap()).unwrap();
}

#[test]
fn disks_of_one_image_fetch_it_once() {
    let fixture = Fixture::start(&["a"], &[]);
    let mut model = fixture.push_pattern();
    fixture.create(&[]);
    fixture.becomes_whole();
    let others: Vec<String> = (0..7).map(|number| format!("d{number}")).collect();
    for disk in &others {
        fixture.create_at("a", disk, &[]);
    }
    for disk in &others {
        fixture.becomes_whole_at("a", disk);
    }
    // A file that does not answer at once is passed over.
    let (_, from_repository) = fixture.fetched();
    assert!(
        from_repository <= SIZE + SIZE / 4,
        "{from_repository} bytes"
    );
    verify(fixture.a(), &others[6], &mut model).unwrap();
}
