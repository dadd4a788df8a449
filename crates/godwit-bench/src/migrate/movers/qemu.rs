//! QEMU's `blockdev-mirror` between two `qemu-storage-daemon`s. The source mirrors its node into an NBD export of the
//! destination. When the job ends, the guest's export uses the mirror's target.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use godwit_testkit::cluster::MemoryDisk;
use godwit_testkit::nbd::{NbdConnection, NbdTarget};
use godwit_testkit::network::Namespace;
use godwit_testkit::process::{Process, cpu_seconds};
use godwit_testkit::vm::block_nodes;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::common::awaited;
use crate::common::qmp::Qmp;
use crate::migrate::movers::credentials::{self, Credentials};
use crate::migrate::movers::{Mover, Moving};
use crate::suite::site::Site;

const PATIENCE: Duration = Duration::from_secs(60);
const EXPORT: &str = "disk";
const JOB: &str = "move";
/// Port of the destination's export in its namespace: the NBD default.
const PORT: u16 = 10809;

/// The mirror's treatment of the guest's writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CopyMode {
    /// Marked dirty and copied later.
    Background,
    /// Written to both sides at once.
    WriteBlocking,
    /// Proxmox's way: background until the job is ready, then write-blocking.
    Switched,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Qemu {
    pub(crate) mode: CopyMode,
    /// True if the daemons use mutual TLS, like Godwit's nodes between hosts.
    pub(crate) encrypted: bool,
}

impl CopyMode {
    /// Returns the copy mode at the start of the job, in QEMU's spelling.
    const fn first(self) -> &'static str {
        match self {
            Self::Background | Self::Switched => "background",
            Self::WriteBlocking => "write-blocking",
        }
    }
}

impl Mover for Qemu {
    fn name(&self) -> &str {
        match (self.mode, self.encrypted) {
            (CopyMode::Background, false) => "qemu-background",
            (CopyMode::Background, true) => "qemu-background-tls",
            (CopyMode::WriteBlocking, false) => "qemu-write-blocking",
            (CopyMode::WriteBlocking, true) => "qemu-write-blocking-tls",
            (CopyMode::Switched, false) => "qemu-proxmox",
            (CopyMode::Switched, true) => "qemu-proxmox-tls",
        }
    }

    fn in_quick(&self) -> bool {
        !self.encrypted
    }

    fn open(&self, site: &Site) -> io::Result<Box<dyn Moving>> {
        let memory = site.memory_disk()?;
        let copy = memory
            .as_ref()
            .map_or_else(|| site.dir().to_owned(), MemoryDisk::path)
            .join("destination.img");
        File::create(&copy)?.set_len(site.bytes)?;
        let (left, right) = (site.link.left(), site.link.right());
        let credentials = self.encrypted.then(|| Credentials::new(site.dir()));
        let credentials = credentials.transpose()?;
        let mut command = daemon(right, &copy);
        let mut listen = format!(
            "addr.type=inet,addr.host={},addr.port={PORT}",
            right.address()
        );
        if let Some(credentials) = &credentials {
            command.args(credentials.object("server"));
            listen += &format!(",tls-creds={}", credentials::ID);
        }
        // The daemon writes the pid file once it listens.
        let listens = site.dir().join("destination.pid");
        let _ = std::fs::remove_file(&listens);
        command.arg("--nbd-server").arg(listen).args(export());
        command.arg("--pidfile").arg(&listens);
        let destination = Process::spawn(&mut command)?;
        awaited("the destination's service", PATIENCE, || {
            listens.exists().then_some(())
        })?;

        let socket = site.dir().join("guest.sock");
        let monitor = site.dir().join("monitor.sock");
        for old in [&socket, &monitor] {
            // A leftover of the last run would be taken for this run's socket.
            let _ = std::fs::remove_file(old);
        }
        let mut command = daemon(left, &site.image());
        if let Some(credentials) = &credentials {
            command.args(credentials.object("client"));
        }
        command
            .arg("--nbd-server")
            .arg(format!("addr.type=unix,addr.path={}", socket.display()))
            .args(export())
            .arg("--chardev")
            .arg(format!(
                "socket,id=monitor,path={},server=on,wait=off",
                monitor.display()
            ))
            .args(["--monitor", "chardev=monitor"]);
        let source = Process::spawn(&mut command)?;
        let guest = NbdTarget::unix(socket, EXPORT);
        awaited("the source's service", PATIENCE, || {
            NbdConnection::connect(&guest).ok()
        })?;
        Ok(Box::new(Mirror {
            mode: self.mode,
            encrypted: self.encrypted,
            processes: [source, destination],
            guest,
            qmp: Qmp::connect(&monitor)?,
            target: json!({
                "type": "inet",
                "host": right.address().to_string(),
                "port": PORT.to_string(),
            }),
            images: [site.image(), copy],
            _memory: memory,
            step: Step::Copying,
        }))
    }
}

/// Returns a `qemu-storage-daemon` with an image, on a node of the export's name.
fn daemon(namespace: &Namespace, image: &Path) -> Command {
    let mut command = namespace.command();
    command
        .arg("qemu-storage-daemon")
        .args(block_nodes(EXPORT, image));
    command
}

fn export() -> [String; 2] {
    let name = format!("id=export,node-name={EXPORT},name={EXPORT}");
    [
        "--export".to_owned(),
        format!("type=nbd,{name},writable=on"),
    ]
}

/// The progress of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Until QEMU reports that the job is ready.
    Copying,
    /// Ready and switched to write-blocking; earlier dirty data is still to be sent.
    Switching,
    /// Told to complete.
    Completing,
}

/// A disk between two daemons.
#[derive(Debug)]
struct Mirror {
    mode: CopyMode,
    encrypted: bool,
    /// The source's and the destination's daemons.
    processes: [Process; 2],
    guest: NbdTarget,
    qmp: Qmp,
    target: Value,
    images: [PathBuf; 2],
    /// The destination's disk, if in memory.
    _memory: Option<MemoryDisk>,
    step: Step,
}

impl Mirror {
    fn complete(&mut self) -> io::Result<()> {
        self.step = Step::Completing;
        self.qmp
            .call("block-job-complete", &json!({"device": JOB}))?;
        Ok(())
    }

    fn ready(&mut self) -> io::Result<()> {
        if self.mode != CopyMode::Switched {
            return self.complete();
        }
        self.step = Step::Switching;
        let change = json!({"id": JOB, "type": "mirror", "copy-mode": "write-blocking"});
        self.qmp.call("block-job-change", &change)?;
        Ok(())
    }

    /// Returns true once everything written before the switch of modes was sent.
    fn actively_synced(&mut self) -> io::Result<bool> {
        let jobs = self.qmp.call("query-block-jobs", &json!({}))?;
        Ok(jobs[0]["actively-synced"] == true)
    }
}

impl Moving for Mirror {
    fn guest(&self) -> NbdTarget {
        self.guest.clone()
    }

    fn cpu_seconds(&self) -> io::Result<f64> {
        let each = self
            .processes
            .iter()
            .map(|process| cpu_seconds(process.id()));
        let sum: Option<f64> = each.sum();
        sum.ok_or_else(|| io::Error::other("a qemu-storage-daemon is gone"))
    }

    fn begin(&mut self) -> io::Result<()> {
        let mut target = json!({
            "driver": "nbd",
            "node-name": "target",
            "server": self.target,
            "export": EXPORT,
        });
        if self.encrypted {
            target["tls-creds"] = credentials::ID.into();
            target["tls-hostname"] = credentials::HOST.into();
        }
        self.qmp.call("blockdev-add", &target)?;
        let mirror = json!({
            "job-id": JOB,
            "device": EXPORT,
            "target": "target",
            "sync": "full",
            "copy-mode": self.mode.first(),
        });
        self.qmp.call("blockdev-mirror", &mirror)?;
        Ok(())
    }

    fn advance(&mut self, time: Duration) -> io::Result<bool> {
        if self.step == Step::Switching && self.actively_synced()? {
            self.complete()?;
        }
        let Some(event) = self.qmp.event(time)? else {
            return Ok(false);
        };
        match event["event"].as_str() {
            Some("BLOCK_JOB_READY") => self.ready()?,
            Some("BLOCK_JOB_COMPLETED") => {
                let failed = &event["data"]["error"];
                if failed.is_null() && self.step == Step::Completing {
                    return Ok(true);
                }
                return Err(io::Error::other(format!("QEMU's mirror failed: {event}")));
            }
            Some("BLOCK_JOB_ERROR" | "BLOCK_JOB_CANCELLED") => {
                return Err(io::Error::other(format!("QEMU's mirror failed: {event}")));
            }
            _ => {}
        }
        Ok(false)
    }

    fn cancel(&mut self) -> io::Result<()> {
        self.qmp
            .call("block-job-cancel", &json!({"device": JOB, "force": true}))?;
        // A job may complete before the command cancels it.
        let over = ["BLOCK_JOB_CANCELLED", "BLOCK_JOB_COMPLETED"];
        while let Some(event) = self.qmp.event(PATIENCE)? {
            if over.iter().any(|name| event["event"] == *name) {
                return Ok(());
            }
        }
        Err(io::Error::other("QEMU's mirror cannot be cancelled"))
    }

    fn images(&self) -> io::Result<[PathBuf; 2]> {
        Ok(self.images.clone())
    }

    fn close(&mut self) -> io::Result<()> {
        for process in &mut self.processes {
            process.signal(Signal::TERM);
            let status = process.wait(PATIENCE)?;
            if !status.success() {
                return Err(io::Error::other(format!(
                    "qemu-storage-daemon ended with {status}"
                )));
            }
        }
        Ok(())
    }
}
