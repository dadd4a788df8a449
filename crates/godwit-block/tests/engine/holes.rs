//! Holes of the source are announced with a short frame, become holes at the destination, and are compared as holes.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use godwit_block::engine::EngineConfig;
use godwit_core::action::ChunkSlot;
use godwit_core::authority::AuthorityRecord;
use godwit_core::units::{Extent, Generation};
use godwit_core::wire::Message;

use crate::pair::{start, wait_for_success};
use crate::puppet::{Puppet, frame, receive};
use crate::support::*;

const MIB: u64 = 1 << 20;
const TIB: u64 = 1 << 40;

/// Returns an engine that receives a disk into a file with other contents.
fn filled(size: u64, fill: impl FnOnce(&File)) -> TestEngine {
    TestEngine::with_image(
        EngineConfig::new(String::from("b")),
        Path::new(env!("CARGO_TARGET_TMPDIR")),
        size,
        AuthorityRecord::vacant(),
        |image| {
            fill(
                &File::options()
                    .write(true)
                    .open(&image.path)
                    .expect("the image"),
            );
            image
        },
        |_| true,
    )
}

#[test]
fn a_disk_of_a_tebibyte_moves_and_is_compared_by_what_it_holds() {
    let a = TestEngine::new("a", TIB, AuthorityRecord::created());
    let b = TestEngine::new("b", TIB, AuthorityRecord::vacant());
    let mut client = a.attach(true);
    let data = Random(1).bytes(65536);
    // In the first hole, in the middle of one, and at the end of the disk.
    let places = [4096, TIB / 3 / 4096 * 4096, TIB - 65536];
    for place in places {
        client.write(place, &data);
    }
    start(&a, &b, options(1), links(2));
    wait_for_success(&a, &b);
    let progress = a.handle.snapshot().progress.expect("progress");
    assert!(progress.verified);
    let most = 2 * MIB * places.len() as u64;
    assert!(progress.copy_bytes_sent <= most, "{progress:?}");
    let stored = std::fs::metadata(b.image_path())
        .expect("the image")
        .blocks()
        * 512;
    assert!(stored <= most, "{stored} bytes stored");
    let mut there = b.attach(true);
    for place in places {
        assert!(there.read(place, 65536) == data, "at {place}");
    }
    assert!(there.read(TIB / 2, 65536).iter().all(|byte| *byte == 0));
}

#[test]
fn a_hole_becomes_one_where_something_else_was() {
    let a = TestEngine::new("a", 64 * MIB, AuthorityRecord::created());
    let b = filled(64 * MIB, |file| {
        for place in [0, 13 * MIB + 4096, 64 * MIB - 65536] {
            file.write_all_at(&[7; 65536], place).expect("written");
        }
    });
    start(&a, &b, options(1), links(2));
    wait_for_success(&a, &b);
    assert!(a.handle.snapshot().progress.expect("progress").verified);
    let moved = b.finish();
    assert!(moved.iter().all(|byte| *byte == 0));
}

#[test]
fn a_hole_is_compared_with_what_the_destination_holds() {
    let b = filled(64 * MIB, |file| {
        file.write_all_at(&[0; 65536], 8 * MIB).expect("written");
        file.write_all_at(&[0; 512 << 10], 16 * MIB)
            .expect("written");
        // The very last sector of a hole.
        file.write_all_at(&[1], 32 * MIB - 1).expect("written");
    });
    let mut source = Puppet::source_of(&b);
    let mut equals = |start: u64, bytes: u64| {
        let question = Message::VerifyHole {
            slot: ChunkSlot(3),
            generation: Generation(0),
            extent: Extent::from_bytes(start, bytes as u32).expect("an extent"),
        };
        source.copy.write_all(&frame(question)).expect("sent");
        match receive(&mut source.copy).0 {
            Message::Verified {
                slot: ChunkSlot(3),
                result,
                ..
            } => result.expect("the disk works"),
            other => panic!("{other:?}"),
        }
    };
    assert!(equals(0, 4 * MIB), "a hole");
    assert!(equals(4 * MIB, 8 * MIB), "zeroes between two holes");
    assert!(equals(16 * MIB, 12 * MIB), "zeroes longer than a piece");
    assert!(!equals(30 * MIB, 2 * MIB), "data at the end");
    assert!(equals(30 * MIB, 2 * MIB - 4096), "all before that");
    assert!(!equals(0, 32 * MIB));
}
