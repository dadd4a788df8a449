//! Two QEMUs with libvirt's procedure for a machine with local disks. The disk is mirrored into an NBD server of the
//! destination, then memory is sent. While the guest is stopped, the mirror ends and the destination takes over.

use std::fs::File;
use std::io;
use std::time::Duration;

use godwit_testkit::vm::{Finished, GuestConsole, GuestLoad, check_disk};
use serde_json::{Value, json};

use super::end::{End, Running};
use super::mover::{Machine, Mover};
use crate::suite::site::Site;

const PATIENCE: Duration = Duration::from_secs(120);
/// The machine's block node, and its export at the destination.
const DISK: &str = "disk0";
const TARGET: &str = "target";
const JOB: &str = "mirror";
/// Ports of the destination in its namespace: the NBD default, and libvirt's first.
const NBD_PORT: &str = "10809";
const MEMORY_PORT: &str = "49152";
/// Unlimited bandwidth in whole MiB, libvirt's default. QEMU's own default is 128 MiB a second.
const BANDWIDTH: u64 = (i64::MAX as u64) >> 20 << 20;

/// A mover that follows libvirt.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Qemu {
    pub(crate) name: &'static str,
    /// The mirror's treatment of the guest's writes: `background` is libvirt's default, `write-blocking` its option for
    /// synchronous writes.
    pub(crate) copy_mode: &'static str,
}

impl Mover for Qemu {
    fn name(&self) -> &str {
        self.name
    }

    fn start<'a>(&self, site: &'a Site, load: &GuestLoad) -> io::Result<Box<dyn Machine + 'a>> {
        let console = GuestConsole::new();
        let line = site.dir().join("console.sock");
        // A leftover of the last run would be taken for this run's socket.
        let _ = std::fs::remove_file(&line);
        console.listen(&line)?;
        let copy = site.dir().join("destination.img");
        File::create(&copy)?.set_len(site.bytes)?;
        let end = |namespace, image| End::new(site, namespace, image, line.clone(), load);
        let source = end(site.link.left(), site.image())?.start(&[])?;
        console.started(PATIENCE)?;
        Ok(Box::new(Mirrored {
            copy_mode: self.copy_mode,
            console,
            there: end(site.link.right(), copy)?,
            source,
            destination: None,
            step: Step::Mirroring,
            stopped: None,
            resumed: None,
        }))
    }
}

/// The progress of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Until the mirror is ready.
    Mirroring,
    /// Memory is sent, until QEMU has stopped the guest.
    SendingMemory,
    /// Until the mirror has sent the rest.
    EndingMirror,
    /// The rest of the machine's state is sent.
    SwitchingOver,
    /// The guest runs at the destination.
    Moved,
}

/// A machine between two QEMUs.
#[derive(Debug)]
struct Mirrored<'a> {
    copy_mode: &'static str,
    console: GuestConsole,
    /// The future destination.
    there: End<'a>,
    source: Running,
    destination: Option<Running>,
    step: Step,
    /// Stop and resumption of the guest, in seconds of QEMU's clock.
    stopped: Option<f64>,
    resumed: Option<f64>,
}

impl Mirrored<'_> {
    fn send_memory(&mut self) -> io::Result<()> {
        self.step = Step::SendingMemory;
        self.source
            .enable(&["events", "pause-before-switchover", "return-path"])?;
        let limits = json!({"max-bandwidth": BANDWIDTH});
        self.source.qmp.call("migrate-set-parameters", &limits)?;
        let uri = memory_uri(&self.there);
        self.source.qmp.call("migrate", &json!({"uri": uri}))?;
        Ok(())
    }

    fn end_mirror(&mut self) -> io::Result<()> {
        self.step = Step::EndingMirror;
        // On a ready mirror this command sends the rest and completes the job.
        self.source
            .qmp
            .call("block-job-cancel", &json!({"device": JOB, "force": false}))?;
        Ok(())
    }

    fn switch_over(&mut self) -> io::Result<()> {
        self.step = Step::SwitchingOver;
        self.source
            .qmp
            .call("blockdev-del", &json!({"node-name": TARGET}))?;
        let state = json!({"state": "pre-switchover"});
        self.source.qmp.call("migrate-continue", &state)?;
        Ok(())
    }

    /// Resumes the guest at the destination, after everything has left the source.
    fn take_over(&mut self) -> io::Result<()> {
        let Some(destination) = &mut self.destination else {
            return Err(io::Error::other("a machine moved that nobody moved"));
        };
        destination.await_event("say that everything has arrived", |event| {
            migration(event) == Some("completed")
        })?;
        destination.qmp.call("nbd-server-stop", &json!({}))?;
        destination.qmp.call("cont", &json!({}))?;
        let event = destination.await_event("run the guest", |event| event["event"] == "RESUME")?;
        self.resumed = seconds(&event);
        self.source.qmp.call("quit", &json!({}))?;
        self.source.ended()?;
        self.step = Step::Moved;
        Ok(())
    }
}

impl Machine for Mirrored<'_> {
    fn console(&self) -> &GuestConsole {
        &self.console
    }

    fn begin(&mut self) -> io::Result<()> {
        let mut destination = self.there.start(&["-S", "-incoming", "defer"])?;
        destination.enable(&["events", "late-block-activate", "return-path"])?;
        let server = json!({
            "type": "inet",
            "host": self.there.namespace.address().to_string(),
            "port": NBD_PORT,
        });
        let export = json!({"type": "nbd", "id": DISK, "node-name": DISK, "writable": true});
        let qmp = &mut destination.qmp;
        let address = json!({"type": "inet", "data": {"host": server["host"], "port": NBD_PORT}});
        qmp.call("nbd-server-start", &json!({"addr": address}))?;
        qmp.call("block-export-add", &export)?;
        qmp.call("migrate-incoming", &json!({"uri": memory_uri(&self.there)}))?;
        self.destination = Some(destination);

        let target = json!({
            "driver": "nbd",
            "node-name": TARGET,
            "server": server,
            "export": DISK,
        });
        self.source.qmp.call("blockdev-add", &target)?;
        let mirror = json!({
            "job-id": JOB,
            "device": DISK,
            "target": TARGET,
            "sync": "full",
            "copy-mode": self.copy_mode,
        });
        self.source.qmp.call("blockdev-mirror", &mirror)?;
        Ok(())
    }

    fn advance(&mut self, time: Duration) -> io::Result<bool> {
        let Some(event) = self.source.qmp.event(time)? else {
            return Ok(false);
        };
        let failed = || Err(io::Error::other(format!("QEMU's move failed: {event}")));
        match (event["event"].as_str(), migration(&event), self.step) {
            (Some("STOP"), ..) => self.stopped = seconds(&event),
            (Some("BLOCK_JOB_READY"), _, Step::Mirroring) => self.send_memory()?,
            (_, Some("pre-switchover"), Step::SendingMemory) => self.end_mirror()?,
            (Some("BLOCK_JOB_COMPLETED"), _, Step::EndingMirror)
                if event["data"]["error"].is_null() =>
            {
                self.switch_over()?;
            }
            (_, Some("completed"), Step::SwitchingOver) => {
                self.take_over()?;
                return Ok(true);
            }
            (_, Some("failed" | "cancelled" | "completed"), _) => return failed(),
            (Some("BLOCK_JOB_COMPLETED" | "BLOCK_JOB_ERROR" | "BLOCK_JOB_CANCELLED"), ..) => {
                return failed();
            }
            _ => {}
        }
        Ok(false)
    }

    fn stopped_ms(&mut self) -> io::Result<f64> {
        self.stopped
            .zip(self.resumed)
            .map(|(from, to)| (to - from) * 1000.0)
            .ok_or_else(|| io::Error::other("QEMU did not say when it stopped and ran the guest"))
    }

    fn cancel(&mut self) -> io::Result<()> {
        if self.step != Step::Mirroring {
            self.source.qmp.call("migrate_cancel", &json!({}))?;
            self.source.await_event("cancel its migration", |event| {
                migration(event) == Some("cancelled")
            })?;
        }
        self.source
            .qmp
            .call("block-job-cancel", &json!({"device": JOB, "force": true}))?;
        // A job may complete before the command cancels it.
        self.source.await_event("cancel its mirror", |event| {
            event["event"] == "BLOCK_JOB_CANCELLED" || event["event"] == "BLOCK_JOB_COMPLETED"
        })?;
        self.destination = None;
        Ok(())
    }

    fn keep_in_step(&mut self) -> io::Result<()> {
        self.begin()?;
        let ready = |event: &Value| event["event"] == "BLOCK_JOB_READY";
        self.source.await_event("mirror its disk", ready).map(drop)
    }

    fn go_alone(&mut self) -> io::Result<()> {
        self.cancel()
    }

    fn finish(&mut self) -> io::Result<Finished> {
        let finished = self.console.finish(PATIENCE)?;
        let running = match &mut self.destination {
            Some(destination) => destination,
            None => &mut self.source,
        };
        running.ended()?;
        check_disk(&running.image)?;
        Ok(finished)
    }
}

fn memory_uri(there: &End<'_>) -> String {
    format!("tcp:{}:{MEMORY_PORT}", there.namespace.address())
}

/// Returns the migration status of an event.
fn migration(event: &Value) -> Option<&str> {
    (event["event"] == "MIGRATION")
        .then(|| event["data"]["status"].as_str())
        .flatten()
}

/// Returns the time of an event.
fn seconds(event: &Value) -> Option<f64> {
    let stamp = &event["timestamp"];
    Some(stamp["seconds"].as_f64()? + stamp["microseconds"].as_f64()? / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_tell_what_and_when() {
        let event = json!({
            "event": "MIGRATION",
            "data": {"status": "pre-switchover"},
            "timestamp": {"seconds": 12, "microseconds": 250_000},
        });
        assert_eq!(migration(&event), Some("pre-switchover"));
        assert_eq!(seconds(&event), Some(12.25));
        let other = json!({"event": "STOP", "data": {"status": "completed"}});
        assert_eq!((migration(&other), seconds(&other)), (None, None));
    }
}
