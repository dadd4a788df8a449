//! A peer that sends any frame: what is understood means the same when it is sent on.

#![no_main]

use godwit_core::wire::{HEADER_SIZE, Header, Message};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((header, body)) = data.split_first_chunk::<HEADER_SIZE>() else {
        return;
    };
    let Ok(header) = Header::decode(header) else {
        return;
    };
    assert_eq!(Header::decode(&header.encode()), Ok(header));
    // A body reads exactly the payload that the header names, and none that has a buffer.
    let body = if header.payload_in_buffer() {
        &[]
    } else {
        match body.get(..header.payload_length as usize) {
            Some(body) => body,
            None => return,
        }
    };
    let Ok(message) = Message::decode(&header, body) else {
        return;
    };
    let (again, inline, length) = message.encode();
    assert_eq!(Message::decode(&again, &inline[..length]), Ok(message));
    // What is compressed on the way is the same message.
    if !header.is_compressed() {
        assert_eq!(again.payload_length, header.payload_length);
    }
});
