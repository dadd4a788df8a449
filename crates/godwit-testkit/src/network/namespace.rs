//! A network namespace that goes with its handle.

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

/// Where `ip netns` keeps the namespaces that have a name.
const NAMED: &str = "/run/netns";
/// How long a port of a bridge may take until packets pass by it.
const PORT_COMES: Duration = Duration::from_secs(10);

/// A network of its own: only its loopback, until it is linked.
#[derive(Debug)]
pub struct Namespace {
    name: String,
    address: Ipv4Addr,
}

impl Namespace {
    /// Makes one whose link will have this address.
    ///
    /// # Errors
    /// When `ip netns` fails, which it does without root.
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

    /// Interfaces that come up inside from now on have no IPv6: the kernel sends nothing by itself on them, such as who is
    /// there and which groups are listened to.
    ///
    /// # Errors
    /// Without root.
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

    /// Its name, as `ip netns` knows it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its address on the link.
    pub const fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// Runs `ip` with these arguments inside.
    pub(super) fn ip(&self, args: &[&str]) -> io::Result<()> {
        run(Command::new("ip").args(["-n", &self.name]).args(args)).map(drop)
    }

    /// What `ip` shows of an interface inside, or of all of them, with what it counted and what kind it is.
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

    /// Bytes that an interface inside has received and sent.
    pub(super) fn interface_bytes(&self, interface: &str) -> io::Result<u64> {
        let shown = self.link(interface)?;
        let bytes = |direction: &str| shown["stats64"][direction]["bytes"].as_u64();
        bytes("rx")
            .zip(bytes("tx"))
            .map(|(received, sent)| received + sent)
            .ok_or_else(|| io::Error::other(format!("'{interface}' shows no bytes: {shown}")))
    }

    /// Waits until the bridge lets packets pass by a port of its: the kernel looks at a port that has just come up once in a
    /// second, and drops what is to leave by it until then.
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

    /// Packets that the interfaces inside have dropped, by interface and direction: those that have dropped any.
    ///
    /// # Errors
    /// When `ip` fails.
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

    /// A command that runs inside once the program and its arguments were added.
    pub fn command(&self) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name]);
        command
    }

    /// The processes that are inside.
    ///
    /// # Errors
    /// When `/proc` cannot be read.
    pub fn processes(&self) -> io::Result<Vec<u32>> {
        let inside = std::fs::metadata(Path::new(NAMED).join(&self.name))?.ino();
        let all = std::fs::read_dir("/proc")?.flatten();
        let numbers = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        Ok(numbers
            .filter(|number: &u32| {
                // Of one that has just ended nobody knows.
                let place = std::fs::metadata(format!("/proc/{number}/ns/net"));
                place.is_ok_and(|place| place.ino() == inside)
            })
            .collect())
    }

    /// Runs `tc` with these arguments inside.
    pub(super) fn tc(&self, args: &[&str]) -> io::Result<()> {
        run(Command::new("tc").args(["-n", &self.name]).args(args)).map(drop)
    }

    /// Moves the calling thread into it for the rest of the thread's life: sockets that it opens from now on belong
    /// there, and so do the threads and processes that it starts.
    ///
    /// # Errors
    /// Without root.
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

/// A thread that lives in the namespace.
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

/// Removes what an interrupted run left behind.
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
