//! A controller whose peer, guests and disk do anything that a body lets through, in any order:
//! it must not panic, must answer each request at most once and not while the disk still uses its
//! buffer, must keep what it asks for bounded, and must answer everything in the end unless it
//! cannot know who owns the disk.

#![no_main]

mod body;
mod input;

use std::num::NonZeroU64;
use std::time::Duration;

use body::Body;
use godwit_core::action::{ChunkSlot, Content, DelayedSlot, Forwarder, PullSlot};
use godwit_core::event::AbortReason;
use godwit_core::request::{Operation, Origin, RequestError, RequestTag};
use godwit_core::sla::LatencyTarget;
use godwit_core::units::{Epoch, Extent, Generation, Lba, MigrationId};
use godwit_core::wire::{Message, Taken, TrafficClass};
use godwit_core::{
    Arrivals, GuestLoad, LinkSignal, MigrationOptions, PolicyOptions, PushOptions, Switchover,
};
use input::Input;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let mut input = Input::new(data);
    let mut body = Body::new(&mut input);
    while let Some(step) = input.next() {
        act(&mut body, step, &mut input);
    }
    body.finish();
});

fn act(body: &mut Body, step: u8, input: &mut Input<'_>) {
    body.pass(u64::from(input.byte()) << (step >> 4) << 12);
    let now = body.now;
    match step % 16 {
        0..=3 => {
            let origin = if input.one_in(8) {
                Origin::Peer
            } else {
                Origin::Client
            };
            let operation = operation(input);
            body.request(origin, operation);
        }
        4..=6 => {
            let result = disk_result(input);
            body.disk_done(input.byte(), result);
        }
        7..=9 => {
            let (class, message) = message(input);
            body.message(class, message);
        }
        10 if input.one_in(8) => body.not_persisted(),
        10 => body.persisted(),
        11 => {
            let options = MigrationOptions {
                chunk_sectors: u32::from(input.byte() % 16) * 8,
                window_chunks: u16::from(input.byte() % 6),
                busy_window_chunks: u16::from(input.byte() % 6),
                max_bandwidth: input.one_in(2).then(|| input.number()),
                verify: input.one_in(2),
                find_holes: input.one_in(2),
                sla: input.one_in(2).then(|| LatencyTarget {
                    limit: Duration::from_micros(1 + input.number() % 10_000),
                    allowed_per_million: 1 + input.number() as u32 % 1_000_000,
                }),
                guest_load: input.one_in(2).then(|| GuestLoad {
                    per_second: input.number() % 100_000,
                    arrivals: match input.byte() % 3 {
                        0 => Arrivals::OpenLoop,
                        1 => Arrivals::ClosedLoop,
                        _ => Arrivals::Unknown,
                    },
                }),
                wake_up_limit: input
                    .one_in(2)
                    .then(|| Duration::from_micros(input.number() % 100_000)),
                delayed_writes: input.one_in(2),
                delayed_write_rate: input.one_in(2).then(|| input.number()),
                interface_budget: input.one_in(2).then(|| input.number()),
                deadline: input
                    .one_in(4)
                    .then(|| Duration::from_micros(input.number() % 100_000)),
                switchover: match input.byte() % 6 {
                    0..=2 => Switchover::WhenConverged,
                    3 | 4 => Switchover::WhenTold,
                    _ => Switchover::Never {
                        checkpoints: input.one_in(2),
                    },
                },
                peer_timeout: body::TIMEOUT,
                policy: match input.byte() % 8 {
                    0..=3 => PolicyOptions::DoubleWrite,
                    4 => PolicyOptions::Mirror,
                    other => PolicyOptions::PushPull(PushOptions {
                        threshold: other - 5,
                        longest_push: input
                            .one_in(2)
                            .then(|| Duration::from_micros(input.number() % 100_000)),
                    }),
                },
                ..MigrationOptions::new(migration(input))
            };
            let _ = body.core.start_source(now, options);
        }
        12 => {
            let _ = body
                .core
                .start_destination(now, migration(input), body::TIMEOUT);
        }
        13 => body.core.handle_timer(now),
        14 => match input.byte() {
            240.. => {
                let signal = LinkSignal {
                    queued: input.number(),
                    round_trip: Duration::from_micros(u64::from(input.byte())),
                    delivery_rate: input.number(),
                    interface_rate: input.one_in(2).then(|| input.number()),
                };
                body.core.handle_link_signal(now, signal);
            }
            230.. => {
                body.core.handle_guest_here(now);
            }
            220.. => {
                body.core.switch_over(now);
            }
            200.. => forwarding_event(body, input),
            180.. => pull_event(body, input),
            140.. => follow_event(body, input),
            other => connection_event(body, other % 8),
        },
        _ => body.settle(),
    }
    body.drain();
}

fn connection_event(body: &mut Body, which: u8) {
    let now = body.now;
    match which {
        0 => body.core.handle_connection_lost(now, TrafficClass::Control),
        1 => body.core.handle_connection_lost(now, TrafficClass::Sync),
        2 => body.core.handle_connection_lost(now, TrafficClass::Copy),
        3 => body.core.handle_control_up(now),
        4 => body.core.handle_forward_up(now),
        5 => body.core.handle_forward_lost(now),
        6 => body.core.fail_forwarded(now),
        _ => {
            body.core.cancel(now, AbortReason::Cancelled);
        }
    }
}

/// What becomes of a disk that stays, and of its checkpoints.
fn follow_event(body: &mut Body, input: &mut Input<'_>) {
    let now = body.now;
    let number = u64::from(input.byte() % 6);
    match input.byte() % 8 {
        0 => {
            body.core.sever(now);
        }
        1 => {
            let _ = body.core.take(now);
        }
        2 => body.core.hold(now),
        3 => body.core.go_alone(now),
        4 => {
            body.core.yield_to(now, Epoch(number));
        }
        5 => {
            let whole = u64::from(input.byte() % 6);
            body.core.mark_checkpoint(now, number, whole);
        }
        6 => {
            body.core.apply_checkpoints(now, number);
        }
        _ => body.applied(RequestError::from_code(u16::from(input.byte() % 16 / 12))),
    }
}

/// What comes on the connection on which an owner pulls.
fn pull_event(body: &mut Body, input: &mut Input<'_>) {
    let slot = PullSlot(u16::from(input.byte() % 20));
    let result = RequestError::from_code(u16::from(input.byte() % 16 / 12));
    match input.byte() % 8 {
        0 => body.pull_link(Some(input.one_in(2))),
        1 => body.pull_link(None),
        2 | 3 => body.pulled(input.byte(), input.one_in(2), result),
        4 => body.not_pulled(Message::Pulled {
            slot,
            extent: extent(input),
            zeroes: input.one_in(2),
            result,
        }),
        5 => {
            let extent = extent(input);
            body.message(TrafficClass::Pull, Message::Pull { slot, extent });
        }
        6 => {
            let migration = migration(input);
            let max_bandwidth = NonZeroU64::new(u64::from(input.byte()) << 12);
            let owes = Message::Owes {
                migration,
                max_bandwidth,
            };
            body.message(TrafficClass::Pull, owes);
        }
        _ => {
            let migration = migration(input);
            body.message(TrafficClass::Pull, Message::Whole { migration });
        }
    }
}

/// What clients and nodes that forward do.
fn forwarding_event(body: &mut Body, input: &mut Input<'_>) {
    let now = body.now;
    let forwarder = Forwarder(u16::from(input.byte() % 2));
    let number = u32::from(input.byte() % 16);
    match input.byte() % 8 {
        0 => body.core.handle_client_attached(now),
        1 => body.client_left(input.byte()),
        2 => body
            .core
            .handle_forwarder_up(now, forwarder, input.one_in(2)),
        3 => body.core.handle_forwarder_lost(now, forwarder),
        4 => {
            let message = match input.byte() % 3 {
                0 => Message::ForwardBegin {
                    session: u64::from(number),
                },
                1 => Message::ClientAttached,
                _ => Message::FenceReached { number },
            };
            body.core.handle_forwarder_message(now, forwarder, message);
        }
        5 => {
            let taken = match input.byte() % 3 {
                0 => Taken::Unknown,
                1 => Taken::Nothing,
                _ => Taken::Through(number),
            };
            let fence = Message::Fence {
                number,
                taken,
                shared: input.one_in(2),
                failed: input.one_in(2),
            };
            body.message(TrafficClass::Sync, fence);
        }
        _ => {
            let operation = operation(input);
            body.forwarded(forwarder, number, operation);
        }
    }
}

/// Mostly small numbers, so that ends, overlaps and repetitions are met.
fn extent(input: &mut Input<'_>) -> Extent {
    let start = if input.one_in(16) {
        input.number()
    } else {
        u64::from(input.byte() % 128)
    };
    let sectors = if input.one_in(16) {
        input.number() as u32
    } else {
        u32::from(input.byte() % 32)
    };
    Extent::new(Lba(start), sectors).unwrap_or(Extent::new(Lba(3), 2).expect("a valid extent"))
}

fn operation(input: &mut Input<'_>) -> Operation {
    match input.byte() % 8 {
        0 | 1 => Operation::Read(extent(input)),
        2 => Operation::Flush,
        3 => Operation::WriteZeroes {
            extent: extent(input),
            fua: input.one_in(2),
            unmap: input.one_in(2),
        },
        _ => Operation::Write {
            extent: extent(input),
            fua: input.one_in(4),
        },
    }
}

fn disk_result(input: &mut Input<'_>) -> Result<Content, RequestError> {
    match input.byte() % 16 {
        0 => Err(RequestError::Io),
        1 => Err(RequestError::NoSpace),
        2 => Ok(Content::Hole(u32::from(input.byte()) * 8)),
        3 => {
            let start = Lba(u64::from(input.byte()) * 8);
            let end = Lba(start.0 + u64::from(input.byte()) * 8);
            Ok(Content::LongHole { start, end })
        }
        4..=6 => Ok(Content::Zeroes),
        7..=9 => Ok(Content::Digest([input.byte() % 2; 32])),
        _ => Ok(Content::Data),
    }
}

fn migration(input: &mut Input<'_>) -> MigrationId {
    MigrationId([input.byte() % 3; 16])
}

/// A frame that has to do with pauses.
fn pause_message(kind: u8, input: &mut Input<'_>) -> Message {
    let generation = Generation(u32::from(input.byte() % 4));
    let slot = DelayedSlot(u16::from(input.byte() % 10));
    match kind {
        0 => Message::DelayedWrite {
            slot,
            generation,
            extent: extent(input),
            zeroes: input.one_in(2),
        },
        1 => Message::NewGeneration { generation },
        2 => Message::GenerationReached { generation },
        _ => Message::DelayedWritten {
            slot,
            generation,
            result: RequestError::from_code(u16::from(input.byte() % 16 / 12)),
        },
    }
}

/// A frame about a disk that stays.
fn follow_message(kind: u8, input: &mut Input<'_>) -> (TrafficClass, Message) {
    let migration = migration(input);
    let number = u64::from(input.byte() % 6);
    match kind {
        0 => {
            let follow = Message::Follow {
                migration,
                epoch: Epoch(number),
                checkpoints: input.one_in(2),
            };
            (TrafficClass::Control, follow)
        }
        1 => (TrafficClass::Control, Message::Follows { migration }),
        _ => {
            let mark = Message::CheckpointMark { migration, number };
            (TrafficClass::Sync, mark)
        }
    }
}

/// A frame on a connection that it belongs on.
fn message(input: &mut Input<'_>) -> (TrafficClass, Message) {
    let kind = input.byte();
    if kind >= 224 {
        return (TrafficClass::Sync, pause_message(kind % 4, input));
    }
    if kind >= 200 {
        return follow_message(kind % 4, input);
    }
    let kind = kind % 20;
    let result = match input.byte() % 8 {
        code @ 0..=5 => RequestError::from_code(u16::from(code)),
        _ => Ok(()),
    };
    let generation = Generation(if input.one_in(8) {
        input.number() as u32
    } else {
        0
    });
    let epoch = Epoch(match input.byte() % 8 {
        1 => input.number(),
        5 => u64::MAX - u64::from(input.byte() % 2),
        _ => 2,
    });
    let small = u32::from(input.byte() % 20);
    let slot = ChunkSlot(small as u16 % 6);
    let tag = RequestTag(if input.one_in(32) {
        input.number() as u32
    } else {
        small
    });
    let message = match kind {
        0 if input.one_in(2) => Message::Lacks {
            start: Lba(u64::from(input.byte() % 128)),
            sectors: u32::from(input.byte() % 64),
            heat: input.byte(),
            at_source: input.one_in(2),
        },
        0 => Message::Ping,
        1 => Message::Pong,
        2 => Message::Prepare {
            migration: migration(input),
            epoch,
            shared: input.one_in(2),
            lacks: input.one_in(4),
        },
        3 => Message::Prepared {
            migration: migration(input),
        },
        4 => Message::Commit {
            migration: migration(input),
            epoch,
        },
        5 => Message::Committed {
            migration: migration(input),
        },
        6 => Message::Abort {
            migration: migration(input),
            reason: AbortReason::Refused,
        },
        7 if input.one_in(2) => Message::GuestArrived {
            migration: migration(input),
        },
        7 => Message::Query {
            migration: migration(input),
        },
        8 | 9 => Message::Copy {
            slot,
            generation,
            extent: extent(input),
            zeroes: input.one_in(2),
        },
        10 | 11 => Message::DoubleWrite {
            tag: RequestTag(tag.0 & 0xFFFF),
            turn: u16::from(input.byte()),
            generation,
            extent: extent(input),
            zeroes: input.one_in(2),
            unmap: input.one_in(2),
        },
        12..=14 => Message::Ack {
            tag: tag.0 | u32::from(input.byte() % 4) << 16,
            generation,
            result,
        },
        15 if input.one_in(2) => Message::VerifyHole {
            slot,
            generation,
            extent: extent(input),
        },
        15 => Message::Verify {
            slot,
            generation,
            extent: extent(input),
            digest: [input.byte() % 2; 32],
        },
        16 | 17 => Message::Verified {
            slot,
            generation,
            result: result.map(|()| input.one_in(2)),
        },
        _ => Message::ForwardReply {
            tag,
            number: u32::from(input.byte() % 16),
            length: 0,
            result,
        },
    };
    let class = match kind {
        0..=7 => TrafficClass::Control,
        8 | 9 | 12 | 13 | 15..=17 => TrafficClass::Copy,
        _ => TrafficClass::Sync,
    };
    (class, message)
}
