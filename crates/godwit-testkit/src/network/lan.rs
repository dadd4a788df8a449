//! A network of hosts on one switch, for machines that move between the hosts.

use std::io;
use std::net::Ipv4Addr;

use super::{Capture, Namespace};

/// Name of the bridge in each namespace.
const BRIDGE: &str = "br0";

/// Hosts joined by a switch. The switch is a namespace, too, and clients run there. Each host has a bridge `br0` with
/// an address, the uplink to the switch, and a tap `tap0` for a virtual machine. No namespace has IPv6, so every packet
/// on the network was sent on purpose.
#[derive(Debug)]
pub struct Lan {
    switch: Namespace,
    hosts: Vec<Namespace>,
}

impl Lan {
    /// The tap of each host.
    pub const TAP: &str = "tap0";
    /// The bridge of each host.
    pub const BRIDGE: &str = BRIDGE;

    /// Creates a network `10.80.0.0/24` with this many hosts, which are .1, .2 and so on.
    pub fn new(hosts: u8) -> io::Result<Self> {
        let switch = Namespace::new(Ipv4Addr::new(10, 80, 0, 254))?;
        add_bridge(&switch)?;
        let mut lan = Self {
            switch,
            hosts: Vec::new(),
        };
        for number in 1..=hosts {
            let host = Namespace::new(Ipv4Addr::new(10, 80, 0, number))?;
            add_bridge(&host)?;
            // A fixed address, as on a host set up with care. Otherwise the bridge's address changes with its ports,
            // and peers of the host keep the old address for a while.
            let address = format!("52:54:00:80:01:{number:02x}");
            host.ip(&["link", "set", BRIDGE, "address", &address])?;
            let port = format!("port{number}");
            let switch = &lan.switch;
            host.ip(&[
                "link",
                "add",
                "up0",
                "type",
                "veth",
                "peer",
                "name",
                &port,
                "netns",
                switch.name(),
            ])?;
            switch.ip(&["link", "set", &port, "master", BRIDGE, "up"])?;
            host.ip(&["link", "set", "up0", "master", BRIDGE, "up"])?;
            lan.hosts.push(host);
        }
        for (host, number) in lan.hosts.iter().zip(1..) {
            host.wait_until_forwarding("up0")?;
            lan.switch.wait_until_forwarding(&format!("port{number}"))?;
        }
        lan.add_taps(Self::TAP)?;
        Ok(lan)
    }

    /// Creates one more tap of this name on each host.
    pub fn add_taps(&self, name: &str) -> io::Result<()> {
        for host in &self.hosts {
            host.ip(&["tuntap", "add", name, "mode", "tap"])?;
            plug(host, name)?;
        }
        Ok(())
    }

    /// Captures the frames that the switch sends to one more of its ports.
    pub fn capture(&self) -> io::Result<Capture> {
        const PORT: &str = "capture0";
        self.switch.ip(&["tuntap", "add", PORT, "mode", "tap"])?;
        // Higher than the addresses of other ports, so that the bridge keeps its own.
        let address = ["address", "fe:ff:ff:ff:ff:ff"];
        self.switch
            .ip(&[&["link", "set", PORT][..], &address].concat())?;
        let capture = Capture::start(&self.switch, PORT)?;
        plug(&self.switch, PORT)?;
        self.switch.wait_until_forwarding(PORT)?;
        Ok(capture)
    }

    /// Plugs an existing interface of a host into the host's bridge.
    pub fn plug(&self, host: usize, interface: &str) -> io::Result<()> {
        let host = self.hosts.get(host);
        plug(
            host.ok_or_else(|| io::Error::other("no such host"))?,
            interface,
        )
    }

    /// Plugs a port with the address of an ordinary card into the switch's bridge, for virtual machines on the switch
    /// itself: a bridge takes the lowest address of its ports.
    pub fn add_card(&self) -> io::Result<()> {
        let switch = &self.switch;
        switch.ip(&[
            "link",
            "add",
            "card0",
            "address",
            "52:54:00:80:00:01",
            "type",
            "veth",
            "peer",
            "name",
            "cable0",
        ])?;
        switch.ip(&["link", "set", "cable0", "up"])?;
        switch.ip(&["link", "set", "card0", "master", BRIDGE, "up"])
    }

    /// Returns the switch, where clients run.
    pub const fn switch(&self) -> &Namespace {
        &self.switch
    }

    pub fn hosts(&self) -> &[Namespace] {
        &self.hosts
    }
}

fn plug(host: &Namespace, interface: &str) -> io::Result<()> {
    host.ip(&["link", "set", interface, "master", BRIDGE, "up"])
}

fn add_bridge(namespace: &Namespace) -> io::Result<()> {
    namespace.leave_out_ipv6()?;
    namespace.ip(&[
        "link",
        "add",
        BRIDGE,
        "type",
        "bridge",
        "forward_delay",
        "0",
        "mcast_snooping",
        "0",
    ])?;
    let address = format!("{}/24", namespace.address());
    namespace.ip(&["addr", "add", &address, "dev", BRIDGE])?;
    namespace.ip(&["link", "set", BRIDGE, "up"])
}
