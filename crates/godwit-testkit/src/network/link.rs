//! A link between two namespaces with a bandwidth and priorities.

use std::io;
use std::net::Ipv4Addr;

use super::Namespace;

/// Longest burst that passes at once: two of the largest segments that TCP hands to an interface.
const BURST: &str = "128k";
/// What may wait for the link; TCP keeps much less there.
const QUEUE: &str = "4m";

/// Two namespaces joined by a pair of virtual interfaces. What leaves the left one is held to a
/// bandwidth, and what it marks as urgent goes first, strictly.
#[derive(Debug)]
pub struct Link {
    left: Namespace,
    right: Namespace,
}

impl Link {
    /// The name of the interface at either end.
    pub const INTERFACE: &str = "veth0";

    /// Makes both ends; `bits_per_second` leave the left one at most.
    ///
    /// # Errors
    /// When `ip` or `tc` fails, which they do without root.
    pub fn new(bits_per_second: u64) -> io::Result<Self> {
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
        let rate = format!("{bits_per_second}bit");
        let shape = ["handle", "1:", "tbf", "rate", &rate, "burst", BURST];
        let root = ["qdisc", "add", "dev", name, "root"];
        link.left
            .tc(&[&root[..], &shape, &["limit", QUEUE]].concat())?;
        // Three bands by the packet's type of service; the first is emptied before the next.
        let inner = ["parent", "1:1", "handle", "10:", "pfifo_fast"];
        link.left.tc(&[&root[..4], &inner].concat())?;
        Ok(link)
    }

    /// The end whose sending is limited.
    pub const fn left(&self) -> &Namespace {
        &self.left
    }

    /// The other end.
    pub const fn right(&self) -> &Namespace {
        &self.right
    }
}
