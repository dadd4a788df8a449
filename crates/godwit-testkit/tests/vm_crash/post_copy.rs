//! Deaths during the switchover of a guest with post-copy. Until the disks are given away the guest goes on at the
//! source, afterwards at the destination, although the source's QEMU has sent the devices away in between.

use godwit_testkit::scenario::Scenario;

use super::site::{Side, Site};
use super::{DESTINATION, DESTINATION_QEMU, Moment, Outcome, SOURCE, SOURCE_QEMU, Victim};

/// A rate at which the rest of the memory takes some seconds.
const OPTIONS: &[&str] = &["--memory", "post-copy", "--max-bandwidth", "32MiB"];

/// QEMU has not sent the devices.
const STOPPED: Moment = super::STOPPED.with(OPTIONS);
const ACCEPTING: Moment = super::ACCEPTING.with(OPTIONS);
const GIVING: Moment = super::GIVING.with(OPTIONS);
const GIVEN: Moment = super::GIVEN.with(OPTIONS);
const BEFORE_RUN: Moment = super::BEFORE_RUN.with(OPTIONS);
const LOADED: Moment = super::LOADED.with(OPTIONS);

impl Site {
    /// Starts a guest anew whose QEMU had sent the devices away and cannot move the guest again.
    fn unbind(&mut self, after: After) {
        let to = self.place(Side::Destination);
        let from = self.cluster.node(self.place(Side::Source));
        match self.guest.try_migrate(from, to, &[]) {
            Err(refused) => {
                assert!(refused.text.contains("run it anew"), "{refused}");
                self.boot_again(self.place(Side::Source));
            }
            Ok(moved) => {
                assert_eq!(after, Either, "{moved}");
                assert_eq!(self.survived(), to);
            }
        }
    }
}

/// The ability of QEMU to move a guest that stayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum After {
    Free,
    Bound,
    /// Depends on whether QEMU had sent anything before it noticed.
    Either,
}
use After::{Bound, Either, Free};

fn blows(all: &[(&Moment, Victim, Outcome, After)]) {
    let turn = Scenario::shared();
    let mut site = Site::new(turn.seed, 2);
    for (moment, victim, outcome, after) in all {
        let from = site.place(Side::Source);
        site.blow(moment, *victim, *outcome);
        if *after != Free && site.place(Side::Source) == from {
            site.unbind(*after);
        }
    }
    site.moves();
    site.finish();
}

#[test]
#[ignore = "takes minutes: make test-slow ONLY=zero_copy"]
fn a_guest_whose_devices_are_sent_survives_the_link() {
    blows(&[
        (&STOPPED, Victim::Link, Outcome::Stays, Either),
        (&LOADED, Victim::Link, Outcome::Stays, Bound),
        (&ACCEPTING, Victim::Link, Outcome::Survives, Bound),
        (&GIVING, Victim::Link, Outcome::Moves, Free),
        (&GIVEN, Victim::Link, Outcome::Moves, Free),
        (&BEFORE_RUN, Victim::Link, Outcome::Moves, Free),
    ]);
}

#[test]
#[ignore = "takes minutes: make test-slow ONLY=zero_copy"]
fn a_guest_whose_devices_are_sent_survives_the_sources_node() {
    blows(&[
        // QEMU notices the lost connection before sending anything.
        (&STOPPED, SOURCE, Outcome::Stays, Free),
        (&LOADED, SOURCE, Outcome::Stays, Bound),
        (&GIVING, SOURCE, Outcome::Stays, Bound),
        (&GIVEN, SOURCE, Outcome::Moves, Free),
        (&BEFORE_RUN, SOURCE, Outcome::Moves, Free),
    ]);
}

#[test]
#[ignore = "takes minutes: make test-slow ONLY=zero_copy"]
fn a_guest_whose_devices_are_sent_survives_the_destinations_node() {
    blows(&[
        (&STOPPED, DESTINATION, Outcome::Stays, Either),
        (&LOADED, DESTINATION, Outcome::Stays, Bound),
        (&ACCEPTING, DESTINATION, Outcome::Stays, Bound),
        // Nothing takes back the record that the source is about to store.
        (&GIVING, DESTINATION, Outcome::Moves, Free),
        (&BEFORE_RUN, DESTINATION, Outcome::Moves, Free),
    ]);
}

#[test]
fn a_guest_whose_devices_are_sent_survives_the_destinations_qemu() {
    let crashes = Outcome::Crashes(Side::Source);
    blows(&[
        (&STOPPED, DESTINATION_QEMU, Outcome::Stays, Either),
        (&LOADED, DESTINATION_QEMU, Outcome::Stays, Bound),
        (&ACCEPTING, DESTINATION_QEMU, Outcome::Stays, Bound),
        // This QEMU is the guest's only home.
        (&LOADED, SOURCE_QEMU, crashes, Free),
    ]);
}
