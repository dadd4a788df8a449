//! DPDK's testpmd as the back end of a machine's card. It forwards between vhost-user and its own tap, and polls both
//! without pause.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use godwit_testkit::process::Process;

use super::site::{Site, find};
use crate::common::awaited;

/// Name of testpmd's tap on the first host.
const TAP: &str = "dpdk0";
const PATIENCE: Duration = Duration::from_secs(30);

/// A testpmd that forwards.
#[derive(Debug)]
pub(super) struct Testpmd {
    /// Ends when its standard input closes.
    _process: Process,
}

/// Returns the path of testpmd, if it is installed.
pub(super) fn program() -> Option<PathBuf> {
    find("dpdk-testpmd")
}

/// Returns the path of the socket for QEMU.
pub(super) fn socket(directory: &Path) -> PathBuf {
    directory.join("testpmd.sock")
}

impl Testpmd {
    /// Starts testpmd on the first host and plugs its tap into the bridge.
    pub(super) fn start(site: &Site) -> io::Result<Self> {
        let program = program().ok_or_else(|| io::Error::other("dpdk-testpmd is not installed"))?;
        let socket = socket(site.directory());
        let log = site.directory().join("testpmd.log");
        // Removes the previous round's socket.
        let _ = std::fs::remove_file(&socket);
        let output = std::fs::File::create(&log)?;
        let mut command = site.lan.hosts()[0].command();
        command.arg(program);
        // Ordinary pages: huge pages have to be set aside first, and the guest's memory is QEMU's anyway.
        command.args([
            "--no-huge",
            "-m",
            "512",
            "--no-pci",
            "--no-telemetry",
            "-l",
            "0-1",
        ]);
        command.arg(format!("--file-prefix=godwit{}", std::process::id()));
        command.arg("--vdev");
        command.arg(format!("net_vhost0,iface={},queues=1", socket.display()));
        command.args(["--vdev", &format!("net_tap0,iface={TAP}"), "--"]);
        command.args([
            "--auto-start",
            "--forward-mode=io",
            "--total-num-mbufs=16384",
        ]);
        command.stdin(Stdio::piped());
        command.stdout(output.try_clone()?).stderr(output);
        let process = Process::spawn(&mut command)?;
        let plugged = awaited("the start of dpdk-testpmd", PATIENCE, || {
            socket.exists().then_some(())?;
            site.lan.plug(0, TAP).ok()
        });
        plugged.map_err(|error| {
            let said = std::fs::read_to_string(&log).unwrap_or_default();
            io::Error::other(format!(
                "{error}; leave it out with --only, or look at what it said:\n{said}"
            ))
        })?;
        Ok(Self { _process: process })
    }
}
