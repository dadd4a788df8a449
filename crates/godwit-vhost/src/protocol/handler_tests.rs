use rustix::event::{EventfdFlags, eventfd};

use super::*;
use crate::protocol::device::FrontEndReply;

/// A device that ends at the steps of `ends_at`: a front end that waits for the answer gets none.
#[derive(Clone)]
struct Fake {
    told: mpsc::Sender<FrontEndCommand>,
    ends_at: fn(&FrontEndCommand) -> bool,
}

impl Device for Fake {
    fn name(&self) -> &str {
        "fake"
    }

    fn features(&self) -> u64 {
        0
    }

    fn configuration(&self, _: u32, _: u32) -> Option<Vec<u8>> {
        None
    }

    fn front_end(&self, command: FrontEndCommand, reply: FrontEndReply) {
        if !(self.ends_at)(&command) {
            reply(Ok(0));
        }
        self.told.send(command).expect("is heard");
    }
}

struct Setup {
    handler: Handler<Fake>,
    told: mpsc::Receiver<FrontEndCommand>,
    _front_end: UnixStream,
}

impl Setup {
    fn new(ends_at: fn(&FrontEndCommand) -> bool) -> Self {
        let (socket, front_end) = UnixStream::pair().expect("a pair");
        let (told, hears) = mpsc::channel();
        let device = Fake { told, ends_at };
        Self {
            handler: Handler::new(device, socket),
            told: hears,
            _front_end: front_end,
        }
    }
}

fn counter() -> File {
    File::from(eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd"))
}

#[test]
fn a_device_is_told_of_features_that_change() {
    let mut setup = Setup::new(|_| false);
    let features = [0, 0, PROTOCOL, PROTOCOL, 0, PROTOCOL | EVENT_INDEX];
    for features in features {
        setup.handler.set_features(features).expect("are taken");
    }
    let told = setup.told.try_iter().map(|told| match told {
        FrontEndCommand::Features { features } => features,
        _ => panic!("another step"),
    });
    let told: Vec<_> = told.collect();
    assert_eq!(told, [0, PROTOCOL, 0, PROTOCOL | EVENT_INDEX]);
}

#[test]
fn a_record_of_requests_in_flight_that_stays_is_mapped_once() {
    let mut setup = Setup::new(|_| false);
    let mut hand_over = |file: &File, queue_size, mmap_offset| {
        let (_, length) = InflightArea::create(2, 64).expect("a record");
        let area = VhostUserInflight::new(length, mmap_offset, 2, queue_size);
        let file = file.try_clone().expect("another");
        let taken = setup.handler.set_inflight_fd(&area, file);
        taken.expect("is taken");
        setup.handler.inflight.clone().expect("is kept")
    };
    let [record, other] = [(); 2].map(|()| {
        let (_, length) = InflightArea::create(2, 64).expect("a record");
        let file = tempfile::tempfile().expect("a file");
        file.set_len(length + 4096).expect("grows");
        file
    });
    for (file, size, offset) in [(&other, 64, 0), (&record, 32, 0), (&record, 64, 4096)] {
        let first = hand_over(&record, 64, 0);
        assert!(Arc::ptr_eq(&first, &hand_over(&record, 64, 0)));
        let next = hand_over(file, size, offset);
        assert!(!Arc::ptr_eq(&first, &next), "{size}, {offset}");
    }
}

#[test]
fn a_front_end_waits_for_no_step_that_may_take_effect_later() {
    let mut setup = Setup::new(|command| {
        matches!(
            command,
            FrontEndCommand::Call { .. } | FrontEndCommand::Error { .. }
        )
    });
    let handler = &mut setup.handler;
    handler.rings[1].running = true;
    handler.set_vring_call(1, Some(counter())).expect("is told");
    handler.set_vring_err(1, Some(counter())).expect("is told");
    handler.set_vring_enable(1, true).expect("is answered");
    let told: Vec<_> = setup.told.try_iter().collect();
    assert!(matches!(
        told[..],
        [
            FrontEndCommand::Call { ring: 1, .. },
            FrontEndCommand::Error { ring: 1, .. },
            FrontEndCommand::Enable { .. },
        ]
    ));
}

#[test]
fn a_front_end_that_has_much_to_tell_waits_for_the_device() {
    let mut setup = Setup::new(|command| matches!(command, FrontEndCommand::Call { .. }));
    let handler = &mut setup.handler;
    handler.rings[1].running = true;
    let mut tells = |count: usize| {
        (0..count).all(|_| handler.set_vring_call(1, Some(counter())).is_ok())
            && handler.set_vring_enable(1, false).is_ok()
    };
    assert!(tells(MOST_UNANSWERED), "each answer makes room");
    assert!(tells(MOST_UNANSWERED));
    assert!(!tells(MOST_UNANSWERED + 1), "the device would be awaited");
}
