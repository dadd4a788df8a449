//! A machine that its hypervisor has stopped stands still until its disk changes hands: nothing
//! that was held back for the sake of its promise may hold that up.

use std::time::Duration;

use godwit_core::action::{Action, Content};
use godwit_core::authority::AuthorityRecord;
use godwit_core::event::{Event, Phase};
use godwit_core::request::{Operation, Origin, Request, RequestTag};
use godwit_core::sla::LatencyTarget;
use godwit_core::units::{Extent, Lba, MigrationId, Sectors, Time};
use godwit_core::wire::{Message, TrafficClass};
use godwit_core::{Controller, Limits, MigrationOptions, Switchover};

const LIMITS: Limits = Limits {
    requests: 64,
    window_chunks: 64,
    delayed_chunks: 8,
    delayed_ranges: 64,
};
/// 1 GiB.
const CAPACITY: Sectors = Sectors(2 << 20);

/// A source whose disk and destination do everything at once, but acknowledge no double write.
struct Source {
    core: Controller,
    now: Time,
    converged: bool,
    asked_to_accept: bool,
    answered: u32,
}

impl Source {
    fn settle(&mut self) {
        let now = self.now;
        while let Some(action) = self.core.poll_action() {
            match action {
                Action::Disk { tag, .. } => {
                    self.core.handle_disk_done(now, tag, Ok(Content::Data));
                }
                Action::Send { class, message } => self.answer(class, message),
                Action::Complete { .. } => self.answered += 1,
                Action::Notify(Event::PhaseEntered { phase, .. }) => {
                    self.converged |= phase == Phase::Converged;
                }
                _ => {}
            }
        }
    }

    fn answer(&mut self, class: TrafficClass, message: Message) {
        let answer = match message {
            Message::Copy {
                slot, generation, ..
            } => Message::Ack {
                tag: u32::from(slot.0),
                generation,
                result: Ok(()),
            },
            Message::DelayedWrite {
                slot, generation, ..
            } => Message::DelayedWritten {
                slot,
                generation,
                result: Ok(()),
            },
            Message::NewGeneration { generation } => Message::GenerationReached { generation },
            Message::Ping => Message::Pong,
            Message::Prepare { .. } => {
                self.asked_to_accept = true;
                return;
            }
            _ => return,
        };
        self.core.handle_message(self.now, class, answer, None);
    }

    /// Lets time pass.
    fn pass(&mut self, time: Duration) {
        let end = self.now.after(time);
        self.settle();
        while let Some(at) = self.core.next_deadline().filter(|at| *at <= end) {
            self.now = self.now.max(at);
            self.core.handle_timer(self.now);
            self.settle();
        }
        self.now = end;
    }
}

#[test]
fn a_copy_that_nobody_held_back_holds_up_no_stopped_machine() {
    let mut source = Source {
        core: Controller::new(LIMITS, CAPACITY, AuthorityRecord::created()),
        now: Time(0),
        converged: false,
        asked_to_accept: false,
        answered: 0,
    };
    let options = MigrationOptions {
        sla: Some(LatencyTarget {
            limit: Duration::from_millis(5),
            allowed_per_million: 100,
        }),
        switchover: Switchover::WhenTold,
        peer_timeout: Duration::from_secs(60),
        ..MigrationOptions::new(MigrationId([1; 16]))
    };
    source
        .core
        .start_source(source.now, options)
        .expect("it starts");
    // The guest asks for nothing: the whole disk is copied as fast as it goes.
    source.pass(Duration::from_millis(50));
    assert!(source.converged, "all is copied");
    // More than is sent while the guest is held.
    let extent = Extent::new(Lba(0), 512).expect("an extent");
    let request = Request {
        tag: RequestTag(0),
        origin: Origin::Client,
        operation: Operation::Write { extent, fua: false },
    };
    source.core.handle_request(source.now, request);
    // Its double write is late, so that the destination is told of it later.
    source.pass(Duration::from_millis(6));
    assert_eq!(
        source.answered, 1,
        "the guest does not wait for the destination"
    );
    assert!(source.core.switch_over(source.now));
    source.pass(Duration::from_millis(1));
    assert!(source.asked_to_accept, "{:?}", source.core.progress());
}
