//! A QEMU at one end of the link, with its disk and its monitor.

use std::io;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use godwit_testkit::network::Namespace;
use godwit_testkit::process::Process;
use godwit_testkit::vm::{ConsoleSocket, GuestImage, GuestLoad, GuestMachine, MachineDisk};
use serde_json::{Value, json};

use crate::qmp::Qmp;
use crate::site::Site;

/// How long QEMU may take to end.
const PATIENCE: Duration = Duration::from_secs(60);

/// A machine as one end of the link runs it.
#[derive(Debug)]
pub(crate) struct End<'a> {
    /// Where QEMU lives.
    pub(crate) namespace: &'a Namespace,
    machine: GuestMachine,
    image: PathBuf,
    monitor: PathBuf,
}

/// Its QEMU.
#[derive(Debug)]
pub(crate) struct Running {
    /// Its monitor.
    pub(crate) qmp: Qmp,
    /// The image of its disk.
    pub(crate) image: PathBuf,
    process: Process,
}

impl<'a> End<'a> {
    /// The machine with this image for its disk, whose guest talks to whoever listens at `console`.
    ///
    /// # Errors
    /// When there is no guest to boot.
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

    /// Starts QEMU, with these arguments besides.
    ///
    /// # Errors
    /// When it does not come up.
    pub(crate) fn start(&self, further: &[&str]) -> io::Result<Running> {
        // What is left of the last run would look like the socket of this one.
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
    /// Switches capabilities of a migration on.
    ///
    /// # Errors
    /// When QEMU has no such thing.
    pub(crate) fn enable(&mut self, capabilities: &[&str]) -> io::Result<()> {
        let states: Vec<Value> = capabilities
            .iter()
            .map(|capability| json!({"capability": capability, "state": true}))
            .collect();
        let arguments = json!({"capabilities": states});
        self.qmp.call("migrate-set-capabilities", &arguments)?;
        Ok(())
    }

    /// Waits for an event of which `fits` holds.
    ///
    /// # Errors
    /// When none comes in time.
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
    ///
    /// # Errors
    /// When it does not, or not well.
    pub(crate) fn ended(&mut self) -> io::Result<()> {
        let status = self.process.wait(PATIENCE)?;
        if status.success() {
            return Ok(());
        }
        Err(io::Error::other(format!("QEMU ended with {status}")))
    }
}
