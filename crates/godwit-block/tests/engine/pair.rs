//! Two engines, the start and end of a migration between them, and a load that checks its reads.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use godwit_block::engine::{InterfaceCounter, PeerStreams};
use godwit_core::authority::AuthorityRecord;
use godwit_core::event::{AbortReason, Event};
use godwit_core::{MigrationOptions, StartError};

use crate::support::*;

/// A node with the disk, and a node with room for the disk.
pub(crate) struct Pair {
    pub(crate) a: TestEngine,
    pub(crate) b: TestEngine,
}

impl Pair {
    pub(crate) fn new(size: u64) -> Self {
        Self {
            a: TestEngine::new("a", size, AuthorityRecord::created()),
            b: TestEngine::new("b", size, AuthorityRecord::vacant()),
        }
    }
}

/// Starts a migration on both sides.
pub(crate) fn start(
    source: &TestEngine,
    destination: &TestEngine,
    options: MigrationOptions,
    links: (PeerStreams, PeerStreams),
) {
    start_watched(source, destination, options, links, None);
}

/// Starts a migration on both sides, with a watch on an interface.
pub(crate) fn start_watched(
    source: &TestEngine,
    destination: &TestEngine,
    options: MigrationOptions,
    (ours, theirs): (PeerStreams, PeerStreams),
    interface: Option<InterfaceCounter>,
) {
    let (migration, timeout) = (options.migration, options.peer_timeout);
    let handle = &destination.handle;
    let started = ask(|reply| handle.start_destination(migration, timeout, theirs, reply));
    assert_eq!(started, Ok(()), "at the destination");
    let started = start_source(source, options, ours, interface);
    assert_eq!(started, Ok(()), "at the source");
}

/// Starts a migration at the source only.
pub(crate) fn start_source(
    source: &TestEngine,
    options: MigrationOptions,
    ours: PeerStreams,
    interface: Option<InterfaceCounter>,
) -> Result<(), StartError> {
    let handle = &source.handle;
    let memory = handle.chunk_memory(&options).expect("memory");
    ask(|reply| handle.start_source(options, memory, ours, interface, reply))
}

/// Returns true if there was a migration to cancel.
pub(crate) fn cancel(source: &TestEngine) -> bool {
    ask(|reply| source.handle.cancel(AbortReason::Cancelled, reply))
}

/// Waits until both sides agree that the migration succeeded.
pub(crate) fn wait_for_success(source: &TestEngine, destination: &TestEngine) {
    source.wait_for_core(|event| match event {
        Event::MigrationAborted {
            reason, mismatch, ..
        } => {
            panic!("aborted: {reason} {mismatch:?}")
        }
        Event::MigrationCompleted { .. } => true,
        _ => false,
    });
    destination.wait_for_core(|event| matches!(event, Event::ReceiveCompleted { .. }));
    destination.wait_until(|snapshot| snapshot.serves);
}

/// Keeps requests in flight on a range of its own and checks the reads, until told to stop. Returns the range's
/// content.
pub(crate) fn load(
    mut client: Client,
    base: u64,
    length: u64,
    seed: u64,
    stop: Arc<AtomicBool>,
) -> std::thread::JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut random = Random(seed);
        let mut model = vec![0_u8; length as usize];
        let mut rounds = 0;
        while !stop.load(Ordering::Relaxed) || rounds < 20 {
            rounds += 1;
            // Sixteen requests in flight, one per part, so that none overlap.
            let part = length / 16;
            let mut flying = HashMap::new();
            for index in 0..16 {
                let sectors = 1 + random.below(part / 512 / 4);
                let offset = index * part + random.below(part / 512 - sectors) * 512;
                let bytes = sectors * 512;
                let range = offset as usize..(offset + bytes) as usize;
                let at = base + offset;
                let cookie = match random.below(8) {
                    0..=3 => {
                        let data = random.bytes(bytes as usize);
                        model[range.clone()].copy_from_slice(&data);
                        let fua = if random.below(8) == 0 { FUA } else { 0 };
                        client.send(WRITE, fua, at, bytes as u32, &data)
                    }
                    4 => {
                        model[range.clone()].fill(0);
                        client.send(TRIM, 0, at, bytes as u32, &[])
                    }
                    5 if index == 0 => client.send(FLUSH, 0, 0, 0, &[]),
                    _ => {
                        let cookie = client.send(READ, 0, at, bytes as u32, &[]);
                        flying.insert(cookie, Some(range));
                        continue;
                    }
                };
                flying.insert(cookie, None);
            }
            while !flying.is_empty() {
                let answer = client
                    .receive(|cookie| flying[&cookie].as_ref().map_or(0, |range| range.len()));
                assert_eq!(answer.error, 0, "the guest saw an error in round {rounds}");
                if let Some(range) = flying.remove(&answer.cookie).expect("a request of ours") {
                    assert!(answer.data == model[range], "a read saw something else");
                }
            }
        }
        model
    })
}
