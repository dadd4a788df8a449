//! The verifying guest on Godwit nodes: the machine runs on one of them and moves.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use super::{Finished, GuestConsole, GuestImage, GuestLoad, GuestNetwork, check_disk, format_disk};
use crate::cluster::{Cluster, Failure, Node};
use crate::process::wait_for;

/// The machine's name at the node.
pub const VM: &str = "guest";
/// Longest time for any action of a guest on an emulated CPU of a busy host.
pub(super) const PATIENCE: Duration = Duration::from_secs(120);
/// Writes by which a guest shows that it goes on.
const SIGN_OF_LIFE: u64 = 50;
const MIB: u64 = 1 << 20;
/// Disk of the guest with services.
const SERVICES: &str = "services";

/// The hardware of a guest's machine beside the disks.
#[derive(Clone, Debug)]
pub struct NodeMachine {
    pub memory_mib: u64,
    pub cpus: u32,
    /// The memory pool of the memory; `None` for local memory.
    pub memory_pool: Option<String>,
}

impl Default for NodeMachine {
    fn default() -> Self {
        Self {
            memory_mib: 192,
            cpus: 1,
            memory_pool: None,
        }
    }
}

/// A guest whose machine runs on a node of a cluster.
#[derive(Debug)]
pub struct NodeGuest {
    /// The guest's console, wherever the machine is.
    pub console: GuestConsole,
    disks: Vec<String>,
    /// True if the load writes cold memory first.
    has_cold: bool,
}

/// The cost of a move to the guest, in milliseconds.
#[derive(Clone, Copy, Debug)]
pub struct Gaps {
    /// The largest time between two of the guest's writes on the host's clock.
    pub host_ms: f64,
    /// The same by the guest's own clock, which stands still with the machine.
    pub guest_ms: f64,
    /// The largest time between two of the guest's beats on the host's clock, for guests with a beat
    /// ([`GuestLoad::beat_ms`]).
    pub beat_ms: f64,
}

impl NodeGuest {
    /// Creates `disks` disks of `disk_mib` MiB at the node, runs the guest on them, and waits until the guest works.
    pub fn start(
        cluster: &Cluster,
        node: &str,
        disks: usize,
        disk_mib: u64,
        load: &GuestLoad,
    ) -> io::Result<Self> {
        let machine = NodeMachine::default();
        Self::start_machine(cluster, node, (disks, disk_mib), load, &machine)
    }

    /// Does the same as [`NodeGuest::start`] with the hardware of `machine`.
    pub fn start_machine(
        cluster: &Cluster,
        node: &str,
        (disks, disk_mib): (usize, u64),
        load: &GuestLoad,
        machine: &NodeMachine,
    ) -> io::Result<Self> {
        let node = cluster.node(node);
        let names = make_disks(cluster, node, disks, disk_mib)?;
        Self::boot_machine(cluster, node, names, load, machine)
    }

    /// Runs the guest on existing disks of the node, which a guest used before, and waits until the guest works.
    pub fn boot(
        cluster: &Cluster,
        node: &Node,
        disks: Vec<String>,
        load: &GuestLoad,
    ) -> io::Result<Self> {
        Self::boot_machine(cluster, node, disks, load, &NodeMachine::default())
    }

    /// Does the same as [`NodeGuest::boot`] with the hardware of `machine`.
    pub fn boot_machine(
        cluster: &Cluster,
        node: &Node,
        disks: Vec<String>,
        load: &GuestLoad,
        machine: &NodeMachine,
    ) -> io::Result<Self> {
        let image = GuestImage::build_or_cached()?;
        let guest = Self::run(cluster, node, disks, &image, load, machine)?;
        guest.alive()?;
        Ok(guest)
    }

    /// Runs the guest with services at the node, with its disk and this network, and waits until all services answer.
    /// The guest has no load, and knows no command of the console.
    pub fn start_services(
        cluster: &Cluster,
        node: &str,
        network: GuestNetwork,
    ) -> io::Result<Self> {
        let image = GuestImage::services()?;
        let node = cluster.node(node);
        let root = image.root();
        let import = ["disk", "import", SERVICES, &root.to_string_lossy()];
        node.godwit(&import).json()?;
        let load = GuestLoad {
            reboots: true,
            network: Some(network),
            ..GuestLoad::default()
        };
        let machine = NodeMachine {
            memory_mib: 256,
            ..NodeMachine::default()
        };
        let disks = vec![SERVICES.to_owned()];
        Self::run(cluster, node, disks, &image, &load, &machine)
    }

    /// Runs a guest and waits until the guest says that it has booted.
    fn run(
        cluster: &Cluster,
        node: &Node,
        disks: Vec<String>,
        image: &GuestImage,
        load: &GuestLoad,
        machine: &NodeMachine,
    ) -> io::Result<Self> {
        let (guest, socket) = Self::new(cluster, disks, load)?;
        let arguments = guest.arguments(image, &socket, load, machine);
        let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
        node.godwit(&words).json()?;
        guest.console.started(PATIENCE)?;
        Ok(guest)
    }

    /// Creates a guest without running it, and the socket for its console.
    pub(super) fn new(
        cluster: &Cluster,
        disks: Vec<String>,
        load: &GuestLoad,
    ) -> io::Result<(Self, PathBuf)> {
        let console = GuestConsole::new();
        let socket = cluster.dir().join("console.sock");
        // The socket of an earlier guest.
        let _ = std::fs::remove_file(&socket);
        console.listen(&socket)?;
        let has_cold = load.cold_mib > 0;
        let guest = Self {
            console,
            disks,
            has_cold,
        };
        Ok((guest, socket))
    }

    fn arguments(
        &self,
        image: &GuestImage,
        console: &Path,
        load: &GuestLoad,
        machine: &NodeMachine,
    ) -> Vec<String> {
        let memory = format!("{}MiB", machine.memory_mib);
        let cpus = machine.cpus.to_string();
        let mut words: Vec<String> = ["vm", "run", VM, "--memory", &memory, "--cpus", &cpus]
            .map(str::to_owned)
            .to_vec();
        let network = load.network.as_ref();
        if let Some(network) = network.filter(|network| !network.nic.is_empty()) {
            words.extend([String::from("--nic"), network.nic.clone()]);
        }
        words.extend(["--accel", "tcg"].map(str::to_owned));
        if let Some(pool) = &machine.memory_pool {
            words.extend([String::from("--memory-pool"), pool.clone()]);
        }
        if !self.disks.is_empty() {
            words.extend([String::from("--disk"), self.disks.join(",")]);
        }
        words.extend(["--", "-nodefaults", "-serial", "chardev:console"].map(str::to_owned));
        if !load.reboots {
            words.push(String::from("-no-reboot"));
        }
        let own_card = network.map_or("", |network| &network.own_card);
        words.extend(own_card.split_whitespace().map(str::to_owned));
        // Every machine of this guest connects here.
        let chardev = format!(
            "socket,id=console,reconnect-ms=100,path={}",
            console.display()
        );
        words.extend([String::from("-chardev"), chardev]);
        let path = |path: std::path::PathBuf| path.to_string_lossy().into_owned();
        words.extend([String::from("-kernel"), path(image.kernel())]);
        words.extend([String::from("-initrd"), path(image.initramfs())]);
        words.extend([
            String::from("-append"),
            load.kernel_arguments(self.disks.len()),
        ]);
        words
    }

    pub fn disks(&self) -> &[String] {
        &self.disks
    }

    /// Waits for signs of life.
    pub fn alive(&self) -> io::Result<()> {
        let report = self.console.progress(SIGN_OF_LIFE, PATIENCE)?;
        if report.errors + report.mismatches > 0 {
            return Err(self.said(&format!("the guest complains: {report:?}")));
        }
        match self.console.repeated() {
            0 => Ok(()),
            times => Err(self.said(&format!("{times} reports came twice: the guest runs twice"))),
        }
    }

    /// Moves the machine and waits until the guest goes on. Returns the migration as the source shows it, and the cost
    /// to the guest.
    pub fn migrate(&self, from: &Node, to: &str, options: &[&str]) -> io::Result<(Value, Gaps)> {
        self.console.mark(PATIENCE)?;
        let moved = self.try_migrate(from, to, options)?;
        self.alive()?;
        let report = self.console.fresh_report(PATIENCE)?;
        let gaps = Gaps {
            host_ms: self.console.host_gap().as_secs_f64() * 1000.0,
            guest_ms: report.gap_since_mark_ms,
            beat_ms: self.console.beat_gap().as_secs_f64() * 1000.0,
        };
        Ok((moved, gaps))
    }

    /// Tries to move the machine.
    pub fn try_migrate(&self, from: &Node, to: &str, options: &[&str]) -> Result<Value, Failure> {
        let vm = format!("vm/{VM}");
        let mut words = vec!["migrate", &vm, "--to", to];
        words.extend(options);
        from.godwit(&words).json()
    }

    /// Waits until the guest's pointer chase and page writer have begun, and any cold memory has been written: the
    /// loads make all of their memory first.
    pub fn loads_on_memory_work(&self) -> io::Result<()> {
        let begun = || {
            let windows = self.console.windows();
            let both = !windows.pointer_chase.is_empty() && !windows.dirty_pages.is_empty();
            (both && (windows.cold || !self.has_cold)).then_some(())
        };
        wait_for(PATIENCE, begun).ok_or_else(|| self.said("the loads on memory do not begin"))
    }

    /// Returns the node's description of the machine's memory.
    pub fn memory(&self, node: &Node) -> io::Result<Value> {
        Ok(node.godwit(&["vm", "show", VM]).json()?["memory"].clone())
    }

    /// Waits until a move of the machine's memory at a node has ended, and returns the node's description of the
    /// memory.
    pub fn memory_moved(&self, node: &Node) -> io::Result<Value> {
        let ended = || {
            let memory = self.memory(node).ok()?;
            (memory["moving"]["ended"] == true).then_some(memory)
        };
        wait_for(PATIENCE, ended).ok_or_else(|| {
            let shown = self.memory(node).unwrap_or_default();
            io::Error::other(format!(
                "its memory moves without an end: {shown}\n{}",
                node.log_tail(20)
            ))
        })
    }

    /// Ends the load, lets the guest compare all writes, and checks the file systems of the images at the node.
    pub fn finish(&self, node: &Node) -> io::Result<Finished> {
        let finished = self.end(node)?;
        for disk in &self.disks {
            check_disk(&node.image(disk)?)?;
        }
        Ok(finished)
    }

    /// Ends the load without a check of the images, which may lack parts of their disks.
    pub fn end(&self, node: &Node) -> io::Result<Finished> {
        let finished = self.console.finish(PATIENCE)?;
        if finished.errors + finished.mismatches > 0 {
            return Err(self.said(&format!("the guest found: {finished:?}")));
        }
        // The guest powers off, and QEMU ends.
        let mut shown = Value::Null;
        let ended = || {
            shown = node.godwit(&["vm", "show", VM]).json().ok()?;
            matches!(shown["state"].as_str(), Some("stopped" | "halted")).then_some(())
        };
        match wait_for(PATIENCE, ended) {
            Some(()) => Ok(finished),
            None => Err(self.said(&format!(
                "the machine does not end after its guest: {shown}"
            ))),
        }
    }

    fn said(&self, what: &str) -> io::Error {
        io::Error::other(format!("{what}\n{}", self.console.log().join("\n")))
    }
}

/// Creates `disks` disks of `disk_mib` MiB at a node, and returns their names.
pub(super) fn make_disks(
    cluster: &Cluster,
    node: &Node,
    disks: usize,
    disk_mib: u64,
) -> io::Result<Vec<String>> {
    let names: Vec<String> = (0..disks).map(|number| format!("disk{number}")).collect();
    for name in &names {
        let path = cluster.dir().join(format!("{name}.import"));
        format_disk(&path, disk_mib * MIB)?;
        node.godwit(&["disk", "import", name, &path.to_string_lossy()])
            .json()?;
        std::fs::remove_file(path)?;
    }
    Ok(names)
}
