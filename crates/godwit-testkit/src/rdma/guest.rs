//! A guest: its QEMU, and commands in the guest.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;

use crate::process::{Process, wait_for};

/// Longest time for a guest to boot.
const BOOT: Duration = Duration::from_secs(180);
/// Longest time for a command.
const COMMAND: Duration = Duration::from_secs(120);

/// The result of a command in a guest.
#[derive(Debug, Clone)]
pub struct Output {
    /// Exit status.
    pub status: i32,
    /// Standard output and error, together.
    pub text: String,
}

pub struct RdmaGuest {
    number: usize,
    _qemu: Process,
    /// Logs of the guest's console and of QEMU.
    logs: [PathBuf; 2],
    channel: Mutex<Channel>,
}

struct Channel {
    reader: BufReader<UnixStream>,
    next: u64,
}

impl RdmaGuest {
    /// Starts QEMU with this network; the guest boots meanwhile.
    pub(super) fn start(
        image: &Path,
        payload: &Path,
        work: &Path,
        number: usize,
        net: &[String],
    ) -> io::Result<Self> {
        let socket = work.join(format!("control-{number}"));
        let log = std::fs::File::create(work.join(format!("qemu-{number}.log")))?;
        let mut command = Command::new("qemu-system-x86_64");
        command
            .args([
                "-accel",
                "tcg,thread=multi",
                "-cpu",
                "max",
                "-smp",
                "1",
                "-m",
                "640",
                "-nodefaults",
            ])
            .args(["-no-reboot", "-display", "none"])
            .arg("-kernel")
            .arg(image.join("vmlinux"))
            .arg("-initrd")
            .arg(image.join("initramfs"))
            .args([
                "-append",
                "console=ttyS0 quiet mitigations=off nokaslr panic=-1 tsc=reliable no_timer_check",
            ])
            .args([
                "-serial",
                &format!(
                    "file:{}",
                    work.join(format!("console-{number}.log")).display()
                ),
            ])
            .arg("-drive")
            .arg(format!(
                "file={},format=raw,if=virtio,snapshot=on",
                image.join("root.ext4").display()
            ))
            .arg("-drive")
            .arg(format!(
                "file={},format=raw,if=virtio,readonly=on",
                payload.display()
            ))
            .args([
                "-device",
                "virtio-serial-pci",
                "-device",
                "virtserialport,chardev=control,name=bed.control",
            ])
            .arg("-chardev")
            .arg(format!(
                "socket,id=control,path={},server=on,wait=off",
                socket.display()
            ))
            .args(net)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        let mut qemu = Process::spawn(&mut command)?;
        let stream = wait_for(Duration::from_secs(20), || {
            match UnixStream::connect(&socket) {
                Ok(stream) => Some(Ok(stream)),
                Err(error) => qemu.ended().map(|_| Err(error)),
            }
        });
        let stream = stream.and_then(Result::ok).ok_or_else(|| {
            let said = std::fs::read_to_string(work.join(format!("qemu-{number}.log")))
                .unwrap_or_default();
            io::Error::other(format!("guest {number}'s QEMU did not come up: {said}"))
        })?;
        let channel = Mutex::new(Channel {
            reader: BufReader::new(stream),
            next: 0,
        });
        let logs = ["console", "qemu"].map(|what| work.join(format!("{what}-{number}.log")));
        Ok(Self {
            number,
            _qemu: qemu,
            logs,
            channel,
        })
    }

    /// Waits until the guest takes commands.
    pub(super) fn booted(&self) -> io::Result<()> {
        let mut channel = self.channel.lock().unwrap_or_else(PoisonError::into_inner);
        channel.reader.get_ref().set_read_timeout(Some(BOOT))?;
        let mut line = String::new();
        channel
            .reader
            .read_line(&mut line)
            .map_err(|error| self.explain(&error, "boot"))?;
        if line.trim() == "ready" {
            Ok(())
        } else {
            Err(self.explain(&io::Error::other(line), "boot"))
        }
    }

    fn explain(&self, error: &io::Error, what: &str) -> io::Error {
        let said: String = self
            .logs
            .iter()
            .filter_map(|log| std::fs::read_to_string(log).ok())
            .collect();
        let tail: Vec<&str> = said.lines().rev().take(20).collect();
        let tail = tail.into_iter().rev().collect::<Vec<_>>().join("\n");
        io::Error::other(format!(
            "guest {} did not {what}: {error}\n{tail}",
            self.number
        ))
    }

    /// Runs a shell command to the end.
    pub fn run(&self, command: &str) -> io::Result<Output> {
        let mut channel = self.channel.lock().unwrap_or_else(PoisonError::into_inner);
        channel.next += 1;
        let number = channel.next;
        let stream = channel.reader.get_mut();
        stream.set_read_timeout(Some(COMMAND))?;
        stream.write_all(format!("{number} {}\n", BASE64.encode(command)).as_bytes())?;
        let mut line = String::new();
        channel
            .reader
            .read_line(&mut line)
            .map_err(|error| self.explain(&error, &format!("answer `{command}`")))?;
        let mut fields = line.split_whitespace();
        let (answered, status, text) = (fields.next(), fields.next(), fields.next().unwrap_or(""));
        let parsed = answered.zip(status).and_then(|(answered, status)| {
            let text = String::from_utf8_lossy(&BASE64.decode(text).ok()?).into_owned();
            (answered.parse() == Ok(number)).then_some(Output {
                status: status.parse().ok()?,
                text,
            })
        });
        parsed.ok_or_else(|| {
            self.explain(
                &io::Error::other(line),
                &format!("answer `{command}` as expected"),
            )
        })
    }

    /// Does the same as [`RdmaGuest::run`] for a command that has to succeed; returns the output.
    pub fn must(&self, command: &str) -> io::Result<String> {
        let output = self.run(command)?;
        if output.status == 0 {
            return Ok(output.text);
        }
        let Output { status, text } = output;
        Err(io::Error::other(format!(
            "guest {}: `{command}` ended with {status}: {text}",
            self.number
        )))
    }

    /// Starts a command in the background. The output goes to /run/NAME.log, the exit status to /run/NAME.status at the
    /// end. Returns the process id.
    pub fn background(&self, name: &str, command: &str) -> io::Result<u32> {
        // A shell that is not the program's parent: the program can be dumped and restored without the shell.
        let script = format!(
            "rm -f /run/{name}.status; setsid bash -c 'echo $$ >/run/{name}.pid; exec {command}' \
             </dev/null >/run/{name}.log 2>&1 & until [ -s /run/{name}.pid ]; do sleep 0.02; done; \
             cat /run/{name}.pid; rm /run/{name}.pid"
        );
        let said = self.must(&script)?;
        said.trim().parse().map_err(|_| {
            io::Error::other(format!("guest {}: no process id in {said}", self.number))
        })
    }

    /// Returns the guest's number, from 1.
    pub fn number(&self) -> usize {
        self.number
    }

    /// Returns the guest's address on the guests' network.
    pub fn address(&self) -> String {
        format!("10.0.0.{}", self.number)
    }
}
