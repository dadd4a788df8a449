//! Guests that reboot, panic or power off during a move: the next boot finds every acknowledged write, wherever the
//! machine is.

use std::time::Duration;

use godwit_testkit::random::Random;
use godwit_testkit::scenario::{PATIENCE, Scenario};
use godwit_testkit::vm::GuestLoad;

use super::site::{Side, Site};
use super::{COMPLETING, COPYING_DISKS, Moment};

/// An emulated processor of a busy host boots in a third of this.
const BOOTS: Duration = Duration::from_secs(120);
/// Approximate duration of an undisturbed move.
const MOVE: Duration = Duration::from_secs(5);

/// Slow enough for the guest to end the boot meanwhile, and fast enough to overtake a booting guest.
const MEMORY: Moment = super::MEMORY.with(&["--max-bandwidth", "64MiB"]);
/// The guest runs at the destination and pulls memory and disks.
const PULLING: Moment = Moment {
    phase: "pulling",
    ..COMPLETING.with(&[
        "--memory",
        "post-copy",
        "--policy",
        "post-copy",
        "--max-bandwidth",
        "16MiB",
    ])
};

fn site(seed: u64) -> Site {
    let load = GuestLoad {
        rate: 0,
        file_mb: 4,
        memory_mb: 8,
        reboots: true,
        ..GuestLoad::default()
    };
    Site::with_guest(seed, 2, load)
}

impl Site {
    /// Ends the guest's boot in this way, waits for the next boot, and checks for missing writes.
    fn reboots(&mut self, how: &str) {
        let boots = self.guest.console.end_boot(how, PATIENCE).unwrap();
        self.guest.console.booted_again(boots, BOOTS).unwrap();
        self.survived();
        assert_eq!(self.guest.console.lost_writes(), 0, "after {how}");
    }
}

#[test]
fn a_guest_that_reboots_or_panics_in_a_step_of_its_move_misses_no_write() {
    let turn = Scenario::shared();
    let mut site = site(turn.seed);
    for (moment, how) in [
        (&COPYING_DISKS, "reboot"),
        (&MEMORY, "panic"),
        (&COMPLETING, "reboot"),
        (&PULLING, "panic"),
    ] {
        println!(
            "{how} while {}, at {}",
            moment.phase,
            site.place(Side::Source)
        );
        site.move_up_to(moment.hold, moment.options);
        site.reboots(how);
    }
    site.moves();
    site.finish();
}

/// A request in flight at the reset of a device gets no answer, as on hardware. The disk must have the acknowledged
/// writes.
#[test]
#[ignore = "takes minutes: make test-slow ONLY=endings"]
fn a_guest_that_reboots_at_any_moment_of_its_move_misses_no_write() {
    let turn = Scenario::shared();
    let mut random = Random::new(turn.seed);
    let mut site = site(turn.seed);
    for how in ["reboot", "panic"].repeat(5) {
        let after = MOVE.mul_f64(random.below(1000) as f64 / 1000.0);
        println!("{how} {after:?} after the move began");
        site.start_move(&[]);
        std::thread::sleep(after);
        site.reboots(how);
    }
    site.moves();
    site.finish();
}

#[test]
fn a_guest_that_powers_off_while_it_moves_is_off_at_one_node_with_all_that_it_wrote() {
    let turn = Scenario::shared();
    let mut site = site(turn.seed);
    for moment in [&MEMORY, &COMPLETING] {
        println!("power off while {}", moment.phase);
        site.move_up_to(moment.hold, moment.options);
        site.guest.console.end_boot("power-off", PATIENCE).unwrap();
        let owner = if std::ptr::eq(moment, &COMPLETING) {
            Side::Destination
        } else {
            Side::Source
        };
        let owner = site.place(owner);
        let written = site.guest.console.written();
        site.crashed(owner);
        site.boot_again(owner);
        let found = site.guest.console.resumed();
        let all = written
            .iter()
            .zip(&found)
            .all(|(written, found)| found >= written);
        assert!(
            all && found.len() == written.len(),
            "{written:?}, {found:?}"
        );
    }
    site.moves();
    site.finish();
}
