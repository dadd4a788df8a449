//! A migration followed to its end by one `godwit migration watch`.

use std::io::{self, BufRead, BufReader};
use std::process::Stdio;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use serde_json::Value;

use godwit_testkit::cluster::Node;
use godwit_testkit::process::Process;

/// A watched migration. Repeated queries with a command each would take processors from the measured guest.
#[derive(Debug)]
pub(crate) struct Watched {
    _command: Process,
    lines: Receiver<io::Result<Value>>,
    shown: Value,
}

impl Watched {
    pub(crate) fn start(node: &Node, id: &str) -> io::Result<Self> {
        let mut command = node.godwit(&["migration", "watch", id]).printing_json();
        command.stdout(Stdio::piped()).stderr(Stdio::null());
        let mut command = Process::spawn(&mut command)?;
        let output = command.child().stdout.take();
        let output = output.ok_or_else(|| io::Error::other("the command has no output"))?;
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines() {
                let value = line.and_then(|line| Ok(serde_json::from_str(&line)?));
                if sender.send(value).is_err() {
                    break;
                }
            }
        });
        Ok(Self {
            _command: command,
            lines,
            shown: Value::Null,
        })
    }

    /// Waits for news up to `time`. Returns true once the migration has completed.
    pub(crate) fn completed_within(&mut self, time: Duration) -> io::Result<bool> {
        match self.lines.recv_timeout(time) {
            Ok(shown) => self.shown = shown?,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                let shown = &self.shown;
                return Err(io::Error::other(format!("watching ended at {shown}")));
            }
        }
        match self.shown["phase"].as_str() {
            Some("completed") => Ok(true),
            Some("aborted") => {
                let shown = &self.shown;
                Err(io::Error::other(format!("the migration ended: {shown}")))
            }
            _ => Ok(false),
        }
    }

    /// Returns the migration as last shown; null before the first news.
    pub(crate) fn shown(&self) -> &Value {
        &self.shown
    }
}
