//! I/O errors of an image during a move of the disk: the migration ends and says why, the source goes on serving, and
//! no acknowledged write is lost.

use godwit_testkit::Cluster;
use godwit_testkit::client::{Outcome, VerifyingClient};
use godwit_testkit::scenario::{
    PATIENCE, Scenario, await_end, ends, ends_well, import_pattern, load, moves, start_migration,
    verify,
};

const DISK: &str = "worn";
const SIZE: u64 = 64 << 20;

/// Starts a cluster in which the node's disk fails as the fail point says.
fn cluster_with(name: &str, point: &str, action: &str) -> Cluster {
    let mut cluster = Cluster::start(&["a", "b"]).unwrap();
    cluster.restart(name, &[(point, action)]);
    cluster
}

/// Moves the disk from a to b under load, and verifies the content.
fn moves_under(cluster: &Cluster, client: VerifyingClient) {
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    moves(a, DISK, "b", &["--verify"]);
    assert!(client.progress(200, PATIENCE));
    ends_well(client, b, DISK);
}

/// Checks the effect of one disk error: the first migration ends, the guest notices nothing, and the second migration
/// completes.
fn ends_the_migration(node: &str, point: &str, action: &str, word: &str) {
    let turn = Scenario::shared();
    let cluster = cluster_with(node, point, action);
    let a = cluster.node("a");
    let model = import_pattern(a, DISK, SIZE, turn.seed).unwrap();
    let client = load(a, DISK, turn.seed, model).unwrap();
    assert!(client.progress(200, PATIENCE));
    let id = start_migration(a, DISK, "b", &["--verify"]).unwrap();
    let ended = ends(a, &id, "aborted");
    let error = ended["error"].to_string().to_lowercase();
    println!("{error}");
    assert!(error.contains(word), "'{word}' is not in {error}");
    assert_eq!(a.disk_state(DISK), "serving");
    assert!(client.progress(200, PATIENCE), "{:?}", client.stats());

    moves_under(&cluster, client);
}

macro_rules! errors_that_end_a_migration {
    ($($name:ident: $node:expr, $point:expr, $action:expr => $word:expr;)*) => {$(
        #[test]
        fn $name() {
            ends_the_migration($node, $point, $action, $word);
        }
    )*};
}

errors_that_end_a_migration! {
    the_source_cannot_read_a_chunk: "a", "disk::chunk::read", "30*off->1*return(5)" => "the source's disk";
    the_destination_cannot_write: "b", "disk::replica::write", "30*off->1*return(5)" => "the destination's disk";
    the_destination_is_full: "b", "disk::replica::write", "30*off->1*return(28)" => "space";
    the_destination_cannot_make_it_durable: "b", "disk::barrier::sync", "1*return(5)" => "the destination's disk";
}

#[test]
fn the_source_cannot_write_what_the_guest_writes() {
    let turn = Scenario::shared();
    let cluster = cluster_with("a", "disk::request::write", "600*off->3*return(5)");
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    let model = import_pattern(a, DISK, SIZE, turn.seed).unwrap();
    let client = load(a, DISK, turn.seed, model).unwrap();
    assert!(client.progress(100, PATIENCE));
    let slow = ["--max-bandwidth", "16MiB", "--verify"];
    let id = start_migration(a, DISK, "b", &slow).unwrap();
    let ended = await_end(a, &id);
    println!("{}: {}", ended["phase"], ended["error"]);
    let Outcome {
        mut model, stats, ..
    } = client.stop(PATIENCE);
    // The guest sees the errors of its own writes, once each, and no others.
    assert_eq!(
        (stats.errors, stats.violations),
        (3, 0),
        "{:?}",
        stats.problems
    );
    // The content left by the failed writes is the same at either owner.
    let owner = if ended["phase"] == "completed" {
        assert_eq!(ended["verified"], true, "{ended}");
        b
    } else {
        a
    };
    verify(owner, DISK, &mut model).unwrap();
}

/// The ring returns ECANCELED where the kernel can start no thread for a request.
#[test]
fn a_disk_for_which_the_kernel_starts_no_thread_is_served_and_moves() {
    let turn = Scenario::shared();
    let points = [
        "disk::request::read",
        "disk::request::write",
        "disk::request::zero",
        "disk::request::sync",
        "disk::chunk::read",
        "disk::replica::write",
        "disk::replica::zero",
        "disk::barrier::sync",
    ]
    .map(|point| (point, "return(125)"));
    let mut cluster = Cluster::start(&["a", "b"]).unwrap();
    for name in ["a", "b"] {
        cluster.restart(name, &points);
    }
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    let model = import_pattern(a, DISK, SIZE, turn.seed).unwrap();
    let client = load(a, DISK, turn.seed, model).unwrap();
    assert!(client.progress(200, PATIENCE));
    moves_under(&cluster, client);
    for node in [a, b] {
        let log = node.log();
        let told = log.matches("can start no thread").count();
        assert_eq!(told, 1, "{} tells it once:\n{log}", node.name());
    }
}
