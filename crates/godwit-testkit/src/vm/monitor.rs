//! QEMU's human monitor, to stop a machine and to have QEMU itself move one.

use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use crate::process::wait_for;

/// Longest time for QEMU to start, to answer, and to move a small machine.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub struct Monitor(BufReader<UnixStream>);

impl Monitor {
    /// Returns QEMU's arguments for a monitor at this socket.
    pub fn arguments(path: &Path) -> [OsString; 2] {
        let mut value = unix(path);
        value.push(",server=on,wait=off");
        ["-monitor".into(), value]
    }

    /// Returns QEMU's arguments for a machine sent to this socket by another QEMU.
    pub fn awaits(path: &Path) -> [OsString; 2] {
        ["-incoming".into(), unix(path)]
    }

    /// Connects as soon as QEMU listens.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let stream = wait_for(PATIENCE, || UnixStream::connect(path).ok())
            .ok_or_else(|| io::Error::other(format!("no monitor at {}", path.display())))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut monitor = Self(BufReader::new(stream));
        monitor.answer()?;
        Ok(monitor)
    }

    /// Sends a command, and returns QEMU's answer.
    pub fn say(&mut self, command: &str) -> io::Result<String> {
        let line = format!("{command}\n");
        self.0.get_mut().write_all(line.as_bytes())?;
        self.answer()
    }

    /// Has QEMU send the machine to another QEMU, which [awaits](Self::awaits) the machine, and waits for the end.
    pub fn migrate(&mut self, to: &Path) -> io::Result<()> {
        wait_for(PATIENCE, || to.exists().then_some(()))
            .ok_or_else(|| io::Error::other("no QEMU awaits the machine"))?;
        self.say(&format!("migrate -d unix:{}", to.display()))?;
        let mut state = String::new();
        let ended = || {
            state = self.say("info migrate").ok()?;
            let over = ["completed", "failed"];
            over.iter().any(|end| state.contains(end)).then_some(())
        };
        let ended = wait_for(PATIENCE, ended);
        match ended.filter(|()| state.contains("completed")) {
            Some(()) => Ok(()),
            None => Err(io::Error::other(state)),
        }
    }

    /// Returns the output up to the next prompt.
    fn answer(&mut self) -> io::Result<String> {
        let mut text = Vec::new();
        while !text.ends_with(b"(qemu) ") {
            if self.0.read_until(b' ', &mut text)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(String::from_utf8_lossy(&text).into_owned())
    }
}

fn unix(path: &Path) -> OsString {
    let mut address = OsString::from("unix:");
    address.push(path);
    address
}
