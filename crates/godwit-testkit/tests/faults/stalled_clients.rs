//! Clients that take no answers, or stop within a write, beside a good one. The good client waits only for its own
//! requests, at the disk's node and at the disk's former node.

use std::io::Write;
use std::time::{Duration, Instant};

use godwit_testkit::cluster::{ClusterOptions, StandsStill, godwit_binary};
use godwit_testkit::nbd::{Command, NbdConnection, NbdReader, NbdTarget, NbdWriter, Request};
use godwit_testkit::scenario::{PATIENCE, Scenario, moves, says};
use godwit_testkit::{Cluster, Node};

const DISK: &str = "shared";
const MIB: u64 = 1 << 20;

/// Longest wait allowed for the good client.
const LONGEST: Duration = Duration::from_millis(200);

/// Working time of the good client.
const WORKS: Duration = Duration::from_secs(3);

fn request(command: Command, cookie: u64, offset: u64, length: u64) -> Request {
    Request::new(command, cookie, offset, length as u32)
}

fn connect(target: &NbdTarget) -> NbdConnection {
    NbdConnection::connect(target).unwrap()
}

/// A client about to stall.
struct Client(NbdReader, NbdWriter);

impl Client {
    fn attach(target: &NbdTarget) -> Self {
        let (reader, writer) = connect(target).split();
        Self(reader, writer)
    }

    /// Sends many reads and takes none of the answers.
    fn take_no_answers(&mut self) {
        let requests: Vec<_> = (0..400)
            .flat_map(|cookie| request(Command::Read, cookie, cookie % 32 * MIB, MIB).encode())
            .collect();
        // All at once: many small messages would fill a socket without a reader.
        self.1.write_all(&requests).unwrap();
    }

    /// Sends a part of a write.
    fn stop_within_a_write(&mut self) {
        let write = request(Command::Write, 1, 0, 32 * MIB);
        self.1.send(&write, &vec![1; 3 << 20]).unwrap();
    }
}

/// Returns the longest latency of this client's requests, of 4 KiB and of 1 MiB.
fn longest_wait(client: &mut NbdConnection) -> Duration {
    let (short, long) = (vec![2; 4096], vec![3; 1 << 20]);
    let mut into = vec![0; 1 << 20];
    let until = Instant::now() + WORKS;
    let (mut longest, mut round) = (Duration::ZERO, 0);
    while Instant::now() < until {
        let data = if round % 8 == 7 { &long } else { &short };
        let offset = 64 * MIB + round % 32 * MIB;
        let started = Instant::now();
        client.write_at(offset, data).unwrap();
        longest = longest.max(started.elapsed());
        let started = Instant::now();
        client.read_at(offset, &mut into[..data.len()]).unwrap();
        longest = longest.max(started.elapsed());
        assert!(into[..data.len()] == data[..]);
        round += 1;
    }
    println!("{round} rounds, the longest wait: {longest:?}");
    longest
}

/// Starts a cluster of `a`, which has the disk, and `b`.
fn cluster() -> Cluster {
    let options = ClusterOptions {
        godwit: godwit_binary().unwrap(),
        tls: false,
    };
    let cluster = Cluster::start_with(&["a", "b"], options).unwrap();
    cluster.node("a").create_disk(DISK, "128M");
    cluster
}

/// Longer than any wait on a busy machine.
const FAR_TOO_LONG: Duration = Duration::from_secs(1);

/// Checks the client's longest wait. A run spoiled by a busy machine is repeated.
fn waits_for_nobody(who: &str, client: &mut NbdConnection) {
    let longest = (0..3)
        .map(|_| longest_wait(client))
        .inspect(|&longest| assert!(longest < FAR_TOO_LONG, "{who} waited {longest:?}"))
        .find(|&longest| longest <= LONGEST);
    assert!(longest.is_some(), "{who} waits for others");
}

fn both_kinds(targets: &[NbdTarget]) -> Vec<Client> {
    targets.iter().map(Client::attach).collect()
}

#[test]
fn two_stalled_clients_hold_up_no_other() {
    let _turn = Scenario::alone();
    let cluster = cluster();
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    let sockets = |node: &Node| [node.nbd(DISK), node.nbd_tcp(DISK)];
    let mut early = both_kinds(&sockets(a));
    let mut late = both_kinds(&sockets(a));
    let mut good = connect(&a.nbd(DISK));
    early[0].take_no_answers();
    early[1].stop_within_a_write();
    waits_for_nobody("a client at the disk's node", &mut good);

    // Nor do they keep the disk from moving.
    let started = Instant::now();
    let _moved = moves(a, DISK, "b", &[]);
    assert!(started.elapsed() < Duration::from_secs(20));

    // The good client's requests go the same way as those of the stalled ones.
    late[0].take_no_answers();
    late[1].stop_within_a_write();
    waits_for_nobody("a client of the node that the disk has left", &mut good);
    let mut direct = connect(&b.nbd(DISK));
    waits_for_nobody("a client of the node that the disk moved to", &mut direct);

    // And nodes end in time.
    let mut cluster = cluster;
    for name in ["a", "b"] {
        cluster
            .node_mut(name)
            .terminate(Duration::from_secs(15))
            .unwrap();
    }
    drop((early, late));
}

#[test]
fn a_node_that_stands_still_holds_up_no_client_of_another() {
    let _turn = Scenario::alone();
    let cluster = cluster();
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    let mut stayed = [a.nbd(DISK), a.nbd(DISK)].map(|target| Client::attach(&target));
    moves(a, DISK, "b", &[]);
    let mut direct = connect(&b.nbd(DISK));
    stayed.iter_mut().for_each(Client::take_no_answers);
    let still = StandsStill::new(a);
    waits_for_nobody("a client of the disk's node", &mut direct);
    drop(still);
    for Client(reader, _) in &mut stayed {
        reader.set_timeout(Some(PATIENCE)).unwrap();
        for _ in 0..400 {
            assert_eq!(reader.reply().unwrap().error, 0);
            reader.data(&mut vec![0; 1 << 20]).unwrap();
        }
    }
}

#[test]
fn a_connection_too_many_is_refused_in_the_handshake() {
    let _turn = Scenario::shared();
    let cluster = cluster();
    let a = cluster.node("a");
    let target = a.nbd(DISK);
    // All at the same time, before any count is settled.
    let attempts: Vec<_> = (0..100)
        .map(|_| {
            let target = target.clone();
            std::thread::spawn(move || NbdConnection::connect(&target))
        })
        .collect();
    let (mut attached, mut refused) = (Vec::new(), Vec::new());
    for attempt in attempts {
        match attempt.join().unwrap() {
            Ok(connection) => attached.push(connection),
            Err(error) => refused.push(error.to_string()),
        }
    }
    println!("{} attached, {} refused", attached.len(), refused.len());
    assert_eq!(attached.len(), 64, "{refused:?}");
    for error in refused {
        says(&error, &["--nbd-connections"]);
    }
    for connection in &mut attached {
        connection.write_at(0, &[1; 512]).unwrap();
    }
    // A departing client makes room for another.
    drop(attached.pop());
    let again =
        godwit_testkit::process::wait_for(PATIENCE, || NbdConnection::connect(&target).ok());
    again.unwrap().write_at(0, &[1; 512]).unwrap();
}
