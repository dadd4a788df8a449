//! The remains of departed disks at a node: no threads, memory or connections.

use std::time::Duration;

use godwit_testkit::Node;
use godwit_testkit::process::wait_for;
use godwit_testkit::scenario::{PATIENCE, Scenario, import_pattern, moves, verify};

/// Disks that move together.
const DISKS: usize = 16;

/// Threads of a served disk: its own, one for the virtual machine's socket, and one of the kernel's for slow
/// operations.
const THREADS_OF_A_DISK: usize = 3;

/// Threads and descriptors of short-lived activities.
const IN_PASSING: usize = 12;

/// Resources of a process.
#[derive(Clone, Copy, Debug)]
struct Holds {
    threads: usize,
    descriptors: usize,
    kib: usize,
}

fn holds(node: &Node) -> Holds {
    let process = format!("/proc/{}", node.pid().expect("it runs"));
    let status = std::fs::read_to_string(format!("{process}/status")).unwrap();
    let number = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        let word = line.split_whitespace().nth(1).unwrap();
        word.parse::<usize>().unwrap()
    };
    Holds {
        threads: number("Threads:"),
        descriptors: std::fs::read_dir(format!("{process}/fd")).unwrap().count(),
        kib: number("VmRSS:"),
    }
}

/// Waits until the node holds no more than before, beside the resources of `disks` disks.
fn holds_no_more(node: &Node, before: Holds, disks: usize) {
    let most = before.threads + disks * THREADS_OF_A_DISK + IN_PASSING;
    // Of a disk: its ring, wake-up, image (twice), sockets for machines, and the descriptors that watch these.
    let descriptors = before.descriptors + disks * 10 + IN_PASSING;
    let enough = |now: &Holds| now.threads <= most && now.descriptors <= descriptors;
    let settled = wait_for(PATIENCE, || Some(holds(node)).filter(enough));
    let now = holds(node);
    println!("node '{}': {before:?} before, {now:?} now", node.name());
    assert!(
        settled.is_some(),
        "{disks} disks are served at '{}', which holds {now:?}, and {before:?} before there were any",
        node.name()
    );
}

fn names() -> Vec<String> {
    (0..DISKS).map(|number| format!("disk{number}")).collect()
}

fn move_all(from: &Node, to: &str) {
    for name in names() {
        moves(from, &name, to, &[]);
    }
}

#[test]
fn disks_that_left_keep_no_threads_and_connections() {
    let (_turn, cluster) = Scenario::shared().start(&["a", "b"]);
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    let (before_a, before_b) = (holds(a), holds(b));
    for name in names() {
        a.create_disk(&name, "4M");
    }
    move_all(a, "b");
    holds_no_more(a, before_a, 0);
    holds_no_more(b, before_b, DISKS);
    // The disks come back and are gone from the other node.
    move_all(b, "a");
    holds_no_more(b, before_b, 0);
    holds_no_more(a, before_a, DISKS);
    // Serving takes no more memory after another round.
    let memory = holds(a).kib;
    move_all(a, "b");
    move_all(b, "a");
    holds_no_more(a, before_a, DISKS);
    let more = || holds(a).kib.saturating_sub(memory);
    let settled = wait_for(PATIENCE, || (more() < 24 << 10).then_some(()));
    println!("{} KiB more after another round", more());
    assert!(settled.is_some(), "{} KiB more than {memory}", more());
}

#[test]
fn a_disk_that_left_is_there_for_clients_that_stay() {
    let (turn, cluster) = Scenario::shared().start(&["a", "b"]);
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    let before = holds(a);
    let mut model = import_pattern(a, "kept", 16 << 20, turn.seed).unwrap();
    // An image that is not the node's own: the node must not make it anew.
    let image = a.spec().dir.with_file_name("own.raw");
    std::fs::write(&image, vec![5; 4 << 20]).unwrap();
    let path = image.to_string_lossy().into_owned();
    a.json(&["disk", "create", "own", "--path", &path]);
    let mut stays = a.connect("kept");
    for disk in ["kept", "own"] {
        moves(a, disk, "b", &[]);
    }
    // Longer than an unused disk is kept.
    std::thread::sleep(Duration::from_secs(8));
    let mut block = [0; 4096];
    stays.read_at(0, &mut block).unwrap();
    let forwarded = || (b.disk("kept").ok()?["io"]["forwarded"] == 1).then_some(());
    assert!(wait_for(PATIENCE, forwarded).is_some());
    drop(stays);
    holds_no_more(a, before, 0);
    assert_eq!(a.disk_state("kept"), "departed");

    for disk in ["kept", "own"] {
        moves(b, disk, "a", &["--verify"]);
        assert_eq!(a.disk_state(disk), "serving");
    }
    verify(a, "kept", &mut model).unwrap();
    let mut own = a.connect("own");
    own.read_at(0, &mut block).unwrap();
    assert_eq!(block, [5; 4096]);
    // A departed disk can also be removed once the engine has ended.
    holds_no_more(b, before, 0);
    b.json(&["disk", "rm", "kept"]);
}
