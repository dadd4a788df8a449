//! A node that speaks TLS as it likes: anything instead of a handshake, or a handshake and then records
//! that were cut, changed or sent twice. It must end in an error or wait, and what is read must be what
//! was written, from its beginning.

#![no_main]

use std::sync::Arc;

use crate::tls::{TlsSettings, node_name};
use godwit_io::tls::{Handshake, Session};
use libfuzzer_sys::fuzz_target;

// By its path: the rest of that crate needs far more than a fuzzer has.
#[path = "../../crates/godwit-testkit/src/tls.rs"]
mod tls;

fuzz_target!(|data: &[u8]| {
    let [mode, step, bytes @ ..] = data else {
        return;
    };
    let step = usize::from(*step) + 1;
    match mode % 3 {
        0 => shake_hands_with(server(), bytes, step),
        1 => shake_hands_with(client(), bytes, step),
        _ => read_changed(bytes, step),
    }
});

fn client() -> Handshake {
    Handshake::client(Arc::clone(&TlsSettings::shared().client), node_name()).expect("a client")
}

fn server() -> Handshake {
    Handshake::server(Arc::clone(&TlsSettings::shared().server)).expect("a server")
}

fn fill(room: &mut [u8], bytes: &[u8]) -> usize {
    let count = bytes.len().min(room.len());
    room[..count].copy_from_slice(&bytes[..count]);
    count
}

fn shake_hands_with(mut handshake: Handshake, bytes: &[u8], step: usize) {
    if handshake.advance().is_err() {
        return;
    }
    for piece in bytes.chunks(step) {
        let count = fill(handshake.room_mut(), piece);
        handshake.received(count);
        if handshake.advance().is_err() {
            break;
        }
    }
    assert!(handshake.finish().is_err(), "nobody proved anything");
}

/// Two sides of a session.
fn sessions() -> (Session, Session) {
    let (mut client, mut server) = (client(), server());
    loop {
        let done = client.advance().expect("the client's side");
        let count = fill(server.room_mut(), client.to_send());
        client.sent(count);
        server.received(count);
        if server.advance().expect("the server's side") && done {
            break;
        }
        let count = fill(client.room_mut(), server.to_send());
        server.sent(count);
        client.received(count);
    }
    let session = |handshake: Handshake| handshake.finish().expect("a session").0;
    (session(client), session(server))
}

/// `bytes` tell what is written, five bytes for each change of what is sent.
fn read_changed(bytes: &[u8], step: usize) {
    let (mut writer, mut reader) = sessions();
    let (lengths, changes) = bytes.split_at(bytes.len().min(8));
    let mut written = Vec::new();
    for (number, length) in lengths.iter().enumerate() {
        let part = vec![number as u8 + 1; usize::from(*length) * 97];
        let taken = writer.write(&part).expect("to encrypt");
        written.extend_from_slice(&part[..taken]);
    }
    let mut sent = writer.to_send().expect("ciphertext").to_vec();
    let honest = sent.clone();
    for change in changes.chunks_exact(5) {
        let at = u32::from_le_bytes([change[0], change[1], change[2], 0]) as usize;
        let Some(end) = sent.len().checked_sub(1) else {
            break;
        };
        let at = at % (end + 1);
        match change[3] % 4 {
            0 => sent[at] ^= change[4],
            1 => sent.truncate(at),
            2 => drop(sent.drain(at..(at + usize::from(change[4])).min(end))),
            _ => sent.extend_from_within(at..(at + usize::from(change[4])).min(end)),
        }
    }
    let (mut read, mut part) = (Vec::new(), vec![0; step * 64]);
    let mut failed = false;
    'sending: for piece in sent.chunks(step * 16) {
        let count = fill(reader.room_mut(), piece);
        reader.received(count);
        loop {
            match reader.read(&mut part) {
                Ok(0) => break,
                Ok(count) => read.extend_from_slice(&part[..count]),
                Err(_) => {
                    failed = true;
                    break 'sending;
                }
            }
        }
    }
    assert!(written.starts_with(&read), "something else was read");
    assert!(
        sent != honest || (read == written && !failed),
        "data was lost"
    );
}
