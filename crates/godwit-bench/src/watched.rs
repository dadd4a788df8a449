//! A migration followed as people follow it: by one `godwit migration watch` to its end.

use std::io::{self, BufRead, BufReader};
use std::process::Stdio;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use serde_json::Value;

use godwit_testkit::cluster::Node;
use godwit_testkit::process::Process;

/// A migration that is watched. To ask for it again and again with a command each would take the
/// processors from who is measured.
#[derive(Debug)]
pub struct Watched {
    _command: Process,
    lines: Receiver<io::Result<Value>>,
    shown: Value,
}

impl Watched {
    /// Begins to watch.
    ///
    /// # Errors
    /// When the command cannot be started.
    pub fn start(node: &Node, id: &str) -> io::Result<Self> {
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

    /// Waits at most so long for news. True when it has completed.
    ///
    /// # Errors
    /// When it was aborted, or nobody tells any more how it goes on.
    pub fn completed_within(&mut self, time: Duration) -> io::Result<bool> {
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

    /// The migration as it was last shown; null before it was.
    pub fn shown(&self) -> &Value {
        &self.shown
    }
}
