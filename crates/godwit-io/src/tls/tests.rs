//! Sessions of records against rustls' own sessions, which follow the standard.

use std::io::{Cursor, Read as _, Write as _};
use std::sync::Arc;

use godwit_testkit::tls::{TlsSettings, node_name};
use proptest::prelude::*;
use rustls::crypto::aws_lc_rs;
use rustls::{AlertDescription, ClientConnection, Connection, Error, ServerConnection};

use super::records::{LONGEST, OVERHEAD};
use super::{Handshake, Session, TlsError};

/// Copies the data of `from` into `room`. Returns the number of bytes copied.
fn pour(from: &[u8], room: &mut [u8]) -> usize {
    let count = from.len().min(room.len());
    room[..count].copy_from_slice(&from[..count]);
    count
}

fn finish(handshake: Handshake) -> Session {
    handshake.finish().expect("a session").0
}

/// Returns two connected sessions of records.
fn pair(settings: &TlsSettings) -> (Session, Session) {
    let mut client =
        Handshake::client(Arc::clone(&settings.client), node_name()).expect("a client");
    let mut server = Handshake::server(Arc::clone(&settings.server)).expect("a server");
    let (mut client_done, mut server_done) = (false, false);
    while !(client_done && server_done && client.to_send().is_empty()) {
        client_done = client.advance().expect("the client's side");
        let count = pour(client.to_send(), server.room_mut());
        client.sent(count);
        server.received(count);
        server_done = server.advance().expect("the server's side");
        let count = pour(server.to_send(), client.room_mut());
        server.sent(count);
        client.received(count);
    }
    (finish(client), finish(server))
}

/// Returns a session of records and the rustls session at its other side, either of which connects.
fn against_rustls(rustls_connects: bool) -> (Session, Connection) {
    let settings = TlsSettings::shared();
    let (mut ours, mut theirs) = if rustls_connects {
        let client =
            ClientConnection::new(Arc::clone(&settings.client), node_name()).expect("a client");
        let ours = Handshake::server(Arc::clone(&settings.server)).expect("a server");
        (ours, Connection::from(client))
    } else {
        let server = ServerConnection::new(Arc::clone(&settings.server)).expect("a server");
        let ours = Handshake::client(Arc::clone(&settings.client), node_name()).expect("a client");
        (ours, Connection::from(server))
    };
    theirs.set_buffer_limit(None);
    let mut done = false;
    while !done || theirs.is_handshaking() || !ours.to_send().is_empty() {
        let mut bytes = ours.to_send();
        while !bytes.is_empty() {
            theirs.read_tls(&mut bytes).expect("memory");
        }
        let count = ours.to_send().len();
        ours.sent(count);
        theirs.process_new_packets().expect("rustls' side");
        // A server's tickets stay in rustls until its first data.
        while theirs.wants_write() && !done {
            let mut room = Cursor::new(ours.room_mut());
            let count = theirs.write_tls(&mut room).expect("room");
            ours.received(count);
        }
        done = done || ours.advance().expect("our side");
    }
    (finish(ours), theirs)
}

/// Hands rustls the ciphertext of a session. Returns the plaintext.
fn to_rustls(ours: &mut Session, theirs: &mut Connection) -> Vec<u8> {
    let mut got = Vec::new();
    let mut bytes = ours.to_send().expect("ciphertext");
    let count = bytes.len();
    while !bytes.is_empty() {
        theirs.read_tls(&mut bytes).expect("memory");
        theirs.process_new_packets().expect("valid records");
        let mut part = vec![0; 1 << 20];
        if let Ok(count) = theirs.reader().read(&mut part) {
            got.extend_from_slice(&part[..count]);
        }
    }
    ours.sent(count);
    got
}

/// Returns all plaintext that a session has now, read in pieces of `step` bytes.
fn read_all(session: &mut Session, step: usize) -> Result<Vec<u8>, TlsError> {
    let mut got = Vec::new();
    let mut part = vec![0; step];
    loop {
        match session.read(&mut part)? {
            0 => return Ok(got),
            count => got.extend_from_slice(&part[..count]),
        }
    }
}

/// Carries the ciphertext of `from` to `to`, in packets of `packet` bytes, and returns the plaintext that arrives.
fn carry(from: &mut Session, to: &mut Session, packet: usize, step: usize) -> Vec<u8> {
    let mut got = Vec::new();
    loop {
        let ciphertext = from.to_send().expect("ciphertext");
        let count = ciphertext.len().min(packet);
        if count == 0 {
            return got;
        }
        let count = pour(&ciphertext[..count], to.room_mut());
        from.sent(count);
        to.received(count);
        got.extend(read_all(to, step).expect("valid records"));
    }
}

fn data(length: usize) -> Vec<u8> {
    (0..length as u32)
        .map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect()
}

/// Writes everything, and carries it over whenever there is no room.
fn send_all(
    from: &mut Session,
    to: &mut Session,
    mut rest: &[u8],
    packet: usize,
    step: usize,
) -> Vec<u8> {
    let mut got = Vec::new();
    while !rest.is_empty() {
        let taken = from.write(rest).expect("to encrypt");
        rest = &rest[taken..];
        got.extend(carry(from, to, packet, step));
    }
    got
}

#[test]
fn rustls_reads_what_a_session_writes_and_the_reverse() {
    for rustls_connects in [true, false] {
        let (mut ours, mut theirs) = against_rustls(rustls_connects);
        for length in [1, 100, LONGEST, LONGEST + 1, 150_000] {
            let sent = data(length);
            assert_eq!(ours.write(&sent).expect("room"), length);
            assert!(
                to_rustls(&mut ours, &mut theirs) == sent,
                "{length} bytes from us"
            );
            theirs.writer().write_all(&sent).expect("a buffer");
            let mut got = Vec::new();
            while theirs.wants_write() {
                let mut room = Cursor::new(ours.room_mut());
                let count = theirs.write_tls(&mut room).expect("room");
                ours.received(count);
                got.extend(read_all(&mut ours, 1 << 20).expect("valid records"));
            }
            assert!(got == sent, "{length} bytes from rustls");
        }
        ours.close();
        assert!(ours.wants_send());
        assert!(to_rustls(&mut ours, &mut theirs).is_empty());
        assert!(!ours.wants_send(), "the end is told once");
        assert_eq!(theirs.reader().read(&mut [0; 8]).expect("a clean end"), 0);
        theirs.send_close_notify();
        let mut room = Cursor::new(ours.room_mut());
        let count = theirs.write_tls(&mut room).expect("room");
        ours.received(count);
        assert!(matches!(ours.read(&mut [0; 8]), Err(TlsError::Closed)));
    }
}

#[test]
fn every_cipher_of_the_standard_works() {
    for suite in aws_lc_rs::ALL_CIPHER_SUITES {
        if suite.tls13().is_none() {
            continue;
        }
        let mut provider = aws_lc_rs::default_provider();
        provider.cipher_suites.retain(|own| own == suite);
        let (mut client, mut server) = pair(&TlsSettings::new(provider));
        let sent = data(100_000);
        assert!(
            send_all(&mut client, &mut server, &sent, 5000, 1 << 20) == sent,
            "{suite:?}"
        );
        assert!(
            send_all(&mut server, &mut client, &sent, 5000, 1 << 20) == sent,
            "{suite:?}"
        );
    }
}

#[test]
fn data_that_follows_the_handshake_at_once_is_not_lost() {
    let settings = TlsSettings::shared();
    let mut client =
        Handshake::client(Arc::clone(&settings.client), node_name()).expect("a client");
    let mut server = Handshake::server(Arc::clone(&settings.server)).expect("a server");
    assert!(!client.advance().expect("the client's side"));
    let count = pour(client.to_send(), server.room_mut());
    client.sent(count);
    server.received(count);
    assert!(!server.advance().expect("the server's side"));
    let count = pour(server.to_send(), client.room_mut());
    server.sent(count);
    client.received(count);
    assert!(client.advance().expect("the client's side"));
    let mut client = finish(client);
    let sent = data(40_000);
    assert_eq!(client.write(&sent).expect("room"), sent.len());
    // All but the last byte of the last record arrives with the client's last message.
    let ciphertext = client.to_send().expect("ciphertext").to_vec();
    let (most, last) = ciphertext.split_at(ciphertext.len() - 1);
    let count = pour(most, server.room_mut());
    assert_eq!(count, most.len());
    server.received(count);
    assert!(server.advance().expect("the server's side"));
    let mut server = finish(server);
    assert!(server.is_readable().expect("valid records"));
    let mut got = read_all(&mut server, 1000).expect("valid records");
    assert_eq!(got.len(), 2 * LONGEST);
    assert!(!server.is_readable().expect("valid records"));
    server.room_mut()[0] = last[0];
    server.received(1);
    got.extend(read_all(&mut server, 1000).expect("valid records"));
    assert!(got == sent);
}

#[test]
fn keys_change_when_they_are_used_up_and_when_the_other_side_asks() {
    let (mut ours, mut theirs) = against_rustls(true);
    ours.limit_key(3);
    let sent = data(10 * LONGEST);
    assert_eq!(ours.write(&sent).expect("room"), sent.len());
    let plain = sent.len() + 10 * OVERHEAD;
    let changes = ours.to_send().expect("ciphertext").len() - plain;
    assert_eq!(
        changes,
        3 * (OVERHEAD + 5),
        "ten records, three with each key"
    );
    assert!(to_rustls(&mut ours, &mut theirs) == sent);
    // rustls asks for a change: its own records come with a new key at once, ours with the next data.
    theirs.refresh_traffic_keys().expect("a new key");
    theirs.writer().write_all(b"new").expect("a buffer");
    while theirs.wants_write() {
        let mut room = Cursor::new(ours.room_mut());
        let count = theirs.write_tls(&mut room).expect("room");
        ours.received(count);
    }
    assert_eq!(read_all(&mut ours, 100).expect("valid records"), b"new");
    assert_eq!(ours.write(b"answer").expect("room"), 6);
    assert_eq!(
        ours.to_send().expect("ciphertext").len(),
        2 * OVERHEAD + 5 + 6
    );
    assert_eq!(to_rustls(&mut ours, &mut theirs), b"answer");
}

/// Returns the error of a session's reader after `change` has altered the ciphertext of the other side.
fn read_changed(change: impl FnOnce(&mut Vec<u8>)) -> Error {
    let (mut client, mut server) = pair(TlsSettings::shared());
    client.write(&data(1000)).expect("room");
    let mut ciphertext = client.to_send().expect("ciphertext").to_vec();
    change(&mut ciphertext);
    let count = pour(&ciphertext, server.room_mut());
    assert_eq!(count, ciphertext.len());
    server.received(count);
    match read_all(&mut server, 4096) {
        Err(TlsError::Session(error)) => error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn hostile_records_end_the_session() {
    assert_eq!(read_changed(|bytes| bytes[500] ^= 1), Error::DecryptError);
    assert_eq!(
        read_changed(|bytes| *bytes.last_mut().expect("bytes") ^= 128),
        Error::DecryptError
    );
    // The header is authenticated, too.
    assert_eq!(read_changed(|bytes| bytes[1] ^= 1), Error::DecryptError);
    // A record a second time.
    assert_eq!(
        read_changed(|bytes| bytes.extend_from_within(..)),
        Error::DecryptError
    );
    assert_eq!(
        read_changed(|bytes| bytes[3] = 0x42),
        Error::PeerSentOversizedRecord
    );
    for length in 0..=16 {
        assert_eq!(
            read_changed(|bytes| bytes[3..5].copy_from_slice(&[0, length])),
            Error::DecryptError,
            "{length} bytes hold no type"
        );
    }
    for kind in [0, 20, 21, 22, 24, 255] {
        let error = read_changed(|bytes| bytes[0] = kind);
        assert!(matches!(error, Error::InvalidMessage(_)), "{kind}: {error}");
    }
}

/// Returns the outcome of one message of a given type, followed by data.
fn read_message(kind: u8, message: &[u8]) -> Result<Vec<u8>, TlsError> {
    let (mut client, mut server) = pair(TlsSettings::shared());
    server.write_record(message, kind);
    server.write(b"after").expect("room");
    let count = pour(server.to_send().expect("ciphertext"), client.room_mut());
    client.received(count);
    read_all(&mut client, 1 << 16)
}

#[test]
fn messages_that_do_not_belong_there_end_the_session() {
    const ALERT: u8 = 21;
    const HANDSHAKE: u8 = 22;
    let error = |kind, message: &[u8]| match read_message(kind, message) {
        Err(TlsError::Session(error)) => error,
        other => panic!("{kind}, {message:?}: {other:?}"),
    };
    // A ticket and the announcement of a close are of no consequence.
    assert_eq!(
        read_message(HANDSHAKE, &[4, 0, 0, 2, 1, 2]).expect("data"),
        b"after"
    );
    assert_eq!(read_message(ALERT, &[1, 90]).expect("data"), b"after");
    assert!(matches!(
        read_message(ALERT, &[1, 0]),
        Err(TlsError::Closed)
    ));
    assert_eq!(
        error(ALERT, &[2, 20]),
        Error::AlertReceived(AlertDescription::BadRecordMac)
    );
    for (kind, message) in [
        (ALERT, &[][..]),
        (ALERT, &[2]),
        (ALERT, &[1, 0, 0]),
        (HANDSHAKE, &[]),
        (HANDSHAKE, &[4, 0, 0]),
        (HANDSHAKE, &[4, 0, 1, 0, 5]),
        (HANDSHAKE, &[4, 255, 255, 255]),
        (HANDSHAKE, &[24, 0, 0, 1, 2]),
        (HANDSHAKE, &[24, 0, 0, 0]),
        (HANDSHAKE, &[24, 0, 0, 1, 0, 24, 0, 0, 1, 0]),
        (HANDSHAKE, &[24, 0, 0, 1, 0, 4]),
        (HANDSHAKE, &[1, 0, 0, 0]),
        (20, &[1]),
        (24, &[1]),
    ] {
        assert!(
            matches!(error(kind, message), Error::InvalidMessage(_)),
            "{kind}, {message:?}"
        );
    }
    // A record of nothing but padding has no type.
    assert!(matches!(error(0, &[0; 100]), Error::PeerMisbehaved(_)));
}

#[test]
fn padding_is_not_data() {
    // The type and zeroes, before the zero that stands in for the type.
    let padded = [b"data".as_slice(), &[23], &[0; 300]].concat();
    assert_eq!(read_message(0, &padded).expect("data"), b"dataafter");
    let longest = [&data(LONGEST - 1)[..], &[1, 23]].concat();
    assert_eq!(read_message(0, &longest).expect("data").len(), LONGEST + 5);
    let too_long = [&data(LONGEST)[..], &[1, 23]].concat();
    assert!(read_message(0, &too_long).is_err());
}

#[test]
fn a_flood_of_new_keys_ends_the_session() {
    let (mut client, mut server) = pair(TlsSettings::shared());
    for _ in 0..32 {
        server.change_key();
    }
    server.write(b"data").expect("room");
    assert_eq!(carry(&mut server, &mut client, 1 << 20, 100), b"data");
    for _ in 0..33 {
        server.change_key();
    }
    let count = pour(server.to_send().expect("ciphertext"), client.room_mut());
    client.received(count);
    assert!(read_all(&mut client, 100).is_err());
}

#[test]
fn a_handshake_that_fails_says_why_to_the_other_side() {
    let stranger = TlsSettings::new(aws_lc_rs::default_provider());
    let mut client =
        Handshake::client(Arc::clone(&stranger.client), node_name()).expect("a client");
    let mut server =
        Handshake::server(Arc::clone(&TlsSettings::shared().server)).expect("a server");
    assert!(!client.advance().expect("the client's side"));
    let count = pour(client.to_send(), server.room_mut());
    client.sent(count);
    server.received(count);
    assert!(!server.advance().expect("the server's side"));
    let count = pour(server.to_send(), client.room_mut());
    client.received(count);
    let error = client.advance().expect_err("an unknown issuer");
    assert!(
        matches!(&error, TlsError::Session(Error::InvalidCertificate(_))),
        "{error}"
    );
    let count = pour(client.to_send(), server.room_mut());
    assert!(count > 0, "no alert");
    server.received(count);
    let error = server.advance().expect_err("an alert");
    assert!(
        matches!(error, TlsError::Session(Error::AlertReceived(_))),
        "{error}"
    );
    assert!(
        Handshake::client(Arc::clone(&TlsSettings::shared().client), node_name())
            .expect("a client")
            .finish()
            .is_err()
    );
}

#[test]
fn hostile_handshakes_are_errors() {
    let settings = TlsSettings::shared();
    for bytes in [
        vec![0; 64],
        vec![0xff; 4096],
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
    ] {
        let mut server = Handshake::server(Arc::clone(&settings.server)).expect("a server");
        let count = pour(&bytes, server.room_mut());
        server.received(count);
        assert!(server.advance().is_err());
    }
    // A message that never ends.
    let mut server = Handshake::server(Arc::clone(&settings.server)).expect("a server");
    let record = [
        &[22, 3, 1, 0x40, 0, 1, 0xff, 0xff, 0xff][..],
        &[7; LONGEST - 4],
    ]
    .concat();
    let mut sent = 0;
    let ended = loop {
        let count = pour(&record, server.room_mut());
        server.received(count);
        sent += count;
        if server.advance().is_err() {
            break sent;
        }
    };
    assert!(ended <= 256 << 10, "{ended} bytes were kept");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn data_arrives_however_it_is_cut(
        writes in prop::collection::vec(1_usize..100_000, 1..6),
        packet in prop_oneof![1_usize..100, 100_usize..200_000],
        step in prop_oneof![1_usize..100, 100_usize..100_000],
        most_sealed in 1_u64..20,
    ) {
        let (mut client, mut server) = pair(TlsSettings::shared());
        client.limit_key(most_sealed);
        for length in writes {
            let length = if packet < 100 { length / 20 + 1 } else { length };
            let sent = data(length);
            let got = send_all(&mut client, &mut server, &sent, packet, step);
            prop_assert!(got == sent);
            let back = send_all(&mut server, &mut client, &sent[..length.min(100)], packet, step);
            prop_assert!(back == sent[..length.min(100)]);
        }
    }
}

#[test]
fn a_session_is_drained_when_nothing_waits_on_either_way() {
    let (mut client, mut server) = pair(TlsSettings::shared());
    // The server's tickets wait to be read.
    assert!(server.is_drained() && !client.is_drained());
    assert_eq!(client.write(b"hello").expect("to encrypt"), 5);
    assert!(!client.is_drained(), "it has something to send");
    let count = pour(client.to_send().expect("ciphertext"), server.room_mut());
    client.sent(count);
    server.received(count);
    assert!(!server.is_drained(), "it has something to read");
    let mut part = [0; 2];
    assert_eq!(server.read(&mut part).expect("plaintext"), 2);
    assert!(!server.is_drained(), "it has read some of it");
    assert_eq!(read_all(&mut server, 16).expect("plaintext"), b"llo");
    assert!(server.is_drained());
    assert_eq!(read_all(&mut client, 16).expect("tickets"), b"");
    assert!(client.is_drained());
}
