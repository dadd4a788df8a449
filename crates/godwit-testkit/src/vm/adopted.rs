//! The verifying guest in a QEMU that a third party starts, and that a node adopts.

use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};

use super::on_nodes::{PATIENCE, make_disks};
use super::{ConsoleSocket, GuestImage, GuestLoad, GuestMachine, MachineDisk, NodeGuest, VM};
use crate::cluster::{Cluster, Node};
use crate::process::{Process, wait_for_listener};

/// The devices of such a QEMU beside the disks.
#[derive(Clone, Copy, Debug, Default)]
pub struct AdoptedMachine<'a> {
    /// QEMU's arguments for a NIC that the node serves at a socket.
    pub nic: &'a [String],
    /// The file of the guest's memory.
    pub memory_file: Option<&'a Path>,
}

impl NodeGuest {
    /// Creates the disks at the node, starts a QEMU with them, waits until the guest works, and lets the node adopt the
    /// machine. The QEMU ends when the returned process is dropped.
    pub fn adopt(
        cluster: &Cluster,
        node: &Node,
        (disks, disk_mib): (usize, u64),
        load: &GuestLoad,
        machine: AdoptedMachine,
    ) -> io::Result<(Self, Process)> {
        let disks = make_disks(cluster, node, disks, disk_mib)?;
        let disk = |name: &String| MachineDisk::VhostUser(node.vhost_socket(name));
        let sockets = disks.iter().map(disk).collect();
        let (guest, console) = Self::new(cluster, disks, load)?;
        let image = GuestImage::build_or_cached()?;
        let qemu = GuestMachine {
            load: load.clone(),
            memory_file: machine.memory_file.map(Path::to_owned),
            ..GuestMachine::new(image, sockets, ConsoleSocket::Connect(console))
        };
        let monitor = cluster.dir().join("monitor.sock");
        let monitor = monitor.to_string_lossy();
        let mut words: Vec<OsString> = machine.nic.iter().map(OsString::from).collect();
        words.extend([
            "-qmp".into(),
            format!("unix:{monitor},server=on,wait=off").into(),
        ]);
        let process = qemu.spawn(&words)?;
        guest.console.started(PATIENCE)?;
        node.godwit(&["vm", "adopt", VM, "--qmp", &monitor])
            .json()?;
        guest.alive()?;
        Ok((guest, process))
    }
}

/// Starts a QEMU of 16 MiB whose guest never runs, and waits until QEMU listens at this monitor. `memory` is the type
/// of the memory backend with its options beside id and size.
pub fn idle_qemu(monitor: &Path, memory: &str, words: &[String]) -> io::Result<Process> {
    let qemu = Process::spawn(
        Command::new("qemu-system-x86_64")
            .args(["-S", "-nodefaults", "-display", "none", "-accel", "tcg"])
            .args(["-m", "16M", "-machine", "q35,memory-backend=mem"])
            .args(["-object", &format!("{memory},id=mem,size=16M,share=on")])
            .args(words)
            .arg("-qmp")
            .arg(format!("unix:{},server=on,wait=off", monitor.display()))
            .stdin(Stdio::null()),
    )?;
    match wait_for_listener(monitor, PATIENCE) {
        true => Ok(qemu),
        false => Err(io::Error::other("QEMU does not listen")),
    }
}
