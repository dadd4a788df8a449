//! Queues and front ends that stop and come back.

use std::time::Instant;

use godwit_block::engine::EngineEvent;
use godwit_core::authority::AuthorityRecord;
use godwit_testkit::vhost_client::{Client, Options, Status, readable};
use vhost::VhostBackend;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{MOMENT, SIZE, Served};
use crate::support::{PATIENCE, TestEngine, departed};

fn tracked(size: u16) -> Options {
    Options {
        size,
        indirect: true,
        inflight: true,
        ..Options::default()
    }
}

#[test]
fn a_queue_stops_when_what_was_taken_is_answered() {
    let served = Served::new("drain");
    let mut client = served.connect(tracked(1024));
    let data = client.data();
    let mut base = 0;
    for _ in 0..10 {
        for block in 0..300 {
            client.submit_write(0, block % 200 * 128, data, 65536);
        }
        client.queues[0].notify();
        base = client.stop_queue(0).expect("to stop");
        assert_eq!(client.queues[0].used(), base, "taken and answered");
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert_eq!(client.queues[0].used(), base, "nothing is taken any more");
        client.start_queue(0, base).expect("to start");
        while client.queues[0].used() != client.queues[0].available() {
            let done = client.queues[0].wait(PATIENCE).expect("an answer");
            assert_eq!(client.status(0, done.head), Status::OK);
        }
        while client.queues[0].done().is_some() {}
    }
    assert!(base > 0);
}

#[test]
fn a_queue_has_stopped_when_the_guest_was_told_of_its_answers() {
    let served = Served::new("told");
    let mut client = served.connect(tracked(128));
    // The counter takes no further signal until it is read.
    let call = client.queues[0].call.try_clone().expect("a descriptor");
    call.read().ok();
    call.write(u64::MAX - 1).expect("fills the counter");
    let data = client.data();
    client.submit_read(0, 0, data, 4096);
    client.queues[0].notify();
    while client.queues[0].used() == 0 {
        std::thread::yield_now();
    }
    std::thread::scope(|scope| {
        let stopping = scope.spawn(|| client.stop_queue(0).expect("to stop"));
        std::thread::sleep(MOMENT);
        assert!(!stopping.is_finished(), "the signal is not sent yet");
        call.read().expect("empties the counter");
        assert_eq!(stopping.join().expect("to end"), 1);
    });
}

#[test]
fn a_guest_is_called_where_an_earlier_signal_may_be_lost() {
    let served = Served::new("called");
    let mut client = served.connect(tracked(128));
    assert_eq!(client.write(0, 0, &[3; 512]), Status::OK);
    let base = client.stop_queue(0).expect("to stop");
    let calls = |client: &Client| readable(&client.queues[0].call, PATIENCE);
    while client.queues[0].call.read().is_ok() {}
    client.start_queue(0, base).expect("to start");
    assert!(calls(&client), "by whoever serves the queue now");

    client.queues[0].call = EventFd::new(EFD_NONBLOCK).expect("a counter");
    let call = &client.queues[0].call;
    client.frontend.set_vring_call(0, call).expect("to change");
    assert!(calls(&client), "on the new descriptor");
}

#[test]
fn a_disk_that_is_not_here_yet_holds_its_requests_and_lets_them_go() {
    let engine = TestEngine::new("vacant", SIZE, AuthorityRecord::vacant());
    let served = Served::over(engine);
    let mut client = served.connect(tracked(128));
    let space = client.config().expect("the configuration");
    assert_eq!(space[..8], (SIZE / 512).to_le_bytes());
    let data = client.data();
    client.submit_read(0, 0, data, 4096);
    client.queues[0].notify();
    assert_eq!(client.queues[0].wait(MOMENT), None);
    let asked = Instant::now();
    assert_eq!(client.stop_queue(0).expect("to stop"), 0, "none was taken");
    assert!(asked.elapsed() < PATIENCE / 4);
}

#[test]
fn a_disk_that_has_moved_away_asks_for_its_owner_and_fails_without_one() {
    let served = Served::over(TestEngine::new("departed", SIZE, departed()));
    let mut client = served.connect(tracked(128));
    let data = client.data();
    for _ in 0..2 {
        let head = client.submit_read(0, 0, data, 4096);
        client.queues[0].notify();
        let asks = |event: &EngineEvent| *event == EngineEvent::ForwardDown;
        served.engine.wait_for(asks);
        assert_eq!(client.queues[0].wait(MOMENT), None, "it may yet be found");
        served.engine.handle.fail_forwarded();
        assert_eq!(client.wait_for(0, head), Status::ERROR);
    }
    client.submit_read(0, 0, data, 4096);
    client.queues[0].notify();
    served
        .engine
        .wait_for(|event| *event == EngineEvent::ForwardDown);
    assert_eq!(client.stop_queue(0).expect("to stop"), 2, "none was taken");
}

#[test]
fn requests_that_a_dead_server_had_are_done_again_in_order() {
    let served = Served::new("resume");
    let mut client = Client::connect(&served.path, tracked(128)).expect("a front end");
    let data = client.data();
    // Two writes of the same sector, of which the one taken later must win, and a third, untaken request.
    client.memory.write(data, &[1; 512]);
    client.memory.write(data + 512, &[2; 512]);
    let second = client.submit_write(0, 0, data + 512, 512);
    let first = client.submit_write(0, 0, data, 512);
    let third = client.submit_read(0, 8, data + 1024, 512);
    let inflight = client.inflight_memory().expect("the memory");
    inflight.store(8, 1); // version
    inflight.store(10, 128); // descriptors
    for (head, order) in [(first, 0), (second, 1)] {
        let entry = 16 + 16 * u64::from(head);
        inflight.write(entry + 8, &u64::to_le_bytes(order));
        inflight.write(entry, &[1]);
    }
    client.start_queue(0, 0).expect("to start");
    let mut heads: Vec<_> = (0..3)
        .map(|_| client.queues[0].wait(PATIENCE).expect("an answer").head)
        .collect();
    heads.sort_unstable();
    let mut expected = vec![first, second, third];
    expected.sort_unstable();
    assert_eq!(heads, expected);
    assert_eq!(client.read(0, 0, 512), Ok(vec![2; 512]));
    for head in expected {
        let mut flag = [1];
        inflight.read(16 + 16 * u64::from(head), &mut flag);
        assert_eq!(flag, [0], "answered");
    }
}

#[test]
fn every_request_is_answered_once_across_lost_connections_and_engines() {
    let mut served = Served::new("reconnect");
    let mut client = served.connect(tracked(256));
    let data = client.data();
    let (mut asked, mut answered) = (0, 0);
    for round in 0..12 {
        while client.queues[0].unused() > 0 {
            let block = asked % 60;
            client.submit_write(0, block * 128, data, 65536);
            asked += 1;
        }
        client.queues[0].notify();
        if round % 3 == 2 {
            // The engine ends with requests in its hands, and another takes over.
            served.engine = served.engine.restart(AuthorityRecord::created());
        }
        served.serve();
        client.reconnect(&served.path).expect("to connect again");
        while client.queues[0].unused() < 128 {
            let done = client.queues[0].wait(PATIENCE).expect("an answer");
            assert_eq!(client.status(0, done.head), Status::OK);
            answered += 1;
        }
    }
    while client.queues[0].unused() < 256 {
        client.queues[0].wait(PATIENCE).expect("an answer");
        answered += 1;
    }
    assert_eq!(asked, answered);
    assert_eq!(
        client.queues[0].wait(MOMENT),
        None,
        "none is answered twice"
    );
}

#[test]
fn the_engine_ends_while_a_front_end_is_attached() {
    let served = Served::new("end");
    let mut client = served.connect(Options::default());
    assert_eq!(client.write(0, 1, &[3; 512]), Status::OK);
    let image = served.engine.finish();
    assert!(image[512..1024].iter().all(|&byte| byte == 3));
    assert!(client.config().is_err(), "disconnected");
}
