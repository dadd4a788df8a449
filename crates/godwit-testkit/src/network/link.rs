//! A link between two namespaces with a bandwidth and priorities.

use std::io;
use std::net::Ipv4Addr;

use super::Namespace;

/// Longest burst in bytes that passes at once at 1 Gbit/s: two of the largest segments that TCP hands to an interface,
/// which last a millisecond. A faster link has a burst of the same duration, because the kernel cannot wake up often
/// enough for less.
const BURST: u64 = 128 << 10;
/// The bandwidth of this burst.
const GIGABIT: u64 = 1_000_000_000;
/// Most bytes waiting for the link; TCP keeps much less there.
const QUEUE: u64 = 4 << 20;

/// Two namespaces joined by a pair of virtual interfaces. The left end's sending is held to a bandwidth, and packets
/// marked as urgent go first, strictly.
#[derive(Debug)]
pub struct Link {
    left: Namespace,
    right: Namespace,
}

impl Link {
    /// The name of the interface at either end.
    pub const INTERFACE: &str = "veth0";

    /// Creates both ends. At most `bits_per_second` leave the left end; `None` sets no limit.
    pub fn new(bits_per_second: Option<u64>) -> io::Result<Self> {
        let link = Self {
            left: Namespace::new(Ipv4Addr::new(10, 79, 0, 1))?,
            right: Namespace::new(Ipv4Addr::new(10, 79, 0, 2))?,
        };
        let (name, other) = (Self::INTERFACE, link.right.name());
        link.left.ip(&[
            "link", "add", name, "type", "veth", "peer", "name", name, "netns", other,
        ])?;
        for end in [&link.left, &link.right] {
            let address = format!("{}/24", end.address());
            end.ip(&["addr", "add", &address, "dev", name])?;
            end.ip(&["link", "set", name, "up"])?;
        }
        if let Some(bits_per_second) = bits_per_second {
            narrow(&link.left, bits_per_second)?;
        }
        Ok(link)
    }

    /// Creates a link whose right end is held to this bandwidth, too.
    pub fn both_ways(bits_per_second: u64) -> io::Result<Self> {
        let link = Self::new(Some(bits_per_second))?;
        narrow(&link.right, bits_per_second)?;
        Ok(link)
    }
    /// Returns the bytes carried so far in both directions, headers included.
    pub fn carried_bytes(&self) -> io::Result<u64> {
        self.left.interface_bytes(Self::INTERFACE)
    }

    /// Returns the end whose sending is limited.
    pub const fn left(&self) -> &Namespace {
        &self.left
    }

    /// Returns the other end.
    pub const fn right(&self) -> &Namespace {
        &self.right
    }
}

/// Holds the sending of this end to a bandwidth.
fn narrow(end: &Namespace, bits_per_second: u64) -> io::Result<()> {
    let burst = (BURST * bits_per_second / GIGABIT).max(BURST);
    let (rate, burst) = (format!("{bits_per_second}bit"), burst.to_string());
    let queue = QUEUE.to_string();
    let shape = ["handle", "1:", "tbf", "rate", &rate, "burst", &burst];
    let root = ["qdisc", "add", "dev", Link::INTERFACE, "root"];
    end.tc(&[&root[..], &shape, &["limit", &queue]].concat())?;
    // Three bands by the packet's type of service; the first is emptied before the next.
    let inner = ["parent", "1:1", "handle", "10:", "pfifo_fast"];
    end.tc(&[&root[..4], &inner].concat())
}
