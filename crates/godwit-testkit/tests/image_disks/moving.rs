//! Disks on an image that move.

use godwit_testkit::cluster::ClusterOptions;
use godwit_testkit::scenario::{PATIENCE, finish, load, migrate, moves, says, verify};
use serde_json::Value;

use crate::fixture::{DISK, Fixture, MIB, SIZE, write};

#[test]
fn a_disk_moves_without_its_image_and_only_what_was_written_is_sent() {
    let mut fixture = Fixture::start(&["a", "b"], &[]);
    let mut model = fixture.push_pattern();
    fixture.create(&["--prefetch", "off"]);
    // Whole blocks and parts of blocks, fetched or not.
    let mut client = fixture.connect();
    client
        .read_at(10 * MIB, &mut vec![0; 4 * MIB as usize])
        .unwrap();
    let mut written = 0;
    for (start, sectors) in [
        (11 * 2048, 2048),
        (12 * 2048 + 3, 1),
        (40 * 2048, 4096),
        (50 * 2048 + 5, 7),
    ] {
        written += write(&mut client, &mut model, start, sectors);
    }
    client.flush().unwrap();
    drop(client);
    let sent = |moved: &Value| {
        let bytes = |what: &str| moved["progress"][what].as_u64().unwrap();
        bytes("bytes_copied").max(bytes("bytes_sent")) + bytes("double_write_bytes")
    };
    let there_and_back = [("a", "b", 40), ("b", "a", 0)];
    for (from, to, more) in there_and_back {
        let source = fixture.cluster.node(from);
        let mut client = source.connect(DISK);
        written += write(&mut client, &mut model, 60 * 2048 + more, 8);
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
    moves(fixture.a(), DISK, "b", &[]);
    fixture.cluster.node_mut("a").kill();
    fixture.cluster.die_and_start("b");
    let repository = fixture.repository.display().to_string();
    let show = ["image", "--repository", &repository, "show", "base"];
    says(&fixture.b().text(&show), &["b/d"]);
    verify(fixture.b(), DISK, &mut model).unwrap();
}

#[test]
fn a_whole_disk_moves_as_a_whole_when_it_is_asked_to_or_its_image_is_gone() {
    let fixture = Fixture::start(&["a", "b"], &[]);
    let mut model = fixture.push_pattern();
    fixture.create(&[]);
    fixture.becomes_whole();
    let moves = |from: &str, to: &str, words: &[&str]| {
        let moved = moves(fixture.cluster.node(from), DISK, to, words);
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
    let mut fixture = Fixture::start(&["a", "b"], &[]);
    for name in ["a", "b"] {
        fixture
            .cluster
            .restart(name, &[("image::chunk", "sleep(150)")]);
    }
    let model = fixture.push_pattern();
    fixture.create(&[]);
    let client = load(fixture.a(), DISK, fixture.turn.seed, model).unwrap();
    assert!(client.progress(300, PATIENCE), "{:?}", client.stats());
    assert_eq!(fixture.disk()["image"]["fetching"], true);
    for (from, to) in [("a", "b"), ("b", "a"), ("a", "b")] {
        let (source, here) = (fixture.cluster.node(from), fixture.cluster.node(to));
        let moved = moves(source, DISK, to, &[]);
        let missing = here.disk(DISK).unwrap()["missing_bytes"].clone();
        println!(
            "{from} to {to}: {missing} bytes are missing, {}",
            moved["progress"]
        );
        assert!(client.progress(300, PATIENCE), "{:?}", client.stats());
    }
    fixture.becomes_whole_at("b", DISK);
    let mut model = finish(client).unwrap();
    fixture.is_there(false);
    verify(fixture.b(), DISK, &mut model).unwrap();
}

#[test]
fn a_whole_disk_moves_as_a_whole_to_a_node_that_does_not_get_at_its_image() {
    let secure = ClusterOptions::secure().unwrap();
    let mut fixture = Fixture::prepare(&["a", "b"], &[], secure);
    let empty = fixture.cluster.dir().join("empty");
    // Without this folder the repository would count as not mounted.
    std::fs::create_dir_all(empty.join("images")).unwrap();
    let options = &mut fixture.cluster.node_mut("b").spec_mut().options;
    options[1] = empty.display().to_string();
    fixture.cluster.start_all().unwrap();
    let mut model = fixture.push_pattern();
    fixture.create(&["--prefetch", "off"]);
    // The disk cannot move while a part is only in the image.
    fixture.a().refuses(
        &["migrate", DISK, "--to", "b"],
        &["is missing in the repository", "node 'b' refused"],
    );
    assert_eq!(fixture.a().disk_state(DISK), "serving");
    assert!(fixture.b().disk(DISK).is_err());
    verify(fixture.a(), DISK, &mut model).unwrap();
    fixture.becomes_whole();

    let moved = moves(fixture.a(), DISK, "b", &[]);
    let reason = moved["options"]["policy_reason"].as_str().unwrap();
    says(
        reason,
        &["the disk moves without its image, because node 'b' does not get at image 'base'"],
    );
    let warning = moved["warnings"][0].as_str().unwrap();
    says(warning, &["is missing in the repository"]);
    let b = fixture.b();
    assert_eq!(b.disk(DISK).unwrap()["missing_bytes"], Value::Null);
    verify(b, DISK, &mut model).unwrap();
}
