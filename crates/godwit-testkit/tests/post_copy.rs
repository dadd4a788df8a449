//! A virtual machine that moves before its memory does, with a guest that checks its disks and its
//! memory.

use godwit_testkit::Cluster;
use godwit_testkit::scenario::Scenario;
use godwit_testkit::vm::{GuestLoad, NodeGuest};

const DISK_MIB: u64 = 96;

#[test]
fn a_guest_works_while_its_memory_follows_it() {
    let turn = Scenario::begin("post_copy", "a_guest_works_while_its_memory_follows_it");
    let cluster = Cluster::start(&["a", "b"]).unwrap();
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    let load = GuestLoad {
        seed: turn.seed,
        ..GuestLoad::default()
    };
    let guest = NodeGuest::start(&cluster, "a", 2, DISK_MIB, &load).unwrap();
    for (from, to, memory) in [
        (a, "b", "post-copy"),
        (b, "a", "hybrid"),
        (a, "b", "post-copy"),
    ] {
        let (moved, gaps) = guest.migrate(from, to, &["--memory", memory]).unwrap();
        assert_eq!(moved["phase"], "completed", "{moved}");
        println!("{memory}: {moved} {gaps:?}");
    }
    println!("{:?}", guest.finish(b).unwrap());
}
