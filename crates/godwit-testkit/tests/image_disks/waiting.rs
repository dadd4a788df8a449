//! Machines whose guests read unavailable data: they stand still until the data comes, or see errors, as the node is
//! configured.

use std::io;
use std::time::Duration;

use godwit_testkit::scenario::{PATIENCE, says};
use godwit_testkit::vm::{GuestLoad, NodeGuest, VM, format_image};
use serde_json::Value;

use crate::fixture::{DISK, Fixture, MIB};

/// Time in which a guest that must stand still would go on.
const MOMENT: Duration = Duration::from_secs(4);

/// Creates a disk on an image with a file system, with nothing fetched, and takes the repository away.
fn without_repository(options: &[&str], size: u64) -> Fixture {
    let fixture = Fixture::start(&["a"], options);
    let path = fixture.cluster.dir().join("guest");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(size).unwrap();
    format_image(&path).unwrap();
    fixture.push(&path, &[]);
    fixture.create(&["--prefetch", "off"]);
    fixture.is_there(false);
    fixture
}

/// Boots the guest on the disk.
fn boot(fixture: &Fixture) -> io::Result<NodeGuest> {
    let load = GuestLoad {
        file_mb: 8,
        ..GuestLoad::seeded(fixture.turn.seed)
    };
    NodeGuest::boot(&fixture.cluster, fixture.a(), vec![DISK.to_owned()], &load)
}

#[test]
fn a_machine_stands_still_while_what_it_reads_cannot_be_had_and_goes_on_by_itself() {
    let mut fixture = without_repository(
        &["--read-wait", "2s", "--read-wait-then", "pause"],
        64 * MIB,
    );
    std::thread::scope(|scope| {
        let boots = scope.spawn(|| boot(&fixture).unwrap());
        let a = fixture.a();
        a.vm_comes_to(VM, "paused");
        let problem = a.vm(VM)["problem"].to_string();
        println!("{problem}");
        says(
            &problem,
            &["a part of disk d that it reads is not here and cannot be had now"],
        );
        let status = fixture.disk()["status"].as_str().unwrap().to_owned();
        says(&status, &["reads of that wait"]);
        std::thread::sleep(MOMENT);
        assert_eq!(a.vm_state(VM), "paused");
        fixture.is_there(true);
        let guest = boots.join().unwrap();
        let vm = a.vm(VM);
        assert_eq!(vm["state"], "running", "{vm}");
        assert_eq!(vm["problem"], Value::Null, "{vm}");
        let finished = guest.end(a).unwrap();
        assert_eq!((finished.errors, finished.mismatches), (0, 0));
    });
    fixture.cluster.node_mut("a").terminate(PATIENCE).unwrap();
}

#[test]
fn a_machine_sees_an_error_where_that_was_chosen() {
    let fixture = without_repository(&["--read-wait", "1s"], 64 * MIB);
    let said = boot(&fixture)
        .expect_err("the guest cannot work")
        .to_string();
    says(&said, &["I/O error"]);
}
