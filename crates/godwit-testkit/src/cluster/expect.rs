//! What a test expects of a node: a node that does otherwise ends the test.

use std::time::Duration;

use rustix::process::Pid;
use serde_json::Value;

use super::{Cluster, Node};
use crate::nbd::NbdConnection;
use crate::process::{machines_in, wait_for};
use crate::scenario::{PATIENCE, says, until};

impl Node {
    /// Runs a command, and returns its answer.
    #[track_caller]
    pub fn json(&self, args: &[&str]) -> Value {
        let answer = self.godwit(args).json();
        answer.unwrap_or_else(|failure| panic!("{failure}"))
    }

    /// Runs a command, and returns its output for people.
    #[track_caller]
    pub fn text(&self, args: &[&str]) -> String {
        let output = self.godwit(args).text();
        output.unwrap_or_else(|failure| panic!("{failure}"))
    }

    /// Returns the message with which a command is refused.
    #[track_caller]
    pub fn refusal(&self, args: &[&str]) -> String {
        match self.godwit(args).text() {
            Err(refused) => refused.to_string(),
            Ok(done) => panic!("{args:?} is done: {done}"),
        }
    }

    /// Expects a command to be refused with all of these words. Returns the message.
    #[track_caller]
    pub fn refuses(&self, args: &[&str], words: &[&str]) -> String {
        let refusal = self.refusal(args);
        says(&refusal, words);
        refusal
    }

    /// Creates an empty disk.
    #[track_caller]
    pub fn create_disk(&self, disk: &str, size: &str) -> Value {
        self.json(&["disk", "create", disk, "--size", size])
    }

    /// Attaches a client to the disk.
    #[track_caller]
    pub fn connect(&self, disk: &str) -> NbdConnection {
        NbdConnection::connect(&self.nbd(disk)).expect("a client attaches")
    }

    /// Waits until the disk has this state.
    #[track_caller]
    pub fn disk_comes_to(&self, disk: &str, state: &str) {
        let reached = || (self.disk_state(disk) == state).then_some(());
        let reached = wait_for(PATIENCE, reached);
        reached.unwrap_or_else(|| panic!("not {state}: {:?}", self.disk(disk)));
    }

    /// Runs a machine of 64 MiB without an operating system, with these options of `godwit vm run` and, behind `--`,
    /// of QEMU.
    #[track_caller]
    pub fn run_vm(&self, vm: &str, options: &[&str], qemu: &[&str]) -> Value {
        let run = ["vm", "run", vm, "--accel", "tcg", "--memory", "64M"];
        self.json(&[&run[..], options, &["--", "-nic", "none"], qemu].concat())
    }

    /// Creates a disk of 16 MiB, and runs such a machine with it.
    #[track_caller]
    pub fn run_vm_on(&self, vm: &str, disk: &str, qemu: &[&str]) -> Value {
        self.create_disk(disk, "16MiB");
        self.run_vm(vm, &["--disk", disk], qemu)
    }

    /// Ends a machine at once.
    #[track_caller]
    pub fn stop_vm(&self, vm: &str) {
        self.text(&["vm", "stop", vm, "--force"]);
    }

    /// Returns the node's description of a machine; null if the node does not know the machine.
    pub fn vm(&self, vm: &str) -> Value {
        let shown = self.godwit(&["vm", "show", vm]).json();
        shown.unwrap_or_default()
    }

    /// Returns the machine's state as the API spells it; "unknown" if the node has no such machine.
    pub fn vm_state(&self, vm: &str) -> String {
        let shown = self.vm(vm);
        shown["state"].as_str().unwrap_or("unknown").to_owned()
    }

    /// Waits until the machine has this state.
    #[track_caller]
    pub fn vm_comes_to(&self, vm: &str, state: &str) {
        let reached = || (self.vm_state(vm) == state).then_some(());
        let reached = wait_for(PATIENCE, reached);
        reached.unwrap_or_else(|| panic!("{vm} is not {state}: {}", self.vm(vm)));
    }

    /// Returns the processes of the node's QEMUs.
    pub fn qemus(&self) -> Vec<Pid> {
        machines_in(&self.spec().dir)
    }

    /// Waits until the node has one QEMU.
    #[track_caller]
    pub fn qemu(&self) -> Pid {
        let only = || <[Pid; 1]>::try_from(self.qemus()).ok();
        let only = wait_for(PATIENCE, only);
        only.unwrap_or_else(|| panic!("not one QEMU at {}", self.name()))[0]
    }

    /// Begins to move a machine; returns the move's id.
    #[track_caller]
    pub fn start_vm_move(&self, vm: &str, to: &str) -> String {
        let vm = format!("vm/{vm}");
        let moving = self.json(&["migrate", &vm, "--to", to, "--detach"]);
        moving["id"].as_str().expect("an id").to_owned()
    }

    /// Waits until the log has this text, such as a fail point's name.
    #[track_caller]
    pub fn reaches(&self, text: &str) {
        until(&format!("{} logs {text}", self.name()), || {
            self.log().contains(text)
        });
    }

    /// Ends the node in order, and starts it with these fail points.
    #[track_caller]
    pub fn restart(&mut self, failpoints: &[(&str, &str)]) {
        self.terminate(PATIENCE).expect("the node ends");
        self.start(failpoints).expect("the node starts");
    }

    /// Kills the node, and starts it.
    #[track_caller]
    pub fn die_and_start(&mut self) {
        self.die_and_start_after(Duration::ZERO);
    }

    /// Kills the node, and starts it after a while.
    #[track_caller]
    pub fn die_and_start_after(&mut self, away: Duration) {
        self.kill();
        std::thread::sleep(away);
        self.start(&[]).expect("the node starts");
    }
}

impl Cluster {
    /// Ends a node in order, and starts it with these fail points.
    #[track_caller]
    pub fn restart(&mut self, node: &str, failpoints: &[(&str, &str)]) {
        self.node_mut(node).restart(failpoints);
    }

    /// Kills a node, and starts it.
    #[track_caller]
    pub fn die_and_start(&mut self, node: &str) {
        self.node_mut(node).die_and_start();
    }

    /// Starts nodes, of which `node` has a fail point from its start on.
    #[track_caller]
    pub fn start_held(mut self, node: &str, point: (&str, &str)) -> Self {
        for each in &mut self.nodes {
            let points: &[_] = if each.name() == node { &[point] } else { &[] };
            each.start(points).expect("the node starts");
        }
        self
    }

    /// Starts all prepared nodes.
    #[track_caller]
    pub fn started(mut self) -> Self {
        self.start_all().expect("the nodes start");
        self
    }
}
