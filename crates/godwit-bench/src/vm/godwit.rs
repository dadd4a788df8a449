//! A machine moved between two Godwit nodes: `godwit migrate vm/NAME`, with no options.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use godwit_testkit::Cluster;
use godwit_testkit::process::{Process, wait_for};
use godwit_testkit::vm::{Finished, GuestConsole, GuestLoad, NodeGuest, VM};
use rustix::process::Signal;
use serde_json::Value;

use super::mover::{Machine, Mover};
use crate::suite::site::Site;

const PATIENCE: Duration = Duration::from_secs(60);
const DISK: &str = "disk";
/// Names of the source and the destination node.
const FROM: &str = "a";
const TO: &str = "b";

/// A mover that uses the machine's node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Godwit;

impl Mover for Godwit {
    fn name(&self) -> &str {
        "godwit"
    }

    fn start<'a>(&self, site: &'a Site, load: &GuestLoad) -> io::Result<Box<dyn Machine + 'a>> {
        let cluster = site.nodes([FROM, TO], |_| {})?;
        let (node, image) = (cluster.node(FROM), site.image());
        node.godwit(&["disk", "create", DISK, "--path", &image.to_string_lossy()])
            .json()?;
        let guest = NodeGuest::boot(&cluster, node, vec![DISK.to_owned()], load)?;
        Ok(Box::new(OnNodes {
            output: cluster.dir().join("move.json"),
            messages: cluster.dir().join("move.log"),
            cluster,
            guest,
            command: None,
            at: FROM,
        }))
    }
}

/// A machine on one of two nodes.
#[derive(Debug)]
struct OnNodes {
    cluster: Cluster,
    guest: NodeGuest,
    /// The command that moves the machine, once begun.
    command: Option<Process>,
    /// Standard output and standard error of the command.
    output: PathBuf,
    messages: PathBuf,
    /// Current node of the machine.
    at: &'static str,
}

impl OnNodes {
    /// Returns the success of the command, `None` if it does not end within `time`.
    fn ends_within(&mut self, time: Duration) -> io::Result<Option<bool>> {
        let command = self.command.as_mut();
        let command = command.ok_or_else(|| io::Error::other("the move has not begun"))?;
        Ok(wait_for(time, || command.ended()).map(|status| status.success()))
    }

    fn failed(&self, what: &str) -> io::Error {
        let said = std::fs::read_to_string(&self.messages).unwrap_or_default();
        io::Error::other(format!("{what}: {said}"))
    }
}

impl Machine for OnNodes {
    fn console(&self) -> &GuestConsole {
        &self.guest.console
    }

    fn begin(&mut self) -> io::Result<()> {
        let spec = self.cluster.node(FROM).spec();
        // Runs the operator's own command until it returns: repeated queries with a command each would take processors
        // from the measured guest.
        let mut command = Command::new(&spec.godwit);
        command
            .args(["--json", "migrate", &format!("vm/{VM}"), "--to", TO])
            .env("GODWIT_SOCKET", spec.dir.join("godwit.sock"))
            .stdout(File::create(&self.output)?)
            .stderr(File::create(&self.messages)?);
        self.command = Some(Process::spawn(&mut command)?);
        Ok(())
    }

    fn advance(&mut self, time: Duration) -> io::Result<bool> {
        match self.ends_within(time)? {
            None => Ok(false),
            Some(true) => {
                self.at = TO;
                Ok(true)
            }
            Some(false) => Err(self.failed("the migration failed")),
        }
    }

    fn stopped_ms(&mut self) -> io::Result<f64> {
        let text = std::fs::read_to_string(&self.output)?;
        let documents = serde_json::Deserializer::from_str(&text).into_iter::<Value>();
        let shown = documents.last().transpose()?.unwrap_or_default();
        shown["blackout_ms"]
            .as_f64()
            .ok_or_else(|| self.failed(&format!("no blackout_ms in {shown}")))
    }

    fn cancel(&mut self) -> io::Result<()> {
        if let Some(command) = &self.command {
            command.signal(Signal::INT);
        }
        let ended = self.ends_within(PATIENCE)?;
        let machine = self.cluster.node(FROM).godwit(&["vm", "show", VM]).json()?;
        if ended == Some(false) && machine["state"] == "running" {
            return Ok(());
        }
        Err(self.failed("the migration cannot be cancelled"))
    }

    fn keep_in_step(&mut self) -> io::Result<()> {
        let command = [
            "vm",
            "protect",
            VM,
            "--to",
            TO,
            "--restart",
            "--when-alone",
            "stop",
        ];
        self.cluster.node(FROM).godwit(&command).json()?;
        Ok(())
    }

    fn go_alone(&mut self) -> io::Result<()> {
        let command = ["vm", "unprotect", VM];
        self.cluster.node(FROM).godwit(&command).text()?;
        Ok(())
    }

    fn finish(&mut self) -> io::Result<Finished> {
        self.guest.finish(self.cluster.node(self.at))
    }
}
