//! A virtual machine whose disk moves away under it.

use godwit_block::engine::FrontEndState;
use godwit_core::authority::AuthorityRecord;
use godwit_core::event::Phase;
use godwit_core::{MigrationOptions, Switchover};
use godwit_testkit::vhost_client::{Client, Options, Status};

use super::{MOMENT, SIZE, Served};
use crate::pair::{start, wait_for_success};
use crate::support::{PATIENCE, Random, TestEngine, links, options};

#[test]
fn a_guest_writes_through_a_migration_and_both_images_agree() {
    let source = Served::new("a");
    let destination = Served::over(TestEngine::new("b", SIZE, AuthorityRecord::vacant()));
    let mut guest = source.connect(Options {
        indirect: true,
        ..Options::default()
    });
    let data = guest.data();
    let mut random = Random(11);
    let mut model = random.bytes(SIZE as usize);
    for (index, piece) in model.chunks(1 << 20).enumerate() {
        assert_eq!(guest.write(0, index as u64 * 2048, piece), Status::OK);
    }
    // The machine that will take over is there already, with a request.
    let mut next = destination.connect(Options::default());
    let early = next.submit_read(0, 0, next.data(), 4096);
    next.queues[0].notify();
    assert_eq!(next.queues[0].wait(MOMENT), None, "held");
    start(&source.engine, &destination.engine, options(1), links(2));
    for round in 0..400 {
        let length = 512 * (1 + random.below(64));
        let sector = random.below((SIZE - length) / 512);
        let bytes = random.bytes(length as usize);
        guest.memory.write(data, &bytes);
        let head = guest.submit_write(0, sector, data, length as u32);
        guest.queues[0].notify();
        // A guest may do this. Its data is then one or the other, the same on both sides.
        if round % 8 == 0 {
            guest.memory.write(data, &vec![0xaa; length as usize]);
        }
        assert_eq!(guest.wait_for(0, head), Status::OK, "{round}");
        let start = sector as usize * 512;
        let range = start..start + length as usize;
        let found = guest.read(0, sector, length as usize).expect("a read");
        if round % 8 != 0 {
            assert!(found == bytes, "round {round} reads what it wrote");
        }
        model[range].copy_from_slice(&found);
    }
    wait_for_success(&source.engine, &destination.engine);
    let done = next.queues[0].wait(PATIENCE).expect("an answer");
    assert_eq!((done.head, next.status(0, early)), (early, Status::OK));
    // The first machine is still there: its requests are forwarded.
    assert_eq!(guest.write(0, 4096, &[0x77; 4096]), Status::OK);
    model[4096 * 512..4096 * 512 + 4096].fill(0x77);
    assert_eq!(guest.read(0, 4096, 4096), Ok(vec![0x77; 4096]));
    assert_eq!(next.read(0, 4096, 4096), Ok(vec![0x77; 4096]));
    assert_eq!(next.flush(0), Status::OK);
    let state = source.engine.handle.snapshot().front_end;
    assert_eq!(state, FrontEndState::Attached);
    drop((guest, next));
    assert!(destination.engine.finish() == model, "at the destination");
}

#[test]
fn a_disk_follows_the_machine_that_its_hypervisor_moves() {
    let source = Served::new("a");
    let destination = Served::over(TestEngine::new("b", SIZE, AuthorityRecord::vacant()));
    let mut guest = source.connect(Options::default());
    assert_eq!(guest.write(0, 0, &[0x11; 4096]), Status::OK);
    let follows = MigrationOptions {
        switchover: Switchover::WhenTold,
        ..options(1)
    };
    start(&source.engine, &destination.engine, follows, links(1));
    source.engine.wait_until(|snapshot| {
        snapshot
            .progress
            .is_some_and(|progress| progress.phase == Phase::Converged)
    });
    assert_eq!(guest.write(0, 8, &[0x22; 4096]), Status::OK);
    // The machine there is set up, and does not run yet.
    let mut next = Client::connect(&destination.path, Options::default()).expect("a front end");
    next.config().expect("the disk's size");
    std::thread::sleep(MOMENT);
    assert!(source.engine.handle.snapshot().serves, "nothing has moved");
    // The hypervisor stops the machine here and starts it there.
    guest.stop_queue(0).expect("the ring stops");
    next.start().expect("queues");
    assert_eq!(next.read(0, 0, 4096), Ok(vec![0x11; 4096]));
    assert_eq!(next.read(0, 8, 4096), Ok(vec![0x22; 4096]));
    assert_eq!(next.write(0, 16, &[0x33; 4096]), Status::OK);
    wait_for_success(&source.engine, &destination.engine);
    drop((guest, next));
    let moved = destination.engine.finish();
    assert!(moved[8192..12288] == [0x33; 4096]);
}
