use std::fs::File;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;

use super::command::{Failure, GodwitCommand};
use crate::nbd::NbdTarget;
use crate::process::{Process, cpu_seconds, wait_for};

/// Longest time until a started node answers.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// The setup of a node.
#[derive(Clone, Debug)]
pub struct NodeSpec {
    /// The program.
    pub godwit: PathBuf,
    /// Name of the node.
    pub name: String,
    /// Data directory.
    pub dir: PathBuf,
    /// Address for other nodes.
    pub listen: SocketAddr,
    /// Address for NBD clients over TCP.
    pub nbd_listen: SocketAddr,
    /// True if NBD clients do without TLS.
    pub nbd_plain: bool,
    /// Folder of the certificates.
    pub certificates: PathBuf,
    /// Name in the certificate to present: the node's own, except in tests of certificates.
    pub certificate_of: String,
    /// True if nodes talk over TLS.
    pub tls: bool,
    /// True if data may also pass unencrypted to nodes with the same permission.
    pub unencrypted_data: bool,
    /// Further options of `godwit node`.
    pub options: Vec<String>,
    /// Environment variables, beside the inherited ones.
    pub environment: Vec<(String, String)>,
    /// The other nodes and their addresses.
    pub peers: Vec<(String, SocketAddr)>,
    /// Storage pools and their folders.
    pub pools: Vec<(String, PathBuf)>,
    /// User of the node's QEMUs, if not the node's own.
    pub qemu_user: Option<String>,
    /// Network namespace of the node, if not the parent's.
    pub namespace: Option<String>,
}

/// A node: its data directory, and its process while it runs.
#[derive(Debug)]
pub struct Node {
    spec: NodeSpec,
    log: PathBuf,
    process: Option<Process>,
}

impl Node {
    /// Creates a node without starting a process.
    ///
    /// # Errors
    /// If the node's directory cannot be made.
    pub fn new(spec: NodeSpec) -> io::Result<Self> {
        std::fs::create_dir_all(&spec.dir)?;
        let log = spec.dir.with_extension("log");
        Ok(Self {
            spec,
            log,
            process: None,
        })
    }

    /// Starts the node with these fail points (name and action) and waits until the API answers.
    ///
    /// # Errors
    /// If the node does not come up; the error has the log.
    pub fn start(&mut self, failpoints: &[(&str, &str)]) -> io::Result<()> {
        let spec = &self.spec;
        let log = File::options().create(true).append(true).open(&self.log)?;
        let mut command = match &spec.namespace {
            Some(namespace) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", namespace]).arg(&spec.godwit);
                command
            }
            None => Command::new(&spec.godwit),
        };
        command
            .args(["node", "--name", &spec.name, "--data-dir"])
            .arg(&spec.dir)
            .args(["--listen", &spec.listen.to_string()])
            .args(["--nbd-listen", &spec.nbd_listen.to_string()]);
        if spec.nbd_plain {
            command.arg("--nbd-plain");
        }
        if spec.tls {
            let file = |name: String| spec.certificates.join(name);
            command
                .arg("--cert")
                .arg(file(format!("{}.pem", spec.certificate_of)));
            command
                .arg("--key")
                .arg(file(format!("{}.key", spec.certificate_of)));
            command.arg("--ca").arg(file("ca.pem".to_owned()));
        } else {
            command.arg("--insecure-loopback");
        }
        if spec.unencrypted_data {
            command.arg("--unencrypted-data");
        }
        command.args(&spec.options);
        for (name, address) in &spec.peers {
            command.args(["--peer", &format!("{name}={address}")]);
        }
        if let Some(user) = &spec.qemu_user {
            command.args(["--qemu-user", user]);
        }
        for (name, folder) in &spec.pools {
            command.args(["--pool", &format!("{name}={}", folder.display())]);
        }
        let points: Vec<String> = failpoints
            .iter()
            .map(|(name, action)| format!("{name}={action}"))
            .collect();
        command.envs(spec.environment.iter().cloned());
        command
            .env("FAILPOINTS", points.join(";"))
            .env("RUST_BACKTRACE", "1");
        command
            .stdin(std::process::Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        let mut process = Process::spawn(&mut command)?;
        let healthy = wait_for(START_TIMEOUT, || match process.ended() {
            Some(status) => Some(Err(format!("ended with {status}"))),
            None => self.godwit(&["disk", "list"]).json().ok().map(|_| Ok(())),
        });
        let problem = match healthy {
            Some(Ok(())) => {
                self.process = Some(process);
                return Ok(());
            }
            Some(Err(ended)) => ended,
            None => format!("did not answer within {START_TIMEOUT:?}"),
        };
        let name = &self.spec.name;
        Err(io::Error::other(format!(
            "node '{name}' {problem}; its log:\n{}",
            self.log_tail(40)
        )))
    }

    /// Returns the node's name.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// Returns the setup.
    pub fn spec(&self) -> &NodeSpec {
        &self.spec
    }

    /// Returns the setup, to be changed before the next start.
    pub fn spec_mut(&mut self) -> &mut NodeSpec {
        &mut self.spec
    }

    /// Returns the process id while the node runs.
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(Process::id)
    }

    /// Returns true while the process exists.
    pub fn alive(&mut self) -> bool {
        self.process
            .as_mut()
            .is_some_and(|process| process.ended().is_none())
    }

    /// Returns the CPU seconds used by the process; 0 if the node does not run.
    pub fn cpu_seconds(&self) -> f64 {
        self.pid().and_then(cpu_seconds).unwrap_or(0.0)
    }

    /// Kills the node with `SIGKILL`.
    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill();
        }
    }

    /// Asks the node to end with `SIGTERM` and waits.
    ///
    /// # Errors
    /// If the node does not end in time, or not with exit code 0.
    pub fn terminate(&mut self, timeout: Duration) -> io::Result<()> {
        let Some(mut process) = self.process.take() else {
            return Ok(());
        };
        process.signal(Signal::TERM);
        let status = process.wait(timeout)?;
        if status.success() {
            return Ok(());
        }
        Err(io::Error::other(format!(
            "node '{}' ended with {status}",
            self.spec.name
        )))
    }

    /// Returns a `godwit` command for this node.
    pub fn godwit(&self, args: &[&str]) -> GodwitCommand {
        GodwitCommand::new(&self.spec.godwit, &self.api_socket(), args)
    }

    /// Returns the message with which a `godwit` command for this node is refused.
    ///
    /// # Panics
    /// If the command succeeds.
    pub fn refusal(&self, args: &[&str]) -> String {
        match self.godwit(args).text() {
            Err(refused) => refused.to_string(),
            Ok(done) => panic!("{args:?} is done: {done}"),
        }
    }

    /// Returns the metrics, in Prometheus' text format.
    ///
    /// # Errors
    /// If the node does not answer.
    pub fn metrics(&self) -> io::Result<String> {
        let mut api = UnixStream::connect(self.api_socket())?;
        let request = "GET /metrics HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n";
        api.write_all(request.as_bytes())?;
        let mut metrics = String::new();
        api.read_to_string(&mut metrics)?;
        Ok(metrics)
    }

    /// Returns the node's description of a disk.
    ///
    /// # Errors
    /// If the node does not know the disk or does not answer.
    pub fn disk(&self, disk: &str) -> Result<Value, Failure> {
        self.godwit(&["disk", "show", disk]).json()
    }

    /// Returns the disk's state as the API spells it; "unknown" if the node has no such disk.
    pub fn disk_state(&self, disk: &str) -> String {
        let state = self
            .disk(disk)
            .ok()
            .and_then(|disk| disk["state"].as_str().map(str::to_owned));
        state.unwrap_or_else(|| "unknown".to_owned())
    }

    /// Returns the unix socket of the API.
    pub fn api_socket(&self) -> PathBuf {
        self.spec.dir.join("godwit.sock")
    }

    /// Returns the disk's NBD export on the unix socket.
    pub fn nbd(&self, disk: &str) -> NbdTarget {
        NbdTarget::unix(self.spec.dir.join("nbd.sock"), disk)
    }

    /// Returns the disk's NBD export over TCP.
    pub fn nbd_tcp(&self, disk: &str) -> NbdTarget {
        NbdTarget::tcp(self.spec.nbd_listen, disk)
    }

    /// Returns the unix socket at which a virtual machine uses the disk.
    pub fn vhost_socket(&self, disk: &str) -> PathBuf {
        self.spec.dir.join("disks").join(format!("{disk}.vhost"))
    }

    /// Returns the image of a disk.
    ///
    /// # Errors
    /// If the node does not know the disk.
    pub fn image(&self, disk: &str) -> io::Result<PathBuf> {
        let shown = self.disk(disk)?;
        let path = shown["path"].as_str();
        path.map(PathBuf::from)
            .ok_or_else(|| io::Error::other(format!("disk '{disk}' shows no path: {shown}")))
    }

    /// Returns the path of the log.
    pub fn log_path(&self) -> &Path {
        &self.log
    }

    /// Returns the last lines of the log.
    pub fn log_tail(&self, lines: usize) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let all: Vec<&str> = text.lines().collect();
        all[all.len().saturating_sub(lines)..].join("\n")
    }
}

/// A guard that keeps a node stopped until dropped.
#[derive(Debug)]
pub struct StandsStill(rustix::process::Pid);

impl StandsStill {
    /// Stops the node's process.
    ///
    /// # Panics
    /// If the node does not run.
    pub fn new(node: &Node) -> Self {
        let pid = node.pid().expect("it runs") as i32;
        let pid = rustix::process::Pid::from_raw(pid).expect("a process");
        rustix::process::kill_process(pid, rustix::process::Signal::STOP).expect("it runs");
        Self(pid)
    }
}

impl Drop for StandsStill {
    fn drop(&mut self) {
        // A dead node needs no signal.
        let _ = rustix::process::kill_process(self.0, rustix::process::Signal::CONT);
    }
}
