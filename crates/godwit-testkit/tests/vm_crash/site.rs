//! Two nodes, the link between them, and a guest.

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use godwit_testkit::Cluster;
use godwit_testkit::cluster::MemoryPool;
use godwit_testkit::process::{cpu_seconds, end_machines_of, machines_in, run, wait_for};
use godwit_testkit::proxy::{Conditions, Proxy};
use godwit_testkit::scenario::{PATIENCE, one_owner, other, until};
use godwit_testkit::vm::{DirtyPages, GuestLoad, NodeGuest, NodeMachine, PointerChase, VM};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

const DISK_MIB: u64 = 64;
/// Time for which a state must last to count.
const QUIET: Duration = Duration::from_millis(300);

/// An end of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Source,
    Destination,
}

pub(crate) struct Site {
    pub(crate) cluster: Cluster,
    pub(crate) guest: NodeGuest,
    links: Vec<Proxy>,
    load: GuestLoad,
    machine: NodeMachine,
    /// The pool of the guest's memory; dropped after the nodes.
    pub(crate) pool: Option<MemoryPool>,
    /// The guest's node.
    at: &'static str,
    /// The fail points with which the nodes run.
    points: HashMap<&'static str, (&'static str, &'static str)>,
}

impl Site {
    pub(crate) fn new(seed: u64, disks: usize) -> Self {
        Self::with_load(seed, disks, GuestLoad::default().rate)
    }

    /// Starts a guest with `rate` block writes a second; 0 for no limit.
    pub(crate) fn with_load(seed: u64, disks: usize, rate: u64) -> Self {
        let load = GuestLoad {
            rate,
            file_mb: 16,
            seed,
            ..GuestLoad::default()
        };
        Self::with_guest(seed, disks, load)
    }

    /// Starts a guest with this load.
    pub(crate) fn with_guest(seed: u64, disks: usize, load: GuestLoad) -> Self {
        Self::with(GuestLoad { seed, ..load }, disks, None)
    }

    /// Starts a guest with its memory in a pool mapped by both nodes, and with all loads on memory.
    pub(crate) fn pooled(seed: u64) -> Self {
        let load = GuestLoad {
            file_mb: 16,
            seed,
            memory_mb: 16,
            memory_rate_mb: 16,
            pointer_chase: PointerChase {
                mib: 16,
                percent: 10,
            },
            dirty_pages: DirtyPages {
                mib: 16,
                rate_mib: 16,
            },
            ..GuestLoad::default()
        };
        Self::with(load, 2, Some(MemoryPool::asked_for().unwrap()))
    }

    fn with(load: GuestLoad, disks: usize, pool: Option<MemoryPool>) -> Self {
        let (mut cluster, links) = Cluster::prepare_linked(load.seed).unwrap();
        if let Some(pool) = &pool {
            pool.give_to(&mut cluster);
        }
        cluster.start_all().unwrap();
        let machine = NodeMachine {
            memory_pool: pool.is_some().then(|| MemoryPool::NAME.to_owned()),
            ..NodeMachine::default()
        };
        let guest = NodeGuest::start_machine(&cluster, "a", (disks, DISK_MIB), &load, &machine);
        if guest.is_err() {
            end_machines_of(cluster.dir());
        }
        Self {
            guest: guest.unwrap(),
            cluster,
            links,
            load,
            machine,
            pool,
            at: "a",
            points: HashMap::new(),
        }
    }

    /// Returns the node at this end of the next move.
    pub(crate) fn place(&self, side: Side) -> &'static str {
        match (side, self.at) {
            (Side::Source, at) => at,
            (Side::Destination, "a") => "b",
            (Side::Destination, _) => "a",
        }
    }

    /// Lets the node run with this fail point, the other without any.
    pub(crate) fn set_point(&mut self, name: &'static str, point: (&'static str, &'static str)) {
        for node in ["a", "b"] {
            let wanted = (node == name).then_some(point);
            if self.points.get(node).copied() != wanted {
                self.cluster.node_mut(node).terminate(PATIENCE).unwrap();
                let list: Vec<_> = wanted.into_iter().collect();
                self.cluster.node_mut(node).start(&list).unwrap();
                self.points.remove(node);
                self.points.extend(wanted.map(|point| (node, point)));
            }
        }
    }

    /// Starts a killed node.
    pub(crate) fn start_node(&mut self, name: &'static str) {
        self.cluster.node_mut(name).start(&[]).unwrap();
        self.points.remove(name);
    }

    pub(crate) fn log_length(&self, node: &str) -> usize {
        std::fs::read(self.cluster.node(node).log_path()).map_or(0, |log| log.len())
    }

    pub(crate) fn log_since(&self, node: &str, seen: usize) -> String {
        let log = std::fs::read(self.cluster.node(node).log_path()).unwrap();
        String::from_utf8_lossy(&log[seen..]).into_owned()
    }

    /// Waits until the node has come to a fail point.
    pub(crate) fn reached(&self, node: &str, seen: usize, point: &str) {
        let found = || self.log_since(node, seen).contains(point).then_some(());
        assert!(
            wait_for(PATIENCE, found).is_some(),
            "'{node}' does not come to {point}: {}",
            self.log_since(node, seen)
        );
    }

    /// Begins a move and waits until the node at a side has come to a fail point. Returns the node.
    pub(crate) fn move_up_to(
        &mut self,
        hold: (Side, &'static str, &'static str),
        options: &[&str],
    ) -> &'static str {
        let (side, point, action) = hold;
        let held = self.place(side);
        self.set_point(held, (point, action));
        let seen = self.log_length(held);
        self.start_move(options);
        self.reached(held, seen, point);
        held
    }

    /// Begins a move; returns the id.
    pub(crate) fn start_move(&self, options: &[&str]) -> String {
        let options = [&["--detach"], options].concat();
        let (from, to) = (self.place(Side::Source), self.place(Side::Destination));
        let moving = self
            .guest
            .try_migrate(self.cluster.node(from), to, &options)
            .unwrap();
        moving["id"].as_str().expect("an id").to_owned()
    }

    /// Makes a move without a disturbance.
    pub(crate) fn moves(&mut self) {
        let to = self.place(Side::Destination);
        let from = self.cluster.node(self.at);
        let moved = self.guest.try_migrate(from, to, &[]).unwrap();
        assert_eq!(moved["phase"], "completed", "{moved}");
        assert_eq!(self.survived(), to);
    }

    /// Ends the guest, and expects no errors there and on the file systems.
    pub(crate) fn finish(self) {
        let finished = self.guest.finish(self.cluster.node(self.at)).unwrap();
        println!("{finished:?}");
        assert_eq!(self.guest.console.repeated(), 0);
    }

    pub(crate) fn cut(&self) {
        for link in &self.links {
            link.set(Conditions::REFUSING);
            link.cut();
        }
    }

    /// Stops all traffic without notice to either side.
    pub(crate) fn fall_silent(&self) {
        for link in &self.links {
            link.set(Conditions::STALLED);
        }
    }

    pub(crate) fn heal(&self) {
        self.links.iter().for_each(Proxy::heal);
    }

    fn shown(&self, node: &str) -> Value {
        self.cluster.node(node).vm(VM)
    }

    /// Returns the process of the node's QEMU; the destination's QEMU starts while the disks are copied.
    pub(crate) fn pid(&self, node: &str) -> Pid {
        self.cluster.node(node).qemu()
    }

    pub(crate) fn kill_qemu(&self, node: &str) {
        send(self.pid(node), Signal::KILL);
    }

    /// Returns the state at both nodes, destination first: a moving machine is never seen to run twice.
    fn states(&self) -> [(&'static str, Value); 2] {
        [Side::Destination, Side::Source].map(|side| {
            let name = self.place(side);
            (name, self.shown(name))
        })
    }

    /// Waits until the guest runs at one node, works, and has left nothing at the other; returns the node.
    pub(crate) fn survived(&mut self) -> &'static str {
        let started = Instant::now();
        let settled = || {
            let states = self.states();
            let running = |(_, shown): &&(&'static str, Value)| shown["state"] == "running";
            let running: Vec<_> = states.iter().filter(running).collect();
            assert!(running.len() < 2, "it runs twice: {states:?}");
            let [(at, shown)] = running[..] else {
                return None;
            };
            let over = shown["migration"].is_null();
            let gone = |(name, shown): &(&'static str, Value)| name == at || nothing_left(shown);
            (over && states.iter().all(gone)).then_some(*at)
        };
        let at = wait_for(PATIENCE, settled);
        let at = at.unwrap_or_else(|| panic!("it does not run once: {:?}", self.states()));
        until("one QEMU is left", || {
            machines_in(self.cluster.dir()).len() == 1
        });
        self.pid(at);
        for disk in self.guest.disks() {
            assert_eq!(one_owner(&self.cluster, disk).unwrap(), at, "{disk}");
        }
        self.lives(at);
        println!("  it runs at {at} after {:?}", started.elapsed());
        self.at = at;
        at
    }

    /// Waits for signs of life; without them, prints possible obstacles of the guest.
    fn lives(&self, at: &str) {
        let Err(error) = self.guest.alive() else {
            return;
        };
        for disk in self.guest.disks() {
            println!("at {at}: {:?}", self.cluster.node(at).disk(disk));
        }
        println!("at {at}: {}", self.shown(at));
        let pid = self.pid(at).as_raw_pid() as u32;
        let used = [cpu_seconds(pid), {
            std::thread::sleep(Duration::from_secs(1));
            cpu_seconds(pid)
        }];
        panic!("{error}; CPU seconds of its QEMU, then and a second later: {used:?}");
    }

    /// Waits until the guest runs nowhere and the disks are this node's, whole but for repairs by the journal.
    pub(crate) fn crashed(&mut self, owner: &'static str) {
        let other = other(owner);
        let settled = || {
            let (here, there) = (self.shown(owner), self.shown(other));
            let over = here["state"] == "stopped" && here["migration"].is_null();
            (over && nothing_left(&there) && machines_in(self.cluster.dir()).is_empty())
                .then_some(())
        };
        assert!(
            wait_for(PATIENCE, settled).is_some(),
            "it crashed at {owner}: {:?}; QEMUs {:?}",
            self.states(),
            machines_in(self.cluster.dir())
        );
        std::thread::sleep(QUIET);
        for disk in self.guest.disks() {
            assert_eq!(one_owner(&self.cluster, disk).unwrap(), owner, "{disk}");
            replay(&self.cluster.node(owner).image(disk).unwrap());
        }
        self.at = owner;
    }

    /// Starts the guest anew at the node of the disks.
    pub(crate) fn boot_again(&mut self, owner: &'static str) {
        let node = self.cluster.node(owner);
        node.stop_vm(VM);
        let disks = self.guest.disks().to_vec();
        let booted = NodeGuest::boot_machine(&self.cluster, node, disks, &self.load, &self.machine);
        self.guest = booted.unwrap();
        assert_eq!(self.survived(), owner);
    }
}

/// Returns true if a node with this description of the machine has no part in the machine any more.
fn nothing_left(shown: &Value) -> bool {
    shown.is_null() || (shown["state"] == "departed" && shown["migration"].is_null())
}

pub(crate) fn send(process: Pid, signal: Signal) {
    // The process may have ended by itself.
    let _ = kill_process(process, signal);
}

/// Does the work of the next boot on a copy: replays the journal, and then finds nothing wrong.
fn replay(image: &Path) {
    let copy = image.with_extension("copy");
    run(Command::new("cp")
        .arg("--sparse=always")
        .arg(image)
        .arg(&copy))
    .unwrap();
    // e2fsck returns 1 for a replayed journal, and 4 and more for errors left uncorrected.
    let mut e2fsck = Command::new("/usr/sbin/e2fsck");
    let output = e2fsck.arg("-p").arg(&copy).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(matches!(output.status.code(), Some(0 | 1)), "{said}");
    godwit_testkit::vm::check_disk(&copy).unwrap();
    std::fs::remove_file(copy).unwrap();
}
