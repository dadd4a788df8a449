use std::fs::File;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;

use super::command::{Failure, GodwitCommand};
use crate::nbd::NbdTarget;
use crate::process::{Process, cpu_seconds, wait_for};

/// Longest time until a started node answers.
const START_TIMEOUT: Duration = Duration::from_secs(20);

#[derive(Clone, Debug)]
pub struct NodeSpec {
    pub godwit: PathBuf,
    pub name: String,
    /// Data directory.
    pub dir: PathBuf,
    /// Address for other nodes.
    pub listen: SocketAddr,
    /// Address for NBD clients over TCP.
    pub nbd_listen: SocketAddr,
    /// True if NBD clients do without TLS.
    pub nbd_plain: bool,
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

impl NodeSpec {
    /// Gives the node a memory pool.
    pub fn add_memory_pool(&mut self, name: &str, path: &Path) {
        let option = format!("--memory-pool={name}={}", path.display());
        self.options.push(option);
    }

    /// Returns the command that starts the node.
    fn command(&self) -> Command {
        let mut command = match &self.namespace {
            Some(namespace) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", namespace]).arg(&self.godwit);
                command
            }
            None => Command::new(&self.godwit),
        };
        command
            .args(["node", "--name", &self.name, "--data-dir"])
            .arg(&self.dir)
            .args(["--listen", &self.listen.to_string()])
            .args(["--nbd-listen", &self.nbd_listen.to_string()]);
        if self.nbd_plain {
            command.arg("--nbd-plain");
        }
        if self.tls {
            let own = &self.certificate_of;
            for (option, file) in [
                ("--cert", format!("{own}.pem")),
                ("--key", format!("{own}.key")),
                ("--ca", String::from("ca.pem")),
            ] {
                command.arg(option).arg(self.certificates.join(file));
            }
        } else {
            command.arg("--insecure-loopback");
        }
        if self.unencrypted_data {
            command.arg("--unencrypted-data");
        }
        command.args(&self.options);
        for (name, address) in &self.peers {
            command.args(["--peer", &format!("{name}={address}")]);
        }
        if let Some(user) = &self.qemu_user {
            command.args(["--qemu-user", user]);
        }
        for (name, folder) in &self.pools {
            command.args(["--pool", &format!("{name}={}", folder.display())]);
        }
        command.envs(self.environment.iter().cloned());
        command
    }
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
    pub fn start(&mut self, failpoints: &[(&str, &str)]) -> io::Result<()> {
        let log = File::options().create(true).append(true).open(&self.log)?;
        let points = failpoints.iter();
        let points: Vec<String> = points
            .map(|(name, action)| format!("{name}={action}"))
            .collect();
        let mut command = self.spec.command();
        command
            .env("FAILPOINTS", points.join(";"))
            .env("RUST_BACKTRACE", "1");
        command
            .stdin(Stdio::null())
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
        let (name, log) = (&self.spec.name, self.log_tail(40));
        Err(io::Error::other(format!(
            "node '{name}' {problem}; its log:\n{log}"
        )))
    }

    /// Returns the node's name.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

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

    pub fn godwit(&self, args: &[&str]) -> GodwitCommand {
        GodwitCommand::new(&self.spec.godwit, &self.api_socket(), args)
    }

    /// Returns the answer of the API to a `GET` of this path.
    pub fn get(&self, path: &str) -> io::Result<String> {
        let mut api = UnixStream::connect(self.api_socket())?;
        api.set_read_timeout(Some(START_TIMEOUT))?;
        let request = format!("GET {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n");
        api.write_all(request.as_bytes())?;
        let mut answer = String::new();
        api.read_to_string(&mut answer)?;
        let (_, body) = answer.split_once("\r\n\r\n").unwrap_or_default();
        Ok(body.to_owned())
    }

    /// Returns the metrics, in Prometheus' text format.
    pub fn metrics(&self) -> io::Result<String> {
        self.get("/metrics")
    }

    /// Returns the node's description of a disk.
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

    pub fn image(&self, disk: &str) -> io::Result<PathBuf> {
        let shown = self.disk(disk)?;
        let path = shown["path"].as_str();
        path.map(PathBuf::from)
            .ok_or_else(|| io::Error::other(format!("disk '{disk}' shows no path: {shown}")))
    }

    pub fn log_path(&self) -> &Path {
        &self.log
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    pub fn log_tail(&self, lines: usize) -> String {
        let text = self.log();
        let all: Vec<&str> = text.lines().collect();
        all[all.len().saturating_sub(lines)..].join("\n")
    }
}

/// A guard that keeps a node stopped until dropped.
#[derive(Debug)]
pub struct StandsStill(rustix::process::Pid);

impl StandsStill {
    /// Stops the node's process.
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
