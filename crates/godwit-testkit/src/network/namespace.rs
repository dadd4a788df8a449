//! A network namespace, removed with its handle.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde_json::Value;

use crate::process::{run, wait_for};

/// Directory in which `ip netns` keeps named namespaces.
const NAMED: &str = "/run/netns";
/// Longest time until packets pass a new port of a bridge.
const PORT_COMES: Duration = Duration::from_secs(10);

/// A separate network: only a loopback, until it is linked.
#[derive(Debug)]
pub struct Namespace {
    name: String,
    address: Ipv4Addr,
}

impl Namespace {
    /// Creates a namespace whose link will have this address.
    pub fn new(address: Ipv4Addr) -> io::Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        remove_orphans();
        let name = format!(
            "godwit-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        run(Command::new("ip").args(["netns", "add", &name]))?;
        let namespace = Self { name, address };
        namespace.ip(&["link", "set", "lo", "up"])?;
        Ok(namespace)
    }

    /// Disables IPv6 on interfaces that come up inside from now on. The kernel then sends nothing by itself on them,
    /// such as neighbour discovery and multicast listener reports.
    pub(super) fn leave_out_ipv6(&self) -> io::Result<()> {
        let writing = inside(self, || {
            for of in ["all", "default"] {
                let place = format!("/proc/sys/net/ipv6/conf/{of}/disable_ipv6");
                match std::fs::write(place, "1") {
                    // A kernel without IPv6 has no such file.
                    Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                    _ => {}
                }
            }
            Ok(())
        });
        let written = writing.join();
        written.map_err(|_| io::Error::other("the thread that leaves out IPv6 panicked"))?
    }

    /// Returns the name, as `ip netns` knows the namespace.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the address on the link.
    pub const fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// Runs `ip` with these arguments inside.
    pub(super) fn ip(&self, args: &[&str]) -> io::Result<()> {
        run(Command::new("ip").args(["-n", &self.name]).args(args)).map(drop)
    }

    /// Returns the output of `ip` about an interface inside, or about all of them, with counters and kinds.
    fn links(&self, which: &[&str]) -> io::Result<Vec<Value>> {
        let words = ["-json", "-statistics", "-details", "link", "show"];
        let output = run(Command::new("ip")
            .args(["-n", &self.name])
            .args(words)
            .args(which))?;
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    fn link(&self, interface: &str) -> io::Result<Value> {
        let shown = self.links(&[interface])?.into_iter().next();
        shown.ok_or_else(|| io::Error::other(format!("'{interface}' is not shown")))
    }

    /// Returns the bytes received and sent by an interface inside.
    pub(super) fn interface_bytes(&self, interface: &str) -> io::Result<u64> {
        let shown = self.link(interface)?;
        let bytes = |direction: &str| shown["stats64"][direction]["bytes"].as_u64();
        bytes("rx")
            .zip(bytes("tx"))
            .map(|(received, sent)| received + sent)
            .ok_or_else(|| io::Error::other(format!("'{interface}' shows no bytes: {shown}")))
    }

    /// Waits until the bridge forwards packets by this port. The kernel checks a new port once a second, and drops
    /// packets to the port until then.
    pub(super) fn wait_until_forwarding(&self, port: &str) -> io::Result<()> {
        let forwarding =
            |shown: &Value| shown["linkinfo"]["info_slave_data"]["state"] == "forwarding";
        let come = wait_for(PORT_COMES, || self.link(port).ok().filter(forwarding));
        match come {
            Some(_) => Ok(()),
            None => {
                let shown = self.link(port)?;
                Err(io::Error::other(format!(
                    "'{port}' forwards nothing: {shown}"
                )))
            }
        }
    }

    /// Returns the number of packets dropped by interfaces inside, by interface and direction; without entries of 0.
    pub fn dropped(&self) -> io::Result<BTreeMap<String, u64>> {
        let interfaces = self.links(&[])?;
        let counters = interfaces.iter().flat_map(|interface| {
            let name = interface["ifname"].as_str().unwrap_or_default();
            ["rx", "tx"].map(|direction| {
                let count = interface["stats64"][direction]["dropped"].as_u64();
                (format!("{name}.{direction}"), count.unwrap_or(0))
            })
        });
        Ok(counters.filter(|(_, count)| *count > 0).collect())
    }

    /// Returns a command to run inside, still without the program and the arguments.
    pub fn command(&self) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name]);
        command
    }

    pub fn processes(&self) -> io::Result<Vec<u32>> {
        let inside = std::fs::metadata(Path::new(NAMED).join(&self.name))?.ino();
        let all = std::fs::read_dir("/proc")?.flatten();
        let numbers = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        Ok(numbers
            .filter(|number: &u32| {
                // A process that has just ended counts as outside.
                let place = std::fs::metadata(format!("/proc/{number}/ns/net"));
                place.is_ok_and(|place| place.ino() == inside)
            })
            .collect())
    }

    /// Runs `tc` with these arguments inside.
    pub(super) fn tc(&self, args: &[&str]) -> io::Result<()> {
        run(Command::new("tc").args(["-n", &self.name]).args(args)).map(drop)
    }

    /// Moves the calling thread into the namespace for the rest of the thread's life. New sockets, threads and
    /// processes of the thread belong there from now on.
    pub fn enter(&self) -> io::Result<()> {
        enter(&self.name)
    }
}

fn enter(name: &str) -> io::Result<()> {
    let file = File::open(Path::new(NAMED).join(name))?;
    move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))?;
    Ok(())
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = run(Command::new("ip").args(["netns", "del", &self.name]));
    }
}

/// Starts a thread in the namespace.
pub fn inside<T: Send + 'static>(
    namespace: &Namespace,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> JoinHandle<io::Result<T>> {
    let name = namespace.name().to_owned();
    std::thread::spawn(move || {
        enter(&name)?;
        work()
    })
}

/// Removes the namespaces of an interrupted run.
fn remove_orphans() {
    let Ok(entries) = std::fs::read_dir(NAMED) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let owner = name
            .strip_prefix("godwit-")
            .and_then(|rest| rest.split('-').next());
        if owner.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            let _ = run(Command::new("ip").args(["netns", "del", &name]));
        }
    }
}
