//! The part of a moving disk visible to an eavesdropper on the network; the disk arrives either way.

use godwit_testkit::Cluster;
use godwit_testkit::proxy::Proxy;
use godwit_testkit::scenario::{PATIENCE, Scenario, ends_well, import_pattern, load, migrate};

const SIZE: u64 = 16 << 20;
const DISK: &str = "a-name-of-my-own";
/// Content of the image.
const AT_REST: &[u8; 32] = b"what the guest wrote a year ago.";
/// Data written by a client at the source after the move.
const WRITTEN: &[u8; 32] = b"what the guest writes right now.";

/// Starts two nodes, each with or without permission to send data unencrypted, and the links between them.
fn nodes(seed: u64, allowed: [bool; 2]) -> (Cluster, Vec<Proxy>) {
    let (mut cluster, links) = Cluster::prepare_linked(seed).unwrap();
    for (name, allowed) in ["a", "b"].into_iter().zip(allowed) {
        cluster.node_mut(name).spec_mut().unencrypted_data = allowed;
    }
    cluster.start_all().unwrap();
    (cluster, links)
}

fn import_readable(cluster: &Cluster) {
    let image = cluster.dir().join("readable.img");
    std::fs::write(&image, AT_REST.repeat(SIZE as usize / AT_REST.len())).unwrap();
    let a = cluster.node("a");
    a.json(&["disk", "import", DISK, &image.to_string_lossy()]);
}

#[test]
fn data_passes_in_the_clear_only_when_both_nodes_are_told_so() {
    let turn = Scenario::shared();
    for allowed in [[false; 2], [true, false], [false, true], [true; 2]] {
        let (cluster, links) = nodes(turn.seed, allowed);
        let (a, link) = (cluster.node("a"), &links[0]);
        import_readable(&cluster);
        for what in [&AT_REST[..], WRITTEN, DISK.as_bytes()] {
            link.watch_for(what);
        }
        let clear = allowed == [true; 2];
        let peers = a.json(&["peer", "list"]);
        assert_eq!(peers[0]["data_encrypted"], !clear, "{allowed:?}: {peers}");

        let mut client = a.connect(DISK);
        let moved = migrate(a, DISK, "b", &["--verify"]).unwrap();
        assert_eq!(moved["verified"], true, "{allowed:?}: {moved}");
        let block = WRITTEN.repeat(4096 / WRITTEN.len());
        client.write_at(4096, &block).unwrap();

        let seen = [link.has_seen(AT_REST), link.has_seen(WRITTEN)];
        assert_eq!(seen, [clear; 2], "{allowed:?}");
        // Messages of nodes before the data stay secret in any case.
        assert!(!link.has_seen(DISK.as_bytes()), "{allowed:?}");

        let mut there = cluster.node("b").connect(DISK);
        let mut read = vec![0; 12288];
        there.read_at(0, &mut read).unwrap();
        assert!(read[4096..8192] == block[..], "{allowed:?}");
        assert!(read[..4096] == AT_REST.repeat(128)[..], "{allowed:?}");
        assert!(read[8192..] == AT_REST.repeat(128)[..], "{allowed:?}");
    }
}

#[test]
fn a_disk_moves_there_and_back_in_the_clear_while_its_client_writes() {
    let turn = Scenario::shared();
    let (cluster, _links) = nodes(turn.seed, [true; 2]);
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    let model = import_pattern(a, DISK, 4 * SIZE, turn.seed).unwrap();
    let client = load(a, DISK, turn.seed, model).unwrap();
    for (from, to) in [(a, "b"), (b, "a")] {
        let moved = migrate(from, DISK, to, &["--verify"]).unwrap();
        assert_eq!(moved["verified"], true, "{moved}");
        assert!(client.progress(300, PATIENCE), "{:?}", client.stats());
    }
    ends_well(client, a, DISK);
}
