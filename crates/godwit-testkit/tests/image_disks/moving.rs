//! Disks on an image that move.

use godwit_testkit::client::Model;
use godwit_testkit::cluster::ClusterOptions;
use godwit_testkit::nbd::NbdConnection;
use godwit_testkit::process::wait_for;
use godwit_testkit::scenario::{PATIENCE, finish, load, migrate, verify};
use serde_json::Value;

use crate::fixture::{DISK, Fixture, MIB, SIZE, turn};

#[test]
fn a_disk_moves_without_its_image_and_only_what_was_written_is_sent() {
    let turn = turn("a_disk_moves_without_its_image");
    let mut fixture = Fixture::start(&["a", "b"], &[]);
    let mut model = fixture.push_pattern(turn.seed);
    fixture.create(&["--prefetch", "off"]);
    // Whole blocks and parts of blocks, fetched or not.
    let mut client = fixture.connect();
    client
        .read_at(10 * MIB, &mut vec![0; 4 * MIB as usize])
        .unwrap();
    let mut written = 0;
    let mut write = |client: &mut NbdConnection, model: &mut Model, start: u64, sectors: u64| {
        let ticket = model.begin_write(start..start + sectors, true);
        client
            .write_at(start * 512, &vec![0; sectors as usize * 512])
            .unwrap();
        model.end_write(&ticket);
        written += sectors * 512;
        written
    };
    write(&mut client, &mut model, 11 * 2048, 2048);
    write(&mut client, &mut model, 12 * 2048 + 3, 1);
    write(&mut client, &mut model, 40 * 2048, 4096);
    write(&mut client, &mut model, 50 * 2048 + 5, 7);
    client.flush().unwrap();
    drop(client);
    let sent = |moved: &Value| {
        let bytes = |what: &str| moved["progress"][what].as_u64().unwrap();
        bytes("bytes_copied").max(bytes("bytes_sent")) + bytes("double_write_bytes")
    };
    let there_and_back = [("a", "b", 40), ("b", "a", 0)];
    for (from, to, more) in there_and_back {
        let source = fixture.cluster.node(from);
        let mut client = NbdConnection::connect(&source.nbd(DISK)).unwrap();
        let written = write(&mut client, &mut model, 60 * 2048 + more, 8);
        drop(client);
        let moved = migrate(source, DISK, to, &[]).unwrap();
        let sent = sent(&moved);
        println!("{from} to {to}: {written} bytes were written and {sent} sent");
        assert_eq!(moved["phase"], "completed", "{moved}");
        assert_eq!(moved["options"]["policy"], "pre-copy", "{moved}");
        assert!(sent <= written + 64 * 1024, "{sent} bytes were sent");
        let here = fixture.cluster.node(to).disk(DISK).unwrap();
        assert_eq!(here["image"]["fetching"], true, "{here}");
        assert!(here["missing_bytes"].as_u64().unwrap() > SIZE / 2, "{here}");
        // The source is not needed, and holds nothing back.
        assert_eq!(source.disk(DISK).unwrap()["owes"], false);
    }
    // The disk moves on with the right content, even when nodes die.
    let moved = migrate(fixture.a(), DISK, "b", &[]).unwrap();
    assert_eq!(moved["phase"], "completed", "{moved}");
    fixture.cluster.node_mut("a").kill();
    let b = fixture.cluster.node_mut("b");
    b.kill();
    b.start(&[]).unwrap();
    let in_use = fixture.cluster.node("b").godwit(&[
        "image",
        "--repository",
        &fixture.repository.display().to_string(),
        "show",
        "base",
    ]);
    let in_use = in_use.text().unwrap();
    assert!(in_use.contains("b/d"), "{in_use}");
    verify(fixture.cluster.node("b"), DISK, &mut model).unwrap();
}

#[test]
fn a_whole_disk_moves_as_a_whole_when_it_is_asked_to_or_its_image_is_gone() {
    let turn = turn("a_whole_disk_moves_as_a_whole");
    let fixture = Fixture::start(&["a", "b"], &[]);
    let mut model = fixture.push_pattern(turn.seed);
    fixture.create(&[]);
    fixture.becomes_whole();
    let moves = |from: &str, to: &str, words: &[&str]| {
        let moved = migrate(fixture.cluster.node(from), DISK, to, words).unwrap();
        assert_eq!(moved["phase"], "completed", "{moved}");
        let here = fixture.cluster.node(to).disk(DISK).unwrap();
        assert_eq!(here["missing_bytes"], Value::Null, "{here}");
        moved["progress"]["bytes_copied"].as_u64().unwrap()
    };
    let all = moves("a", "b", &["--no-delta"]);
    assert!(all > SIZE / 2, "{all} bytes were copied");
    fixture.image(&["rm", "base"]).unwrap();
    fixture.gc().unwrap();
    assert!(fixture.chunks().is_empty());
    moves("b", "a", &[]);
    verify(fixture.a(), DISK, &mut model).unwrap();
}

#[test]
fn a_disk_on_an_image_moves_under_load_while_it_is_fetched() {
    let turn = turn("a_disk_on_an_image_moves_under_load");
    let mut fixture = Fixture::start(&["a", "b"], &[]);
    for name in ["a", "b"] {
        let node = fixture.cluster.node_mut(name);
        node.terminate(PATIENCE).unwrap();
        node.start(&[("image::chunk", "sleep(150)")]).unwrap();
    }
    let model = fixture.push_pattern(turn.seed);
    fixture.create(&[]);
    let client = load(fixture.a(), DISK, turn.seed, model).unwrap();
    assert!(client.progress(300, PATIENCE), "{:?}", client.stats());
    assert_eq!(fixture.disk()["image"]["fetching"], true);
    for (from, to) in [("a", "b"), ("b", "a"), ("a", "b")] {
        let (source, here) = (fixture.cluster.node(from), fixture.cluster.node(to));
        let moved = migrate(source, DISK, to, &[]).unwrap();
        assert_eq!(moved["phase"], "completed", "{moved}");
        let missing = here.disk(DISK).unwrap()["missing_bytes"].clone();
        println!(
            "{from} to {to}: {missing} bytes are missing, {}",
            moved["progress"]
        );
        assert!(client.progress(300, PATIENCE), "{:?}", client.stats());
    }
    let whole = || {
        let disk = fixture.cluster.node("b").disk(DISK).ok()?;
        (disk["image"]["fetching"] == false).then_some(())
    };
    assert!(wait_for(PATIENCE, whole).is_some());
    let mut model = finish(client).unwrap();
    fixture.is_there(false);
    verify(fixture.cluster.node("b"), DISK, &mut model).unwrap();
}

#[test]
fn a_whole_disk_moves_as_a_whole_to_a_node_that_does_not_get_at_its_image() {
    let turn = turn("a_whole_disk_moves_as_a_whole_to_a_node");
    let secure = ClusterOptions::secure().unwrap();
    let mut fixture = Fixture::prepare(&["a", "b"], &[], secure);
    let empty = fixture.cluster.dir().join("empty");
    // Without this folder the repository would count as not mounted.
    std::fs::create_dir_all(empty.join("images")).unwrap();
    let options = &mut fixture.cluster.node_mut("b").spec_mut().options;
    options[1] = empty.display().to_string();
    fixture.cluster.start_all().unwrap();
    let mut model = fixture.push_pattern(turn.seed);
    fixture.create(&["--prefetch", "off"]);
    // The disk cannot move while a part is only in the image.
    let text = fixture.a().refusal(&["migrate", DISK, "--to", "b"]);
    assert!(
        text.contains("is missing in the repository") && text.contains("node 'b' refused"),
        "{text}"
    );
    assert_eq!(fixture.a().disk_state(DISK), "serving");
    assert!(fixture.cluster.node("b").disk(DISK).is_err());
    verify(fixture.a(), DISK, &mut model).unwrap();
    fixture.becomes_whole();

    let moved = migrate(fixture.a(), DISK, "b", &[]).unwrap();
    assert_eq!(moved["phase"], "completed", "{moved}");
    let reason = moved["options"]["policy_reason"].as_str().unwrap();
    assert!(
        reason.contains(
            "the disk moves without its image, because node 'b' does not get at image 'base'"
        ),
        "{reason}"
    );
    let warning = moved["warnings"][0].as_str().unwrap();
    assert!(
        warning.contains("is missing in the repository"),
        "{warning}"
    );
    let b = fixture.cluster.node("b");
    assert_eq!(b.disk(DISK).unwrap()["missing_bytes"], Value::Null);
    verify(b, DISK, &mut model).unwrap();
}
