//! A client with an unanswered write leaves the disk's former node, and goes on at the disk's owner. The unanswered
//! write never takes effect after newer writes at the owner.

use std::time::{Duration, Instant};

use godwit_testkit::Cluster;
use godwit_testkit::cluster::StandsStill;
use godwit_testkit::nbd::{Command, NbdConnection, NbdReader, NbdWriter, Request};
use godwit_testkit::proxy::{Conditions, Proxy};
use godwit_testkit::scenario::{Scenario, migrate};

const BLOCK: u32 = 4096;
/// Time for a write to reach the point at which it is held.
const A_MOMENT: Duration = Duration::from_millis(500);
/// Time in which a connection between nodes comes back.
const A_WHILE: Duration = Duration::from_secs(4);

/// A disk moved from a to b, and a client that stayed at a.
struct Moved {
    cluster: Cluster,
    links: Vec<Proxy>,
    reader: NbdReader,
    writer: NbdWriter,
    /// Another client at a.
    other: NbdConnection,
    /// Dropped last: the next test begins after this cluster has ended.
    turn: Scenario,
}

impl Moved {
    fn begin() -> Self {
        let turn = Scenario::shared();
        let (cluster, links) = Cluster::start_linked(turn.seed).unwrap();
        let a = cluster.node("a");
        a.create_disk("d", "8M");
        let mut client = a.connect("d");
        client.write_at(0, &[b'0'; BLOCK as usize]).unwrap();
        let other = a.connect("d");
        migrate(a, "d", "b", &[]).unwrap();
        let mut first = [0; BLOCK as usize];
        client.read_at(0, &mut first).unwrap();
        assert_eq!(first[0], b'0', "it is served by b, through a");
        let (reader, writer) = client.split();
        Self {
            cluster,
            links,
            reader,
            writer,
            other,
            turn,
        }
    }

    /// Sends a write from the client at a, and expects no answer before `wait` is over.
    fn write_unanswered(&mut self, wait: Duration) {
        send_write(&mut self.writer, 1, 0, b'O');
        self.reader.set_timeout(Some(wait)).unwrap();
        assert!(self.reader.reply().is_err(), "it was to be held up");
    }

    /// Disconnects the client, attaches at the owner, writes the same place and flushes.
    fn go_on_at_the_owner(self) -> Left {
        self.writer.shutdown();
        drop((self.reader, self.writer));
        let target = self.cluster.node("b").nbd("d");
        let mut client = NbdConnection::connect(&target).unwrap();
        client.write_at(0, &[b'N'; BLOCK as usize]).unwrap();
        client.flush().unwrap();
        Left {
            client,
            links: self.links,
            _cluster: self.cluster,
            _turn: self.turn,
        }
    }
}

/// The state after the client has gone on at the owner.
struct Left {
    client: NbdConnection,
    links: Vec<Proxy>,
    _cluster: Cluster,
    _turn: Scenario,
}

impl Left {
    /// Checks for a while that the newer write stays.
    fn expect_newer(mut self) {
        let mut found = [0; BLOCK as usize];
        let end = Instant::now() + A_WHILE;
        while Instant::now() < end {
            self.client.read_at(0, &mut found).unwrap();
            assert_eq!(char::from(found[0]), 'N', "an older write came after it");
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

fn send_write(writer: &mut NbdWriter, cookie: u64, offset: u64, value: u8) {
    let request = Request::new(Command::Write, cookie, offset, BLOCK);
    writer.send(&request, &[value; BLOCK as usize]).unwrap();
}

#[test]
fn a_write_that_is_held_because_the_link_is_broken_is_dropped_with_its_client() {
    let mut moved = Moved::begin();
    for link in &moved.links {
        link.set(Conditions::REFUSING);
        link.cut();
    }
    std::thread::sleep(A_MOMENT);
    moved.write_unanswered(A_MOMENT);
    let left = moved.go_on_at_the_owner();
    left.links.iter().for_each(Proxy::heal);
    left.expect_newer();
}

#[test]
fn a_write_that_is_stuck_in_the_link_is_void_and_a_client_that_stays_is_still_answered() {
    let mut moved = Moved::begin();
    moved.links[0].set(Conditions::STALLED);
    moved.write_unanswered(A_MOMENT);
    let other = moved.cluster.node("b").connect("d");
    let (mut stays, mut asks) = std::mem::replace(&mut moved.other, other).split();
    send_write(&mut asks, 7, u64::from(BLOCK), b'S');
    let mut left = moved.go_on_at_the_owner();
    left.links.iter().for_each(Proxy::heal);
    let reply = stays.reply().unwrap();
    assert_eq!((reply.cookie, reply.error), (7, 0));
    let mut found = [0; BLOCK as usize];
    left.client.read_at(u64::from(BLOCK), &mut found).unwrap();
    assert_eq!(found, [b'S'; BLOCK as usize]);
    left.expect_newer();
}

#[test]
fn a_write_that_lies_in_a_socket_of_a_node_that_stands_still_is_void() {
    let mut moved = Moved::begin();
    let still = StandsStill::new(moved.cluster.node("a"));
    moved.write_unanswered(A_MOMENT);
    let left = moved.go_on_at_the_owner();
    drop(still);
    left.expect_newer();
}
