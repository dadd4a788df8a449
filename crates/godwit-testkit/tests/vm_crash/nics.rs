//! The same deaths under a machine with a NIC. A client's TCP conversation, of which every byte is checked, goes on
//! through all of them as long as the guest does. While the nodes live, no ping is lost or answered twice.
//!
//! Both nodes live in one network namespace, where a bridge joins their taps and the client.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use godwit_testkit::network::{Lan, Pinger, Talk};
use godwit_testkit::process::wait_for;
use godwit_testkit::random::Random;
use godwit_testkit::scenario::Scenario;
use godwit_testkit::vm::{GuestLoad, GuestNetwork, VM};
use nix::sys::ptrace;
use nix::sys::wait::{WaitPidFlag, waitpid};

use super::site::{Side, Site};
use super::{
    AWAY, Blow, DESTINATION_DIES, DESTINATIONS_QEMU_DIES, LINK_IS_CUT, MEMORY, Outcome, SETTLE,
    SOURCE_DIES, SOURCES_QEMU_DIES,
};

const GUEST: Ipv4Addr = Ipv4Addr::new(10, 80, 0, 10);
const ECHO: u16 = 7000;
/// Rate of the conversation with the guest: little enough for an emulated processor of a busy host.
const BYTES_PER_SECOND: u64 = 256 << 10;
const PING_EVERY: Duration = Duration::from_millis(5);
/// Longest duration of a move on an idle host.
const MOVE: Duration = Duration::from_secs(6);
/// Time for which QEMU's main loop is held when a node dies: longer than the migration waits between two writes.
const UNSEEN: Duration = Duration::from_millis(500);
/// After an outage TCP itself tries again late.
const TALKS_AGAIN: Duration = Duration::from_secs(90);

/// The site, and the client that talks to the guest.
struct Served {
    site: Site,
    talk: Talk,
    lan: Lan,
    /// Dropped last: the next test begins after this site has ended.
    turn: Scenario,
}

impl Served {
    /// Starts the site; without root prints a note and returns `None`.
    fn new() -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: network namespaces need root");
            return None;
        }
        let turn = Scenario::shared();
        let seed = turn.seed;
        let lan = Lan::new(0).unwrap();
        lan.add_card().unwrap();
        lan.switch().enter().unwrap();
        let load = GuestLoad {
            file_mb: 16,
            seed,
            network: Some(GuestNetwork {
                nic: format!("bridge={}", Lan::BRIDGE),
                address: format!("{GUEST}/24"),
                echo_port: ECHO,
                ..GuestNetwork::default()
            }),
            ..GuestLoad::default()
        };
        let site = Site::with_guest(seed, 1, load);
        let served = Self {
            talk: talk(&lan),
            turn,
            site,
            lan,
        };
        served.talks();
        Some(served)
    }

    /// Expects the conversation to go on.
    fn talks(&self) {
        let before = self.talk.bytes();
        let goes_on = || (self.talk.bytes() > before).then_some(());
        assert!(
            wait_for(TALKS_AGAIN, goes_on).is_some(),
            "the conversation stands still at {before} bytes; it has ended: {}",
            self.talk.has_ended()
        );
    }

    fn blow(&mut self, (moment, victim, outcome): Blow) {
        self.site.blow(moment, victim, outcome);
        if matches!(outcome, Outcome::Crashes(_)) {
            // The guest of the old conversation is gone.
            self.talk = talk(&self.lan);
        }
        self.talks();
    }

    /// Kills the node under the guest, and starts the node again.
    fn node_dies(&mut self, away: Duration) {
        let at = self.site.place(Side::Source);
        self.site.cluster.node_mut(at).kill();
        std::thread::sleep(away);
        self.site.start_node(at);
        assert_eq!(self.site.survived(), at);
        self.talks();
        let nic = self.site.cluster.node(at).godwit(&["nic", "show", NIC]);
        let nic = nic.json().unwrap();
        assert!(nic["attached"] == true && nic["broken"] == false, "{nic}");
    }

    /// Kills the node while the memory moves and QEMU's main loop is held: the migration has failed before the main
    /// loop sees the loss of the NIC's back end. Returns false if holding a thread is not permitted.
    fn node_dies_unseen(&mut self) -> bool {
        let at = self.site.move_up_to(MEMORY.hold, MEMORY.options);
        std::thread::sleep(SETTLE);
        let qemu = self.site.pid(at);
        // The main thread has the process id of the whole process.
        let main_loop = nix::unistd::Pid::from_raw(qemu.as_raw_pid());
        if let Err(error) = ptrace::seize(main_loop, ptrace::Options::empty()) {
            eprintln!("skipped: cannot hold a thread of QEMU: {error}");
            return false;
        }
        ptrace::interrupt(main_loop).unwrap();
        waitpid(main_loop, Some(WaitPidFlag::__WALL)).unwrap();
        self.site.cluster.node_mut(at).kill();
        std::thread::sleep(UNSEEN);
        ptrace::detach(main_loop, None).unwrap();
        std::thread::sleep(AWAY);
        self.site.start_node(at);
        assert_eq!(self.site.survived(), at);
        assert_eq!(self.site.pid(at), qemu, "another QEMU runs the guest");
        self.talks();
        true
    }

    /// Begins a move, cancels it after a while, and checks that no ping was lost in either case. Returns false if the
    /// cancel came too late.
    fn cancel_after(&mut self, wait: Duration) -> bool {
        let pinger = Pinger::start(self.lan.switch(), GUEST, PING_EVERY).unwrap();
        let from = self.site.place(Side::Source);
        let id = self.site.start_move(&[]);
        std::thread::sleep(wait);
        let cancelled = self
            .site
            .cluster
            .node(from)
            .godwit(&["migration", "cancel", &id])
            .json();
        let at = self.site.survived();
        println!(
            "  cancelled after {wait:?}: {}, it is at {at}",
            cancelled.is_ok()
        );
        assert_eq!(cancelled.is_ok(), at == from, "{cancelled:?}");
        self.talks();
        let pings = pinger.finish(Duration::from_secs(10)).unwrap();
        let lost = pings.iter().filter(|ping| ping.answers == 0).count();
        let twice = pings.iter().filter(|ping| ping.answers > 1).count();
        assert_eq!((lost, twice), (0, 0), "of {} pings", pings.len());
        cancelled.is_ok()
    }

    fn finish(self) {
        let talked = self.talk.finish().unwrap();
        println!("{talked:?}");
        assert!(!talked.reset && talked.wrong == 0, "{talked:?}");
        self.site.finish();
    }
}

/// The only NIC of the machine.
const NIC: &str = "guest/0";

fn talk(lan: &Lan) -> Talk {
    assert!(NIC.starts_with(VM));
    Talk::start(
        lan.switch(),
        SocketAddr::from((GUEST, ECHO)),
        BYTES_PER_SECOND,
    )
}

fn blows(all: &[Blow]) {
    let Some(mut served) = Served::new() else {
        return;
    };
    for blow in all {
        served.blow(*blow);
    }
    served.site.moves();
    served.talks();
    served.finish();
}

#[test]
#[ignore = "takes minutes: make test-slow ONLY=nics::"]
fn a_conversation_goes_on_when_the_source_dies() {
    blows(SOURCE_DIES);
}

#[test]
#[ignore = "takes minutes: make test-slow ONLY=nics::"]
fn a_conversation_goes_on_when_the_destination_dies() {
    blows(DESTINATION_DIES);
}

#[test]
#[ignore = "takes minutes: make test-slow ONLY=nics::"]
fn a_conversation_goes_on_when_the_nodes_lose_each_other() {
    blows(LINK_IS_CUT);
}

#[test]
#[ignore = "takes minutes: make test-slow ONLY=nics::"]
fn a_new_conversation_begins_when_the_sources_qemu_dies_and_an_old_one_goes_on_where_it_can() {
    blows(SOURCES_QEMU_DIES);
}

#[test]
#[ignore = "takes minutes: make test-slow ONLY=nics::"]
fn a_new_conversation_begins_when_the_destinations_qemu_dies_and_an_old_one_goes_on_where_it_can() {
    blows(DESTINATIONS_QEMU_DIES);
}

#[test]
#[ignore = "takes minutes: make test-slow ONLY=nics::"]
fn no_ping_is_lost_whenever_a_move_is_cancelled() {
    let Some(mut served) = Served::new() else {
        return;
    };
    let mut random = Random::new(served.turn.seed);
    let mut longest = MOVE;
    let mut cancelled = 0;
    for _ in 0..10 {
        let wait = Duration::from_millis(random.below(longest.as_millis() as u64));
        if served.cancel_after(wait) {
            cancelled += 1;
        } else {
            // A move is over by then.
            longest = wait;
        }
    }
    assert!(cancelled > 0, "all were too late");
    served.finish();
}

#[test]
#[ignore = "takes minutes: make test-slow ONLY=nics::"]
fn a_conversation_waits_for_a_node_that_dies_again_and_again_under_the_guest() {
    let Some(mut served) = Served::new() else {
        return;
    };
    for away in [0, 50, 300, 1500, 0] {
        served.node_dies(Duration::from_millis(away));
    }
    served.site.moves();
    served.talks();
    served.finish();
}

#[test]
fn a_conversation_outlives_a_node_that_dies_while_qemu_sends_memory_and_looks_away() {
    let Some(mut served) = Served::new() else {
        return;
    };
    if served.node_dies_unseen() {
        served.site.moves();
        served.talks();
    }
    served.finish();
}

/// A few of all blows above, others with each seed.
#[test]
fn a_conversation_goes_on_whatever_dies_but_the_guest() {
    let Some(mut served) = Served::new() else {
        return;
    };
    let mut random = Random::new(served.turn.seed);
    for list in [SOURCE_DIES, DESTINATION_DIES] {
        served.blow(list[random.below(list.len() as u64) as usize]);
    }
    served.cancel_after(Duration::from_millis(random.below(MOVE.as_millis() as u64)));
    served.node_dies(AWAY);
    served.finish();
}
