//! Two hosts with a node each on one switch, and clients at the switch.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::common::cpu::Sweep;
use godwit_testkit::Cluster;
use godwit_testkit::cluster::ClusterOptions;
use godwit_testkit::network::{Lan, Namespace};
use godwit_testkit::process::{run, target_dir};

/// Fixed address of the guest.
pub(crate) const GUEST: Ipv4Addr = Ipv4Addr::new(10, 80, 0, 10);
/// MAC address of the guest's card.
pub(super) const MAC: &str = "52:54:00:80:00:10";
/// Taps of the guest's cards on each host.
pub(super) const TAP: &str = Lan::TAP;
pub(super) const SECOND_TAP: &str = "tap1";
/// Addresses of the guest's servers.
pub(super) const WEB: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(GUEST), 80);
const COUNTERS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(GUEST), 8080);
/// Names of the nodes.
pub(crate) const HOSTS: [&str; 2] = ["a", "b"];

/// Packets received and sent by the guest's card, as counted by the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Counters {
    pub(super) received: u64,
    pub(super) sent: u64,
}

/// The cluster, its network and the guest's image, without the machine.
#[derive(Debug)]
pub(crate) struct Site {
    pub(crate) cluster: Cluster,
    pub(super) lan: Lan,
    guest: PathBuf,
}

/// Checks the prerequisites before anything is started.
pub(crate) fn check() -> io::Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Err(io::Error::other(
            "this needs root, for network namespaces and taps: run it again as root, such as `sudo make bench SCENE=net`",
        ));
    }
    for (program, script) in [
        ("ip", "scripts/install-net-peers"),
        ("iperf3", "scripts/install-net-peers"),
        ("wrk", "scripts/install-net-peers"),
        ("qemu-system-x86_64", "scripts/install-qemu"),
    ] {
        if find(program).is_none() {
            return Err(io::Error::other(format!(
                "{program} is not installed: run {script} as root, then this again"
            )));
        }
    }
    Ok(())
}

/// Returns the path of a program found through `PATH`.
pub(super) fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|directory| directory.join(program))
        .find(|file| file.is_file())
}

impl Site {
    pub(crate) fn new() -> io::Result<Self> {
        let guest = guest_image()?;
        let lan = Lan::new(2)?;
        lan.add_taps(SECOND_TAP)?;
        let hosts: Vec<_> = HOSTS
            .into_iter()
            .zip(lan.hosts().iter().map(Some))
            .collect();
        let mut cluster = Cluster::prepare_on(&hosts, ClusterOptions::release()?)?;
        cluster.start_all()?;
        Ok(Self {
            cluster,
            lan,
            guest,
        })
    }

    /// Returns the hosts. Nothing but QEMU, the nodes and testpmd runs there.
    pub(crate) fn hosts(&self) -> Vec<&Namespace> {
        self.lan.hosts().iter().collect()
    }

    /// Returns the namespace of the clients.
    pub(crate) const fn clients(&self) -> &Namespace {
        self.lan.switch()
    }

    pub(crate) fn directory(&self) -> &Path {
        self.cluster.dir()
    }

    /// Returns the path of the guest's kernel.
    pub(crate) fn kernel(&self) -> PathBuf {
        self.guest.join("vmlinux")
    }

    /// Returns the path of the guest's only file system.
    pub(crate) fn initramfs(&self) -> PathBuf {
        self.guest.join("initramfs")
    }

    /// Returns the counters of the guest's first card.
    pub(super) fn counters(&self) -> io::Result<Counters> {
        let table = self.cards()?;
        counted(&table)
            .ok_or_else(|| io::Error::other(format!("the guest has no counters: {table}")))
    }

    /// Returns the number of cards of the guest.
    pub(super) fn count_cards(&self) -> io::Result<usize> {
        Ok(cards(&self.cards()?).count())
    }

    /// Returns the card table of the guest's kernel.
    fn cards(&self) -> io::Result<String> {
        let clients = self.clients();
        std::thread::scope(|scope| {
            let asked = scope.spawn(|| {
                clients.enter()?;
                let mut stream = TcpStream::connect_timeout(&COUNTERS, Duration::from_secs(1))?;
                stream.set_read_timeout(Some(Duration::from_secs(10)))?;
                stream.write_all(b"GET /cgi-bin/counters HTTP/1.0\r\n\r\n")?;
                let mut text = String::new();
                stream.take(1 << 16).read_to_string(&mut text)?;
                Ok(text)
            });
            let answer = asked.join();
            answer.unwrap_or_else(|_| Err(io::Error::other("the guest was not asked")))
        })
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        // Machines outlive their nodes.
        drop(Sweep(self.hosts()));
    }
}

/// Returns the counters of each card in Linux's table of devices.
fn cards(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| {
        let (name, counters) = line.trim().split_once(':')?;
        name.starts_with("eth").then_some(counters)
    })
}

/// Returns the counters of the first card.
fn counted(text: &str) -> Option<Counters> {
    let line = cards(text).next()?;
    let numbers: Vec<u64> = line
        .split_whitespace()
        .filter_map(|number| number.parse().ok())
        .collect();
    Some(Counters {
        received: *numbers.get(1)?,
        sent: *numbers.get(9)?,
    })
}

fn guest_image() -> io::Result<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut script = Command::new(root.join("scripts/build-net-guest"));
    let output = run(script.env("CARGO_TARGET_DIR", target_dir()))?;
    Ok(PathBuf::from(
        String::from_utf8_lossy(&output.stdout).trim(),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_cards_packets_are_counted() {
        let text = "HTTP/1.0 200 OK\r\n\r\nInter-|   Receive     |  Transmit\n \
                    face |bytes packets\n    lo:  1 2 0 0 0 0 0 0 3 4 0 0 0 0 0 0\n  \
                    eth0: 900 10 0 0 0 0 0 0 800 20 0 0 0 0 0 0\n";
        let counters = Counters {
            received: 10,
            sent: 20,
        };
        assert_eq!(counted(text), Some(counters));
        assert_eq!(cards(text).count(), 1);
        assert_eq!(counted("eth0: 1 2"), None);
        assert_eq!(counted("HTTP/1.0 404\r\n"), None);
    }
}
