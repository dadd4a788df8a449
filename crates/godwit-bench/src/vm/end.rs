//! A QEMU at one end of the link, with its disk and its monitor.

use std::io;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use godwit_testkit::network::Namespace;
use godwit_testkit::process::Process;
use godwit_testkit::vm::{ConsoleSocket, GuestImage, GuestLoad, GuestMachine, MachineDisk};
use serde_json::{Value, json};

use crate::common::qmp::Qmp;
use crate::suite::site::Site;

/// Longest time for QEMU to end.
const PATIENCE: Duration = Duration::from_secs(60);

/// A machine at one end of the link.
#[derive(Debug)]
pub(crate) struct End<'a> {
    pub(crate) namespace: &'a Namespace,
    machine: GuestMachine,
    image: PathBuf,
    monitor: PathBuf,
}

#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) qmp: Qmp,
    pub(crate) image: PathBuf,
    process: Process,
}

impl<'a> End<'a> {
    /// Returns a machine with `image` as its disk. The guest connects to the listener at `console`.
    pub(crate) fn new(
        site: &Site,
        namespace: &'a Namespace,
        image: PathBuf,
        console: PathBuf,
        load: &GuestLoad,
    ) -> io::Result<Self> {
        let disks = vec![MachineDisk::Image(image.clone())];
        let console = ConsoleSocket::Connect(console);
        let mut machine = GuestMachine::new(GuestImage::build_or_cached()?, disks, console);
        machine.load = load.clone();
        Ok(Self {
            namespace,
            machine,
            image,
            monitor: site.dir().join(format!("{}.monitor", namespace.address())),
        })
    }

    /// Starts QEMU with `further` arguments.
    pub(crate) fn start(&self, further: &[&str]) -> io::Result<Running> {
        // A leftover of the last run would be taken for this run's socket.
        let _ = std::fs::remove_file(&self.monitor);
        let mut command = self.namespace.command();
        command
            .arg("qemu-system-x86_64")
            .args(self.machine.arguments())
            .arg("-qmp")
            .arg(format!(
                "unix:{},server=on,wait=off",
                self.monitor.display()
            ))
            .args(further)
            .stdin(Stdio::null());
        let process = Process::spawn(&mut command)?;
        Ok(Running {
            qmp: Qmp::connect(&self.monitor)?,
            image: self.image.clone(),
            process,
        })
    }
}

impl Running {
    /// Enables migration capabilities.
    pub(crate) fn enable(&mut self, capabilities: &[&str]) -> io::Result<()> {
        let states: Vec<Value> = capabilities
            .iter()
            .map(|capability| json!({"capability": capability, "state": true}))
            .collect();
        let arguments = json!({"capabilities": states});
        self.qmp.call("migrate-set-capabilities", &arguments)?;
        Ok(())
    }

    /// Waits for an event that satisfies `fits`.
    pub(crate) fn await_event(
        &mut self,
        what: &str,
        fits: impl Fn(&Value) -> bool,
    ) -> io::Result<Value> {
        while let Some(event) = self.qmp.event(PATIENCE)? {
            if fits(&event) {
                return Ok(event);
            }
        }
        Err(io::Error::other(format!("QEMU does not {what}")))
    }

    /// Waits until QEMU has ended by itself.
    pub(crate) fn ended(&mut self) -> io::Result<()> {
        let status = self.process.wait(PATIENCE)?;
        if status.success() {
            return Ok(());
        }
        Err(io::Error::other(format!("QEMU ended with {status}")))
    }
}
