//! The verifying guest in a QEMU that somebody else starts, and that a node adopts.

use std::ffi::OsString;
use std::io;

use super::on_nodes::{PATIENCE, make_disks};
use super::{
    ConsoleSocket, GuestImage, GuestLoad, GuestMachine, MachineDisk, NodeGuest, NodeMachine, VM,
};
use crate::cluster::{Cluster, Node};
use crate::process::Process;

impl NodeGuest {
    /// Makes a disk of so many MiB at the node, starts a QEMU with it and with a NIC that the node serves at a socket,
    /// waits until the guest works, and lets the node adopt it. The QEMU ends when what this gives beside the guest is
    /// dropped.
    ///
    /// # Errors
    /// When anything of that fails, with what the guest said.
    pub fn adopt(
        cluster: &Cluster,
        node: &Node,
        disk_mib: u64,
        load: &GuestLoad,
        nic: &[String],
    ) -> io::Result<(Self, Process)> {
        let disks = make_disks(cluster, node, 1, disk_mib)?;
        let socket = |disk: &String| {
            let folder = node.spec().dir.join("disks");
            MachineDisk::VhostUser(folder.join(format!("{disk}.vhost")))
        };
        let sockets = disks.iter().map(socket).collect();
        let (guest, console) = Self::new(cluster, disks, load)?;
        let NodeMachine {
            memory_mib, cpus, ..
        } = NodeMachine::default();
        let machine = GuestMachine {
            memory_mb: memory_mib,
            cpus,
            load: load.clone(),
            ..GuestMachine::new(
                GuestImage::build_or_cached()?,
                sockets,
                ConsoleSocket::Connect(console),
            )
        };
        let monitor = cluster.dir().join("monitor.sock");
        let monitor = monitor.to_string_lossy();
        let mut words: Vec<OsString> = nic.iter().map(OsString::from).collect();
        words.extend([
            "-qmp".into(),
            format!("unix:{monitor},server=on,wait=off").into(),
        ]);
        let process = machine.spawn(&words)?;
        guest.console.started(PATIENCE)?;
        node.godwit(&["vm", "adopt", VM, "--qmp", &monitor])
            .json()?;
        guest.alive()?;
        Ok((guest, process))
    }
}
