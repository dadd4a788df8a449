//! A disk that follows with checkpoints: the backup's image is as of the last checkpoint that was to be applied.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use godwit_block::engine::EngineConfig;
use godwit_core::authority::AuthorityRecord;
use godwit_core::event::{AbortReason, Event};
use godwit_core::{MigrationOptions, Switchover};

use crate::pair::*;
use crate::support::*;

const SIZE: usize = 32 << 20;
const DISCARDED: usize = 8 << 20;

/// A primary and a backup, a client of the primary, and the content of the disk.
struct Protected {
    pair: Pair,
    client: Client,
    content: Vec<u8>,
    random: Random,
}

impl Protected {
    fn new(seed: u64, backup: EngineConfig) -> Self {
        let mut random = Random(seed);
        let pair = Pair {
            a: TestEngine::new("a", SIZE as u64, AuthorityRecord::created()),
            b: TestEngine::with_config(backup, SIZE as u64, AuthorityRecord::vacant()),
        };
        let mut client = pair.a.attach(true);
        let content = random.bytes(SIZE);
        client.write(0, &content);
        Self {
            pair,
            client,
            content,
            random,
        }
    }

    /// Lets the backup follow.
    fn follow(&self, id: u8) {
        let options = MigrationOptions {
            verify: false,
            switchover: Switchover::Never { checkpoints: true },
            ..options(id)
        };
        start(&self.pair.a, &self.pair.b, options, links(1));
        let followed = |event: &Event| matches!(event, Event::Followed { .. });
        self.pair.a.wait_for_core(followed);
    }

    /// Writes, zeroes and discards, with overlaps and in parts of blocks.
    fn write(&mut self, requests: u64, longest: u64) {
        for _ in 0..requests {
            let sectors = 1 + self.random.below(longest / 512);
            let at = self.random.below(SIZE as u64 / 512 - sectors) * 512;
            let place = at as usize..(at + sectors * 512) as usize;
            let kind = match self.random.below(8) {
                0 => TRIM,
                1 => WRITE_ZEROES,
                _ => WRITE,
            };
            if kind == WRITE {
                let data = self.random.bytes(place.len());
                self.content[place].copy_from_slice(&data);
                self.client.write(at, &data);
            } else {
                self.content[place.clone()].fill(0);
                let answer = self.client.call(kind, 0, at, place.len() as u32, &[]);
                assert_eq!(answer.error, 0);
            }
        }
    }

    /// Marks a checkpoint, and waits until the backup has all of it. Returns its content.
    fn mark(&self, number: u64) -> Vec<u8> {
        let (a, b) = (&self.pair.a.handle, &self.pair.b);
        assert!(ask(|reply| a.mark_checkpoint(number, number - 1, reply)));
        let told = Event::CheckpointMarked {
            migration: options(1).migration,
            number,
        };
        b.wait_for_core(|event| *event == told);
        self.content.clone()
    }

    fn apply(&self, number: u64) {
        let b = &self.pair.b.handle;
        assert!(ask(|reply| b.apply_checkpoints(number, reply)));
    }

    /// Lets the backup take the disk, and returns the bytes of its image.
    fn take(self) -> Vec<u8> {
        let b = self.pair.b;
        assert!(ask(|reply| b.handle.sever(reply)));
        assert!(ask(|reply| b.handle.take(reply)));
        b.wait_for_core(|event| matches!(event, Event::ReceiveCompleted { .. }));
        b.wait_until(|snapshot| snapshot.serves);
        let mut client = b.attach(true);
        let served = client.read(0, SIZE);
        drop(client);
        let image = b.finish();
        assert!(image == served, "a guest reads what the image holds");
        image
    }
}

fn backup() -> EngineConfig {
    EngineConfig::new(String::from("b"))
}

#[test]
fn writes_behind_a_checkpoint_reach_the_image_when_the_next_one_is_applied_and_no_earlier() {
    let mut it = Protected::new(1, backup());
    it.follow(1);
    it.write(40, 64 << 10);
    let first = it.mark(1);
    it.apply(1);
    it.write(200, 64 << 10);
    it.content[..DISCARDED].fill(0);
    let discarded = it.client.call(TRIM, 0, 0, DISCARDED as u32, &[]);
    assert_eq!(discarded.error, 0);
    let second = it.mark(2);
    it.write(100, 64 << 10);
    let path = it.pair.b.image_path();
    let on_image = std::fs::read(&path).expect("the image");
    assert!(on_image == first, "nothing is ahead of its checkpoint");
    let space = || std::fs::metadata(&path).expect("the image").blocks() * 512;
    let before = space();
    it.apply(2);
    // The discarded space is released here, too.
    it.pair
        .b
        .wait_until(|_| space() + DISCARDED as u64 / 2 < before);
    assert!(it.take() == second);
}

#[test]
fn many_checkpoints_use_the_same_space_and_the_last_one_is_taken() {
    let mut it = Protected::new(2, backup());
    it.follow(1);
    let mut last = Vec::new();
    for number in 1..=8 {
        last = it.mark(number);
        it.write(40, 4 << 20);
        // Some are applied together.
        if number % 3 != 0 {
            it.apply(number);
        }
    }
    // The last order is still being carried out.
    assert!(it.take() == last);
}

#[test]
fn a_backup_that_cannot_keep_a_write_is_lost_and_the_primary_goes_on_alone() {
    let mut it = Protected::new(
        3,
        EngineConfig {
            // No file can be created here.
            kept_in: Some(PathBuf::from("/proc/self")),
            ..backup()
        },
    );
    it.follow(1);
    it.write(10, 4096);
    it.mark(1);
    it.apply(1);
    let data = [7; 4096];
    let cookie = it.client.send(WRITE, 0, 0, 4096, &data);
    let lost = Event::Severed {
        migration: options(1).migration,
        reason: AbortReason::DestinationDisk,
    };
    it.pair.a.wait_for_core(|event| *event == lost);
    let ended = |event: &Event| matches!(event, Event::ReceiveAborted { .. });
    it.pair.b.wait_for_core(ended);
    let b = &it.pair.b.handle;
    assert!(!ask(|reply| b.take(reply)));
    it.pair.a.handle.go_alone();
    let answer = it.client.receive(|_| 0);
    assert_eq!((answer.cookie, answer.error), (cookie, 0));
}

#[test]
fn a_new_synchronization_begins_with_nothing_kept() {
    let mut it = Protected::new(4, backup());
    it.follow(2);
    let (a, b) = (it.pair.a.handle.clone(), it.pair.b.handle.clone());
    assert!(ask(|reply| a.mark_checkpoint(1, 0, reply)));
    // Writes to one place are applied one after the other: the next start has to wait.
    for round in 0..400_u32 {
        it.client.write(0, &round.to_le_bytes().repeat(1024));
    }
    assert!(ask(|reply| a.mark_checkpoint(2, 0, reply)));
    let here = |event: &Event| matches!(event, Event::CheckpointMarked { number: 2, .. });
    it.pair.b.wait_for_core(here);
    it.client.write(0, &it.content[..4096]);
    it.write(20, 64 << 10);
    b.apply_checkpoints(2, Box::new(drop));
    a.go_alone();
    it.pair
        .b
        .wait_for_core(|event| matches!(event, Event::ReceiveAborted { .. }));
    it.write(20, 64 << 10);
    it.follow(1);
    for number in 1..=2 {
        it.mark(number);
        it.write(20, 64 << 10);
    }
    let third = it.mark(3);
    it.apply(3);
    assert!(it.take() == third);
}
