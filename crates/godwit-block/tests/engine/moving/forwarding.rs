//! Forwarded requests: untaken ones are void once a client attaches, taken ones are carried out once, and a departed
//! client's are not carried out after its later requests elsewhere.

use std::io::Write;
use std::net::TcpStream;
use std::time::Duration;

use godwit_block::nbd::Errno;
use godwit_core::action::ChunkSlot;
use godwit_core::authority::AuthorityRecord;
use godwit_core::request::{Operation, RequestTag};
use godwit_core::units::{Epoch, Extent, Lba};
use godwit_core::wire::{Message, Taken};

use crate::puppet::{ID, Puppet, begin_forwarding, frame, heard, pass_fence, receive};
use crate::support::*;

const SIZE: u64 = 1 << 20;
const BLOCK: usize = 4096;

fn block(number: u64) -> Extent {
    Extent::new(Lba(number * 8), 8).expect("an extent")
}

fn owner() -> TestEngine {
    TestEngine::new("b", SIZE, AuthorityRecord::created())
}

/// Returns a node that forwards to this owner and has announced its session.
fn forwarder(owner: &TestEngine, session: u64) -> (TcpStream, Taken) {
    let (mut ours, theirs) = tcp_pair();
    ours.set_read_timeout(Some(Duration::from_secs(10)))
        .expect("a timeout");
    owner.handle.serve_forwarded("a".to_owned(), plain(theirs));
    let taken = begin_forwarding(&mut ours, session);
    (ours, taken)
}

fn forward_write(socket: &mut TcpStream, number: u32, extent: Extent, value: u8) {
    let message = Message::Forward {
        tag: RequestTag(number),
        number,
        operation: Operation::Write { extent, fua: false },
    };
    let mut bytes = frame(message);
    bytes.extend(vec![value; extent.bytes() as usize]);
    socket.write_all(&bytes).expect("sent");
}

/// Receives the owner's answer to a forwarded write.
fn reply(socket: &mut TcpStream) -> (u32, bool) {
    match receive(socket).0 {
        Message::ForwardReply { tag, result, .. } => (tag.0, result.is_ok()),
        other => panic!("{other:?} is no reply"),
    }
}

#[test]
fn what_was_sent_before_a_client_attached_is_void() {
    let owner = owner();
    let (mut forwarder, taken) = forwarder(&owner, 1);
    assert_eq!(taken, Taken::Unknown, "the owner has never heard of it");
    let mut client = owner.attach(true);
    client.write(0, &[b'N'; BLOCK]);
    // The forwarder has not seen the fence: this request lay in a socket while its node stood still.
    forward_write(&mut forwarder, 1, block(0), b'O');
    assert!(!matches!(pass_fence(&mut forwarder), Taken::Through(_)));
    forward_write(&mut forwarder, 2, block(1), b'P');
    assert_eq!(reply(&mut forwarder), (2, true), "only what came later");
    assert_eq!(client.read(0, BLOCK), [b'N'; BLOCK]);
    assert_eq!(client.read(BLOCK as u64, BLOCK), [b'P'; BLOCK]);
}

#[test]
fn a_forwarder_that_connects_again_hears_what_was_taken() {
    let owner = owner();
    let (mut first, _) = forwarder(&owner, 9);
    for number in [u32::MAX, 0, 1] {
        forward_write(&mut first, number, block(2), number as u8);
        assert_eq!(reply(&mut first), (number, true));
    }
    drop(first);
    let (second, taken) = forwarder(&owner, 9);
    assert_eq!(taken, Taken::Through(1), "numbers go round");
    drop(second);
    let (_, taken) = forwarder(&owner, 10);
    assert_eq!(taken, Taken::Unknown, "another process");
}

#[test]
fn a_forwarder_that_counts_backwards_or_does_not_begin_is_cut_off() {
    let owner = owner();
    let (mut twice, _) = forwarder(&owner, 1);
    forward_write(&mut twice, 5, block(0), 1);
    assert_eq!(reply(&mut twice), (5, true));
    forward_write(&mut twice, 5, block(0), 2);
    assert!(is_closed(&mut twice));
    let (mut hasty, theirs) = tcp_pair();
    owner.handle.serve_forwarded("a".to_owned(), plain(theirs));
    forward_write(&mut hasty, 6, block(0), 3);
    assert!(is_closed(&mut hasty));
    assert_eq!(owner.attach(true).read(0, BLOCK), [1; BLOCK]);
}

fn is_closed(socket: &mut TcpStream) -> bool {
    use std::io::Read;
    socket
        .set_read_timeout(Some(Duration::from_secs(10)))
        .expect("a timeout");
    matches!(socket.read(&mut [0]), Ok(0) | Err(_))
}

/// Lets a departed disk's engine forward to a puppet, and checks that the engine reports an attached client. Returns
/// the puppet's end of the connection, and the session.
fn forwards(engine: &TestEngine) -> (TcpStream, u64) {
    let (mut ours, theirs) = tcp_pair();
    ours.set_read_timeout(Some(Duration::from_secs(10)))
        .expect("a timeout");
    engine.handle.forward(plain(theirs));
    let (Message::ForwardBegin { session }, _) = receive(&mut ours) else {
        panic!("it does not begin");
    };
    assert_eq!(receive(&mut ours).0, Message::ClientAttached);
    (ours, session)
}

fn fence(socket: &mut TcpStream, number: u32, taken: Taken, shared: bool) {
    let message = Message::Fence {
        number,
        taken,
        shared,
        failed: false,
    };
    socket.write_all(&frame(message)).expect("sent");
    assert_eq!(heard(socket), Message::FenceReached { number });
}

/// Receives a forwarded write.
fn forwarded(socket: &mut TcpStream) -> (u32, Extent) {
    match heard(socket) {
        Message::Forward {
            number,
            operation: Operation::Write { extent, .. },
            ..
        } => (number, extent),
        other => panic!("{other:?} is no write"),
    }
}

/// Returns the successful answer to a forwarded write.
fn done(forwarded: Message) -> Message {
    let Message::Forward { tag, number, .. } = forwarded else {
        panic!("{forwarded:?} is not forwarded");
    };
    Message::ForwardReply {
        tag,
        number,
        length: 0,
        result: Ok(()),
    }
}

fn send_write(client: &mut Client, number: u64) -> u64 {
    client.send(1, 0, number * BLOCK as u64, BLOCK as u32, &[7; BLOCK])
}

#[test]
fn what_was_taken_is_not_sent_again_and_what_nobody_knows_of_fails_where_others_write() {
    let engine = TestEngine::new("a", SIZE, departed());
    let mut client = engine.attach(true);
    let (mut first, session) = forwards(&engine);
    fence(&mut first, 1, Taken::Unknown, false);
    let cookies = [0, 1, 2].map(|number| {
        let cookie = send_write(&mut client, number);
        assert_eq!(forwarded(&mut first).1, block(number));
        cookie
    });
    drop(first);
    let (mut second, again) = forwards(&engine);
    assert_eq!(again, session, "it is the same process");
    fence(&mut second, 2, Taken::Through(1), false);
    let answer = client.receive(|_| 0);
    assert_eq!(
        (answer.cookie, answer.error),
        (cookies[0], 0),
        "it was done"
    );
    assert_eq!(forwarded(&mut second), (4, block(1)));
    assert_eq!(forwarded(&mut second), (5, block(2)));
    drop(second);
    let (mut third, _) = forwards(&engine);
    fence(&mut third, 1, Taken::Unknown, true);
    for cookie in &cookies[1..] {
        let answer = client.receive(|_| 0);
        let expected = (*cookie, Errno::Io.code());
        assert_eq!((answer.cookie, answer.error), expected, "others write");
    }
    send_write(&mut client, 0);
    assert_eq!(forwarded(&mut third).0, 6);
}

#[test]
fn requests_of_a_client_that_hung_up_are_not_sent_again() {
    let engine = TestEngine::new("a", SIZE, departed());
    let mut leaves = engine.attach(true);
    let mut stays = engine.attach(true);
    let (mut owner, _) = forwards(&engine);
    fence(&mut owner, 1, Taken::Unknown, false);
    send_write(&mut leaves, 0);
    assert_eq!(forwarded(&mut owner), (1, block(0)));
    send_write(&mut stays, 1);
    assert_eq!(forwarded(&mut owner), (2, block(1)));
    drop(leaves);
    fence(&mut owner, 2, Taken::Nothing, true);
    assert_eq!(
        forwarded(&mut owner),
        (3, block(1)),
        "of the one that stays"
    );
    engine.wait_until(|snapshot| snapshot.clients == 1 && snapshot.requests_in_flight == 1);
}

/// The other node may have died with its answers, or the answers come late: requests for departed clients must not hold
/// back others then.
#[test]
fn what_a_client_left_with_the_owner_before_holds_back_nobody_once_the_disk_is_here() {
    for (leaves_first, answers_late) in [(true, true), (false, true), (true, false)] {
        let engine = TestEngine::new("a", SIZE, departed());
        let mut leaves = engine.attach(true);
        let mut stays = engine.attach(true);
        let (mut owner, _) = forwards(&engine);
        fence(&mut owner, 1, Taken::Unknown, true);
        send_write(&mut leaves, 0);
        let left = done(heard(&mut owner));
        send_write(&mut stays, 1);
        let kept = done(heard(&mut owner));
        let arrives = || {
            let mut source = Puppet::source_of(&engine);
            let epoch = Epoch(3);
            let prepare = Message::Prepare {
                migration: ID,
                epoch,
                shared: true,
                lacks: false,
            };
            source.control.write_all(&frame(prepare)).expect("sent");
            let prepared = receive(&mut source.control).0;
            assert!(matches!(prepared, Message::Prepared { .. }), "{prepared:?}");
            let commit = Message::Commit {
                migration: ID,
                epoch,
            };
            source.control.write_all(&frame(commit)).expect("sent");
            engine.wait_until(|snapshot| snapshot.serves);
            source
        };
        let _source = if leaves_first {
            drop(leaves);
            engine.wait_until(|snapshot| snapshot.clients == 1);
            arrives()
        } else {
            let source = arrives();
            drop(leaves);
            source
        };
        engine.attach(true).write(0, &[9; BLOCK]);
        if answers_late {
            for answer in [left, kept] {
                owner.write_all(&frame(answer)).expect("sent");
            }
            assert_eq!(stays.receive(|_| 0).error, 0, "its answer is not lost");
        }
        assert_eq!(engine.attach(true).read(0, BLOCK), [9; BLOCK]);
    }
}

#[test]
fn the_owner_is_told_of_every_client_that_attaches_elsewhere() {
    let engine = TestEngine::new("a", SIZE, departed());
    let (mut owner, _) = forwards(&engine);
    fence(&mut owner, 1, Taken::Unknown, false);
    for _ in 0..2 {
        let _client = engine.attach(true);
        assert_eq!(receive(&mut owner).0, Message::ClientAttached);
    }
}

#[test]
fn a_frame_of_a_copy_is_no_forwarders() {
    let owner = owner();
    let (mut forwarder, _) = forwarder(&owner, 1);
    let copied = Message::Verified {
        slot: ChunkSlot(0),
        generation: godwit_core::units::Generation(0),
        result: Ok(true),
    };
    forwarder.write_all(&frame(copied)).expect("sent");
    assert!(is_closed(&mut forwarder));
}
