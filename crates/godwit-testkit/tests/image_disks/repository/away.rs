//! Disks created while the repository is away, with metadata from other nodes. The disks are usable at once, and known
//! to the repository as soon as it is back, whichever node dies meanwhile.

use std::fs;
use std::time::Duration;

use godwit_testkit::client::{Initial, Model};
use godwit_testkit::cluster::ClusterOptions;
use godwit_testkit::process::wait_for;
use godwit_testkit::scenario::{PATIENCE, says, until, verify};
use serde_json::Value;

use crate::fixture::{DISK, Fixture, MIB, SIZE};
use crate::repository::odd_node::{Odd, OddNode};
use crate::repository::s3::S3;

/// The disk with the image at the other node.
const OTHER: &str = "other";
/// Longer than a second: pushes are distinguished by the second of their time.
const A_SECOND: Duration = Duration::from_millis(1100);

/// Starts nodes a and b, of which b has all of the image, and takes the repository away.
fn one_node_has_it() -> (Fixture, Model) {
    let fixture = Fixture::start(&["a", "b"], &[]);
    let model = fixture.push_pattern();
    fixture.create_at("b", OTHER, &[]);
    fixture.becomes_whole_at("b", OTHER);
    until("it is unused", || !is_used_by(&fixture, "b/other"));
    fixture.is_there(false);
    (fixture, model)
}

/// Returns true if the repository knows this disk as a user of the image.
fn is_used_by(fixture: &Fixture, disk: &str) -> bool {
    fixture.image(&["show", "base"]).unwrap().contains(disk)
}

fn is_noted(disk: &Value) -> bool {
    disk["image"]["noted"].as_bool().unwrap()
}

fn becomes_noted(fixture: &Fixture) {
    let noted = || is_noted(&fixture.disk()).then_some(());
    assert!(wait_for(PATIENCE, noted).is_some(), "{}", fixture.disk());
}

fn warning(disk: &Value) -> &str {
    disk["warnings"][0].as_str().unwrap_or_default()
}

#[test]
fn a_disk_is_created_from_what_another_node_knows_and_the_repository_hears_of_it_later() {
    let (mut fixture, mut model) = one_node_has_it();
    let made = fixture.create(&["--prefetch", "off"]);
    assert_eq!(made["missing_bytes"], SIZE, "{made}");
    assert!(!is_noted(&made), "{made}");
    let said = warning(&made);
    says(said, &["node 'b' told what image 'base' is", "'image gc'"]);
    let mut client = fixture.connect();
    client
        .read_at(20 * MIB, &mut vec![0; MIB as usize])
        .unwrap();
    assert_eq!(fixture.fetched(), (MIB, 0));

    // The other node's answer, and the fact that the repository is not informed yet, outlast the node.
    fixture.a_dies();
    assert!(!is_noted(&fixture.disk()), "{}", fixture.disk());
    // The same holds if the node dies after the repository was informed and before the node has recorded so.
    fixture
        .cluster
        .restart("a", &[("image::late-use", "sleep(600000)")]);
    fixture.is_there(true);
    let used = || is_used_by(&fixture, "a/d").then_some(());
    assert!(wait_for(PATIENCE, used).is_some(), "it does not hear of it");
    assert!(!is_noted(&fixture.disk()));
    fixture.a_dies();
    becomes_noted(&fixture);
    assert!(fixture.disk()["warnings"].as_array().unwrap().is_empty());
    let refused = fixture.image(&["rm", "base"]).unwrap_err().to_string();
    says(&refused, &["disk a/d still fetches from it"]);
    verify(fixture.a(), DISK, &mut model).unwrap();
    fixture.becomes_whole();
    fixture.is_needed_no_more();
}

#[test]
fn what_was_removed_before_the_repository_heard_of_the_disk_is_put_back() {
    let (mut fixture, mut model) = one_node_has_it();
    fixture.create(&["--prefetch", "off"]);
    fixture.cluster.node_mut("a").kill();
    fixture.is_there(true);
    // Nothing there knows that the disk needs the image.
    fixture.image(&["rm", "base"]).unwrap();
    fixture.gc().unwrap();
    assert!(fixture.chunks().is_empty());

    // The node dies while putting the image back, and begins anew.
    let a = fixture.cluster.node_mut("a");
    a.start(&[("image::put-back", "sleep(200)")]).unwrap();
    until("nothing is put back", || fixture.chunks().len() > 8);
    assert!(!is_noted(&fixture.disk()));
    fixture.a_dies();
    becomes_noted(&fixture);
    assert_eq!(fixture.chunks().len() as u64, SIZE / (256 << 10));
    let disk = fixture.disk();
    let said = warning(&disk);
    says(said, &["stood for something else"]);
    // No name stands for the image: only the disk needs it, and can fetch from the repository alone. The lease of the
    // dead node would keep gc away.
    fs::remove_dir_all(fixture.repository.join("leases")).unwrap();
    fixture.gc().unwrap();
    fixture.cluster.node_mut("b").terminate(PATIENCE).unwrap();
    verify(fixture.a(), DISK, &mut model).unwrap();
    fixture.becomes_whole();
    assert_eq!(fixture.fetched(), (0, SIZE));
    let unused = || {
        fixture.gc().ok()?;
        fixture.chunks().is_empty().then_some(())
    };
    assert!(wait_for(PATIENCE, unused).is_some(), "it is not needed");
}

/// Reads a disk at node a whole and compares the content with this image.
fn is_image(fixture: &Fixture, disk: &str, model: &mut Model) {
    verify(fixture.a(), disk, model).unwrap();
}

#[test]
#[ignore = "takes minutes: make test-slow ONLY='--test image_disks'"]
fn of_two_things_that_a_name_has_stood_for_the_later_counts_and_an_older_one_is_told_of() {
    let mut fixture = Fixture::start(&["a", "b", "c"], &[]);
    let mut old = fixture.push_pattern();
    fixture.create_at("b", OTHER, &[]);
    fixture.becomes_whole_at("b", OTHER);
    std::thread::sleep(A_SECOND);
    let mut new = fixture.push_another();
    fixture.create_at("c", OTHER, &[]);
    fixture.becomes_whole_at("c", OTHER);

    fixture.is_there(false);
    let made = fixture.create(&[]);
    assert!(warning(&made).contains("node 'c'"), "{made}");
    is_image(&fixture, DISK, &mut new);
    fixture.cluster.node_mut("c").terminate(PATIENCE).unwrap();
    // This node does not pass on the answer of node c, because the repository has not confirmed it.
    let made = fixture.create_at("a", "late", &[]);
    assert!(warning(&made).contains("node 'b'"), "{made}");
    is_image(&fixture, "late", &mut old);
    fixture.becomes_whole_at("a", "late");
    fixture.is_there(true);
    fixture.cluster.restart("a", &[]);
    // A change of the name no longer matters to a whole disk.
    let shown = fixture.a().disk("late").unwrap();
    assert!(shown["warnings"].as_array().unwrap().is_empty(), "{shown}");
    let made = fixture.create_at("a", "last", &[]);
    assert!(made["warnings"].as_array().unwrap().is_empty(), "{made}");
    is_image(&fixture, "last", &mut new);
}

#[test]
#[ignore = "takes minutes: make test-slow ONLY='--test image_disks'"]
fn a_name_that_stood_for_something_else_is_told_of_when_the_repository_is_back() {
    let (fixture, mut model) = one_node_has_it();
    fixture.is_there(true);
    fixture.push_another();
    fixture.is_there(false);
    fixture.create(&["--prefetch", "off"]);
    fixture.is_there(true);
    becomes_noted(&fixture);
    let disk = fixture.disk();
    let said = warning(&disk);
    says(said, &["stood for something else"]);
    // The disk keeps its content, and the repository keeps the image.
    fixture.gc().unwrap();
    is_image(&fixture, DISK, &mut model);
    fixture.becomes_whole();
}

/// Tries to create a disk while the repository is away and the only other node is odd; returns the refusal.
fn refused_beside(odd: Odd) -> (OddNode, String) {
    let node = OddNode::start(odd);
    let fixture = node.beside(&["a"]);
    fixture.push_pattern();
    fixture.is_there(false);
    let words = ["disk", "create", DISK, "--image", "base"];
    let refused = fixture.a().refusal(&words);
    println!("{refused}");
    assert!(fixture.a().disk(DISK).is_err(), "something is left");
    let repository = fixture.repository.display().to_string();
    says(&refused, &[&repository]);
    fixture.is_there(true);
    fixture.create(&[]);
    fixture.becomes_whole();
    (node, refused)
}

#[test]
#[ignore = "takes minutes: make test-slow ONLY='--test image_disks'"]
fn a_node_that_knows_no_names_is_not_asked_for_one() {
    let (node, refused) = refused_beside(Odd::KnowsNoNames);
    assert!(!node.was_asked_for_a_name());
    let expected = "no other node tells what image 'base' is";
    says(&refused, &[expected]);
}

#[test]
fn a_node_that_answers_something_else_tells_nothing() {
    let (node, refused) = refused_beside(Odd::Lies);
    assert!(node.was_asked_for_a_name());
    let expected = "no other node tells what image 'base' is";
    says(&refused, &[expected]);
}

#[test]
#[ignore = "takes minutes: make test-slow ONLY='--test image_disks'"]
fn a_name_that_stands_for_nothing_makes_no_disk() {
    let (node, refused) = refused_beside(Odd::LiesOfNames);
    assert!(node.was_asked_for_a_name());
    says(&refused, &["cannot be had from those who know it (odd)"]);
}

#[test]
#[ignore = "takes minutes: make test-slow ONLY='--test image_disks'"]
fn an_s3_server_that_is_away_keeps_no_disk_from_being_created_and_hears_of_it_later() {
    let secure = ClusterOptions::secure().unwrap();
    let mut fixture = Fixture::prepare(&["a", "b"], &[], secure);
    let mut server = S3::start(&fixture.cluster.dir().join("s3"));
    for name in ["a", "b"] {
        let spec = fixture.cluster.node_mut(name).spec_mut();
        spec.options = server.options();
        spec.environment = server.environment();
    }
    fixture.cluster.start_all().unwrap();
    let mut model = Model::new(fixture.turn.seed, SIZE, Initial::Pattern);
    let path = fixture.cluster.dir().join("pattern");
    model.write_image(&path).unwrap();
    server.push("base", &path);
    fixture.create_at("b", OTHER, &[]);
    fixture.becomes_whole_at("b", OTHER);
    let unused = || server.users("base").is_empty().then_some(());
    assert!(wait_for(PATIENCE, unused).is_some());

    server.is_there(false);
    let made = fixture.create(&["--prefetch", "off"]);
    assert!(!is_noted(&made), "{made}");
    let mut client = fixture.connect();
    client
        .read_at(20 * MIB, &mut vec![0; MIB as usize])
        .unwrap();
    assert_eq!(fixture.fetched(), (MIB, 0));
    drop(client);
    fixture.a_dies();
    assert!(!is_noted(&fixture.disk()));
    server.is_there(true);
    becomes_noted(&fixture);
    assert_eq!(server.users("base"), ["a/d"]);
    fixture.cluster.node_mut("b").terminate(PATIENCE).unwrap();
    verify(fixture.a(), DISK, &mut model).unwrap();
    fixture.becomes_whole();
}
