//! A stranger that opens a connection to a node and sends anything.

#![no_main]

use godwit_core::wire::{Greeting, HEADER_SIZE, Header};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((header, body)) = data.split_first_chunk::<HEADER_SIZE>() else {
        return;
    };
    let Ok(mut header) = Header::decode(header) else {
        return;
    };
    // Half of the inputs would be spent on finding out how long they are.
    if header.flags & 0x80 != 0 {
        header.payload_length = body.len() as u32;
    }
    let Some(body) = body.get(..header.payload_length as usize) else {
        return;
    };
    let Ok(greeting) = Greeting::decode(&header, body) else {
        return;
    };
    if let Greeting::Hello(hello) = &greeting {
        assert!(hello.agree().is_none_or(|version| {
            version >= hello.min_version && version <= hello.max_version && version > 0
        }));
    }
    let frame = greeting.encode();
    let Some((header, body)) = frame.split_first_chunk::<HEADER_SIZE>() else {
        panic!("a frame without a header");
    };
    let header = Header::decode(header).expect("what was encoded can be decoded");
    assert_eq!(Greeting::decode(&header, body), Ok(greeting));
});
