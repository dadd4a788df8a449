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

/// How long a node may take to answer after it started.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// What a node is started with.
#[derive(Clone, Debug)]
pub struct NodeSpec {
    /// The program.
    pub godwit: PathBuf,
    /// Its name.
    pub name: String,
    /// Its data directory.
    pub dir: PathBuf,
    /// Where other nodes connect.
    pub listen: SocketAddr,
    /// Where NBD clients connect over TCP.
    pub nbd_listen: SocketAddr,
    /// Whether they do without TLS.
    pub nbd_plain: bool,
    /// Where the certificates are.
    pub certificates: PathBuf,
    /// Whose certificate it shows: its own unless the test is about that.
    pub certificate_of: String,
    /// Whether nodes talk over TLS.
    pub tls: bool,
    /// Whether data may pass unencrypted to nodes that allow it, too.
    pub unencrypted_data: bool,
    /// Further options of `godwit node`.
    pub options: Vec<String>,
    /// Variables of its environment, beside those that it inherits.
    pub environment: Vec<(String, String)>,
    /// The other nodes and their addresses.
    pub peers: Vec<(String, SocketAddr)>,
    /// Its pools and their folders.
    pub pools: Vec<(String, PathBuf)>,
    /// The user that its QEMUs run as, if that is not its own.
    pub qemu_user: Option<String>,
    /// The network namespace it runs in, unless it runs in that of its starter.
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
    /// A node that does not run yet.
    ///
    /// # Errors
    /// When its directory cannot be made.
    pub fn new(spec: NodeSpec) -> io::Result<Self> {
        std::fs::create_dir_all(&spec.dir)?;
        let log = spec.dir.with_extension("log");
        Ok(Self {
            spec,
            log,
            process: None,
        })
    }

    /// Starts it with these fail points (name and action) and waits until its API answers.
    ///
    /// # Errors
    /// When it does not come up, with its log.
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

    /// Its name.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// What it is started with.
    pub fn spec(&self) -> &NodeSpec {
        &self.spec
    }

    /// What it is started with, to be changed before the next start.
    pub fn spec_mut(&mut self) -> &mut NodeSpec {
        &mut self.spec
    }

    /// Its process id while it runs.
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(Process::id)
    }

    /// Whether its process is there.
    pub fn alive(&mut self) -> bool {
        self.process
            .as_mut()
            .is_some_and(|process| process.ended().is_none())
    }

    /// CPU seconds that its process has used; 0 when it does not run.
    pub fn cpu_seconds(&self) -> f64 {
        self.pid().and_then(cpu_seconds).unwrap_or(0.0)
    }

    /// Kills it with `SIGKILL`.
    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill();
        }
    }

    /// Asks it to end with `SIGTERM` and waits.
    ///
    /// # Errors
    /// When it does not end in time, or not with exit code 0.
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

    /// A `godwit` command for this node.
    pub fn godwit(&self, args: &[&str]) -> GodwitCommand {
        GodwitCommand::new(&self.spec.godwit, &self.api_socket(), args)
    }

    /// What a `godwit` command for this node that is refused says.
    ///
    /// # Panics
    /// When it is done.
    pub fn refusal(&self, args: &[&str]) -> String {
        match self.godwit(args).text() {
            Err(refused) => refused.to_string(),
            Ok(done) => panic!("{args:?} is done: {done}"),
        }
    }

    /// Its metrics, in Prometheus' text format.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn metrics(&self) -> io::Result<String> {
        let mut api = UnixStream::connect(self.api_socket())?;
        let request = "GET /metrics HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n";
        api.write_all(request.as_bytes())?;
        let mut metrics = String::new();
        api.read_to_string(&mut metrics)?;
        Ok(metrics)
    }

    /// What it says about a disk.
    ///
    /// # Errors
    /// When it does not know the disk or does not answer.
    pub fn disk(&self, disk: &str) -> Result<Value, Failure> {
        self.godwit(&["disk", "show", disk]).json()
    }

    /// The disk's state as the API spells it; "unknown" when the node has no such disk.
    pub fn disk_state(&self, disk: &str) -> String {
        let state = self
            .disk(disk)
            .ok()
            .and_then(|disk| disk["state"].as_str().map(str::to_owned));
        state.unwrap_or_else(|| "unknown".to_owned())
    }

    /// The unix socket of its API.
    pub fn api_socket(&self) -> PathBuf {
        self.spec.dir.join("godwit.sock")
    }

    /// Where the disk is served on its unix socket.
    pub fn nbd(&self, disk: &str) -> NbdTarget {
        NbdTarget::unix(self.spec.dir.join("nbd.sock"), disk)
    }

    /// Where the disk is served over TCP.
    pub fn nbd_tcp(&self, disk: &str) -> NbdTarget {
        NbdTarget::tcp(self.spec.nbd_listen, disk)
    }

    /// The unix socket where a virtual machine uses the disk.
    pub fn vhost_socket(&self, disk: &str) -> PathBuf {
        self.spec.dir.join("disks").join(format!("{disk}.vhost"))
    }

    /// The image of a disk.
    ///
    /// # Errors
    /// When the node does not know the disk.
    pub fn image(&self, disk: &str) -> io::Result<PathBuf> {
        let shown = self.disk(disk)?;
        let path = shown["path"].as_str();
        path.map(PathBuf::from)
            .ok_or_else(|| io::Error::other(format!("disk '{disk}' shows no path: {shown}")))
    }

    /// Its log.
    pub fn log_path(&self) -> &Path {
        &self.log
    }

    /// The last lines of its log.
    pub fn log_tail(&self, lines: usize) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let all: Vec<&str> = text.lines().collect();
        all[all.len().saturating_sub(lines)..].join("\n")
    }
}

/// A node that was stopped, until this is dropped.
#[derive(Debug)]
pub struct StandsStill(rustix::process::Pid);

impl StandsStill {
    /// Stops the node's process.
    ///
    /// # Panics
    /// When it does not run.
    pub fn new(node: &Node) -> Self {
        let pid = node.pid().expect("it runs") as i32;
        let pid = rustix::process::Pid::from_raw(pid).expect("a process");
        rustix::process::kill_process(pid, rustix::process::Signal::STOP).expect("it runs");
        Self(pid)
    }
}

impl Drop for StandsStill {
    fn drop(&mut self) {
        // A node that has ended needs no leave to go on.
        let _ = rustix::process::kill_process(self.0, rustix::process::Signal::CONT);
    }
}
