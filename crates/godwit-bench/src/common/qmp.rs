//! A thin client of QEMU's monitor protocol: commands, their answers, and events.

use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use godwit_testkit::process::wait_for;
use serde_json::{Value, json};

/// Longest time for QEMU to listen, and to answer.
const PATIENCE: Duration = Duration::from_secs(20);

/// A monitor session.
#[derive(Debug)]
pub(crate) struct Qmp {
    stream: BufReader<UnixStream>,
    /// Received part of an incomplete line.
    line: String,
    events: VecDeque<Value>,
}

impl Qmp {
    /// Connects and negotiates capabilities.
    pub(crate) fn connect(socket: &Path) -> io::Result<Self> {
        let stream = wait_for(PATIENCE, || UnixStream::connect(socket).ok())
            .ok_or_else(|| io::Error::other(format!("nobody listens at {}", socket.display())))?;
        let mut qmp = Self {
            stream: BufReader::new(stream),
            line: String::new(),
            events: VecDeque::new(),
        };
        let greeting = qmp.receive(PATIENCE)?;
        if greeting.is_none_or(|greeting| greeting["QMP"].is_null()) {
            return Err(io::Error::other("no greeting of QEMU's monitor"));
        }
        qmp.call("qmp_capabilities", &json!({}))?;
        Ok(qmp)
    }

    /// Sends a command and waits for its answer. Earlier events are kept.
    pub(crate) fn call(&mut self, command: &str, arguments: &Value) -> io::Result<Value> {
        let request = json!({"execute": command, "arguments": arguments});
        self.stream
            .get_mut()
            .write_all(format!("{request}\n").as_bytes())?;
        loop {
            let answer = self
                .receive(PATIENCE)?
                .ok_or_else(|| io::Error::other(format!("QEMU does not answer to '{command}'")))?;
            if !answer["event"].is_null() {
                self.events.push_back(answer);
            } else if let Some(error) = answer["error"]["desc"].as_str() {
                return Err(io::Error::other(format!(
                    "QEMU refuses '{command}': {error}"
                )));
            } else {
                return Ok(answer["return"].clone());
            }
        }
    }

    /// Returns the next event; `None` after `timeout`.
    pub(crate) fn event(&mut self, timeout: Duration) -> io::Result<Option<Value>> {
        match self.events.pop_front() {
            Some(event) => Ok(Some(event)),
            None => self.receive(timeout),
        }
    }

    /// Returns the next complete line; `None` after `timeout`.
    fn receive(&mut self, timeout: Duration) -> io::Result<Option<Value>> {
        self.stream.get_ref().set_read_timeout(Some(timeout))?;
        match self.stream.read_line(&mut self.line) {
            Ok(0) => Err(io::Error::other("QEMU closed its monitor")),
            Ok(_) => Ok(Some(serde_json::from_str(&std::mem::take(&mut self.line))?)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }
}
