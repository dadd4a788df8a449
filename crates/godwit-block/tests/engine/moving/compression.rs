//! Data is compressed where the migration waits for the link, and only there.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsRawFd;
use std::thread;
use std::time::Duration;

use godwit_block::engine::{PeerStream, PeerStreams};
use godwit_core::authority::AuthorityRecord;

use crate::pair::{start, wait_for_success};
use crate::support::*;
use crate::tls::tls_links;

const MIB: u64 = 1 << 20;
const SIZE: u64 = 24 * MIB;

/// Bytes per second of a slow link, for each connection.
const SLOW: u32 = 12 << 20;

/// Returns data that compresses to half, and data that does not compress.
fn contents() -> [Vec<u8>; 2] {
    let random = Random(7).bytes(SIZE as usize);
    let mut half = random.clone();
    for block in half.chunks_mut(4096) {
        block[2048..].fill(0x5a);
    }
    [half, random]
}

fn set_option(socket: &TcpStream, (level, option): (i32, i32), value: &[u8]) {
    // SAFETY: the socket is open, and the kernel reads as many bytes as the value has.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            value.as_ptr().cast(),
            value.len() as libc::socklen_t,
        )
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

/// Limits the kernel's sending rate on this connection.
fn slow_down(connection: &PeerStream) {
    let option = (libc::SOL_SOCKET, libc::SO_MAX_PACING_RATE);
    set_option(&connection.socket, option, &SLOW.to_ne_bytes());
}

/// Makes the links slow for copies, and lets the other node accept compressed data.
fn slow(links: (PeerStreams, PeerStreams)) -> (PeerStreams, PeerStreams) {
    let (ours, theirs) = links;
    ours.copies.iter().for_each(slow_down);
    let compression = true;
    (
        PeerStreams {
            compression,
            ..ours
        },
        theirs,
    )
}

/// Moves a disk full of `data`. Returns the bytes that were compressed, and their length afterwards.
fn moved(data: &[u8], links: (PeerStreams, PeerStreams)) -> (u64, u64) {
    let a = TestEngine::new("a", SIZE, AuthorityRecord::created());
    let b = TestEngine::new("b", SIZE, AuthorityRecord::vacant());
    a.attach(true).write(0, data);
    start(&a, &b, options(1), links);
    wait_for_success(&a, &b);
    let counters = a.handle.snapshot().counters;
    assert!(b.finish() == data, "another disk arrived");
    (counters.compressed_from, counters.compressed_to)
}

#[test]
fn a_disk_crosses_a_slow_link_compressed() {
    let [half, random] = contents();
    for links in [links, tls_links] {
        let (from, to) = moved(&half, slow(links(2)));
        assert!(from > SIZE / 2, "{from} bytes were compressed");
        assert!(to < from * 6 / 10, "to {to} bytes of {from}");
        assert_eq!(moved(&random, slow(links(2))), (0, 0));
    }
}

#[test]
fn what_the_guest_writes_meanwhile_crosses_a_slow_link_compressed_too() {
    let [half, mut disk] = contents();
    let a = TestEngine::new("a", SIZE, AuthorityRecord::created());
    let b = TestEngine::new("b", SIZE, AuthorityRecord::vacant());
    let mut client = a.attach(true);
    client.write(0, &disk);
    start(&a, &b, options(1), slow(links(2)));
    // The start is copied first, so writes there cross by themselves.
    a.wait_until(|snapshot| {
        snapshot
            .progress
            .is_some_and(|progress| progress.bytes_done > 4 * MIB)
    });
    for block in 0..256 {
        let range = block * 4096..(block + 1) * 4096;
        client.write(range.start as u64, &half[range.clone()]);
        disk[range.clone()].copy_from_slice(&half[range]);
    }
    wait_for_success(&a, &b);
    let counters = a.handle.snapshot().counters;
    let (from, to) = (counters.compressed_from, counters.compressed_to);
    assert!(
        from > MIB / 2 && from <= MIB,
        "{from} bytes were compressed"
    );
    assert!(to < from * 6 / 10, "to {to} bytes of {from}");
    assert!(b.finish() == disk, "another disk arrived");
}

#[test]
fn nothing_is_compressed_for_a_node_that_does_not_want_it() {
    let [half, _] = contents();
    let (ours, theirs) = slow(links(2));
    let compression = false;
    let links = (
        PeerStreams {
            compression,
            ..ours
        },
        theirs,
    );
    assert_eq!(moved(&half, links), (0, 0));
}

/// Forwards from one socket to the other, a little at a time.
fn forward(mut from: TcpStream, mut to: TcpStream, pause: Duration) {
    thread::spawn(move || {
        let mut bytes = vec![0; 32 << 10];
        while let Ok(count @ 1..) = from.read(&mut bytes)
            && to.write_all(&bytes[..count]).is_ok()
        {
            thread::sleep(pause);
        }
        let _ = to.shutdown(Shutdown::Write);
    });
}

#[test]
fn nothing_is_compressed_for_a_receiver_that_is_slower_than_the_link() {
    let [half, _] = contents();
    let (ours, theirs) = links(0);
    let connect = || {
        let (source, near) = tcp_pair();
        // Others, like bbr, adapt to the receiver: to them the path is slow.
        let congestion = (libc::IPPROTO_TCP, libc::TCP_CONGESTION);
        set_option(&source, congestion, b"reno");
        let (far, destination) = tcp_pair();
        let clone = |socket: &TcpStream| socket.try_clone().expect("a clone");
        forward(clone(&near), clone(&far), Duration::from_millis(2));
        forward(far, near, Duration::ZERO);
        (plain(source), plain(destination))
    };
    let (copies, copies_b) = (0..2).map(|_| connect()).unzip();
    let ours = PeerStreams {
        copies,
        compression: true,
        ..ours
    };
    let theirs = PeerStreams {
        copies: copies_b,
        ..theirs
    };
    let (from, _) = moved(&half, (ours, theirs));
    assert!(from < SIZE / 4, "{from} bytes were compressed");
}
