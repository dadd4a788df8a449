//! A node that asks for parts of images whatever it likes, or answers so: what is understood means the same when it is
//! said again, an answer is never longer than what was asked for, and a manifest that is taken names nothing outside of
//! its image.

#![no_main]

// By their paths: the rest of these crates needs far more than a fuzzer has. They know each other by this name.
extern crate self as godwit_image;

#[allow(dead_code, reason = "only a part of it is needed here")]
#[path = "../../crates/godwit-disks/src/images/blocks.rs"]
mod blocks;
#[allow(dead_code, reason = "only a part of it is needed here")]
#[path = "../../crates/godwit-image/src/chunk.rs"]
mod chunk;
#[path = "../../crates/godwit-image/src/manifest.rs"]
mod manifest;
#[allow(dead_code, reason = "only a part of it is needed here")]
#[path = "../../crates/godwit-disks/src/images/peers/messages.rs"]
mod messages;
#[path = "../../crates/godwit-image/src/push_time.rs"]
mod push_time;

use std::pin::pin;
use std::task::{Context, Poll, Waker};

use godwit_core::units::Sectors;
use libfuzzer_sys::fuzz_target;
use messages::{Answer, Meaning, NameHash, Question};

pub use chunk::{CHUNK_BYTES, ChunkId};
pub use manifest::{Manifest, ManifestChunk, ManifestId};
pub use push_time::PushTime;

fuzz_target!(|data: &[u8]| {
    let Some((&choice, data)) = data.split_first() else {
        return;
    };
    match choice % 5 {
        0 => question(data),
        1 => answer(
            Question::Chunk {
                manifest: ManifestId([1; 32]),
                number: u64::from(choice),
            },
            data,
        ),
        // Nearly no input would have the right hash: these get it.
        2 => answer(
            Question::Manifest(hash_of(data.get(5..).unwrap_or(&[]))),
            data,
        ),
        3 => answer(Question::Name(NameHash::of("debian:12")), data),
        _ => manifest(hash_of(data), data),
    }
});

fn hash_of(bytes: &[u8]) -> ManifestId {
    ManifestId(*blake3::hash(bytes).as_bytes())
}

/// Everything that comes is there already, so nothing is waited for.
fn now<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(done) => done,
        Poll::Pending => panic!("it waits for more than there is"),
    }
}

fn question(mut data: &[u8]) {
    while let Ok(Some(question)) = now(Question::read(&mut data)) {
        let mut asked = Vec::new();
        let nothing = now(question.ask(&mut tokio::io::join(&[][..], &mut asked)));
        assert!(nothing.is_err(), "nobody answered");
        let again = now(Question::read(&mut &asked[..])).expect("a question");
        assert_eq!(again, Some(question));
    }
}

fn answer(question: Question, mut data: &[u8]) {
    let whole = data;
    loop {
        let answer = now(question.ask(&mut tokio::io::join(&mut data, tokio::io::sink())));
        let Ok(answer) = answer else { return };
        let mut said = Vec::new();
        now(answer.write(&mut said)).expect("there is room");
        let before = whole.len() - data.len() - said.len();
        assert_eq!(said, whole[before..before + said.len()]);
        let Answer::Here(bytes) = answer else {
            continue;
        };
        match question {
            Question::Chunk { .. } => assert!(bytes.len() as u64 <= CHUNK_BYTES),
            Question::Manifest(id) => manifest(id, &bytes),
            Question::Name(_) => {
                if let Some(meaning) = Meaning::decode(&bytes) {
                    assert_eq!(meaning.encode(), bytes);
                }
            }
        }
    }
}

fn manifest(id: ManifestId, bytes: &[u8]) {
    let Ok(manifest) = Manifest::decode(id, bytes) else {
        return;
    };
    let (again, same) = manifest.encode();
    assert_eq!((again, &same[..]), (id, bytes));
    let mut data = 0;
    for chunk in manifest.chunks() {
        let length = manifest.length(chunk.number);
        assert!((1..=CHUNK_BYTES).contains(&length));
        assert!(chunk.number * CHUNK_BYTES + length <= manifest.size());
        assert_eq!(manifest.chunk(chunk.number), Some(chunk.id));
        data += length;
    }
    assert_eq!(manifest.data_bytes(), data);
    // A map of a disk of many TiB takes more memory than a fuzzer may.
    if manifest.size() <= 1 << 40 {
        let words = blocks::words(&manifest, Sectors(manifest.size() / 512));
        let blocks: u64 = words.iter().map(|word| u64::from(word.count_ones())).sum();
        assert!(blocks * blocks::BLOCK * 512 >= data);
    }
}
