//! Machines whose guests read unavailable data: they stand still until the data comes, or see errors, as the node is
//! configured.

use std::time::Duration;

use godwit_testkit::process::wait_for;
use godwit_testkit::scenario::{PATIENCE, Scenario};
use godwit_testkit::vm::{GuestLoad, NodeGuest, VM, format_image};
use serde_json::Value;

use crate::fixture::{DISK, Fixture, MIB, turn};

/// Time in which a guest that must stand still would go on.
const MOMENT: Duration = Duration::from_secs(4);

/// Creates a disk on an image with a file system, with nothing fetched, and takes the repository away.
fn without_repository(options: &[&str], size: u64) -> Fixture {
    let fixture = Fixture::start(&["a"], options);
    let path = fixture.cluster.dir().join("guest");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(size).unwrap();
    format_image(&path).unwrap();
    fixture
        .image(&["push", "base", path.to_str().unwrap()])
        .unwrap();
    fixture.create(&["--prefetch", "off"]);
    fixture.is_there(false);
    fixture
}

fn load(turn: &Scenario) -> GuestLoad {
    GuestLoad {
        seed: turn.seed,
        file_mb: 8,
        ..GuestLoad::default()
    }
}

fn shown(fixture: &Fixture) -> Option<Value> {
    fixture.a().godwit(&["vm", "show", VM]).json().ok()
}

#[test]
fn a_machine_stands_still_while_what_it_reads_cannot_be_had_and_goes_on_by_itself() {
    let turn = turn("a_machine_stands_still");
    let mut fixture = without_repository(
        &["--read-wait", "2s", "--read-wait-then", "pause"],
        64 * MIB,
    );
    let load = load(&turn);
    std::thread::scope(|scope| {
        let boots = scope.spawn(|| {
            let disks = vec![DISK.to_owned()];
            NodeGuest::boot(&fixture.cluster, fixture.a(), disks, &load).unwrap()
        });
        let still = || shown(&fixture).filter(|vm| vm["state"] == "paused");
        let vm = wait_for(PATIENCE, still).unwrap_or_else(|| panic!("{:?}", shown(&fixture)));
        let problem = vm["problem"].as_str().unwrap();
        println!("{problem}");
        assert!(
            problem.contains("a part of disk d that it reads is not here and cannot be had now"),
            "{problem}"
        );
        let status = fixture.disk()["status"].as_str().unwrap().to_owned();
        assert!(status.contains("reads of that wait"), "{status}");
        std::thread::sleep(MOMENT);
        assert!(still().is_some(), "{:?}", shown(&fixture));
        fixture.is_there(true);
        let guest = boots.join().unwrap();
        let vm = shown(&fixture).unwrap();
        assert_eq!(vm["state"], "running", "{vm}");
        assert_eq!(vm["problem"], Value::Null, "{vm}");
        let finished = guest.end(fixture.a()).unwrap();
        assert_eq!((finished.errors, finished.mismatches), (0, 0));
    });
    fixture.cluster.node_mut("a").terminate(PATIENCE).unwrap();
}

#[test]
fn a_machine_sees_an_error_where_that_was_chosen() {
    let turn = turn("a_machine_sees_an_error");
    let fixture = without_repository(&["--read-wait", "1s"], 64 * MIB);
    let disks = vec![DISK.to_owned()];
    let booted = NodeGuest::boot(&fixture.cluster, fixture.a(), disks, &load(&turn));
    let said = booted.expect_err("the guest cannot work").to_string();
    assert!(said.contains("I/O error"), "{said}");
}
