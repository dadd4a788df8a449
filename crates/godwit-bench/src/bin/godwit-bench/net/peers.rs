//! The network cards under comparison. The machines differ in nothing but the card.

use std::path::Path;

use clap::ValueEnum;
use serde::Serialize;

use crate::net::site::{MAC, SECOND_TAP, TAP};
use crate::net::testpmd;

/// A network card and its back end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Peer {
    /// QEMU's e1000 on a tap
    E1000,
    /// QEMU's virtio-net on a tap, without vhost
    VirtioNet,
    /// The NIC that a Godwit node serves, on a tap
    Godwit,
    /// DPDK's testpmd behind vhost-user, on a tap; it does not move
    Testpmd,
    /// A card that is unplugged for the move while QEMU's virtio-net stands in for it
    Failover,
}

impl Peer {
    pub(crate) const ALL: [Self; 5] = [
        Self::E1000,
        Self::VirtioNet,
        Self::Godwit,
        Self::Testpmd,
        Self::Failover,
    ];

    /// Returns the name in the report and for `--only`.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::E1000 => "e1000",
            Self::VirtioNet => "virtio-net",
            Self::Godwit => "godwit",
            Self::Testpmd => "testpmd",
            Self::Failover => "failover",
        }
    }

    /// Returns true if the peer's machine moves. testpmd is compared in the steady state only.
    pub(crate) const fn moves(self) -> bool {
        !matches!(self, Self::Testpmd)
    }

    /// Returns true if the peer is compared under steady load. `failover` has an emulated card in place of a
    /// passed-through one, which tells nothing about a real card.
    pub(crate) const fn is_measured_steadily(self) -> bool {
        !matches!(self, Self::Failover)
    }

    /// Returns the number of network interfaces in the guest: the driver adds a third for two cards with one address.
    pub(crate) const fn cards_in_guest(self) -> usize {
        match self {
            Self::Failover => 3,
            _ => 1,
        }
    }

    /// Returns the reason for leaving the peer out, if there is one.
    pub(crate) fn missing(self) -> Option<String> {
        (self == Self::Testpmd && testpmd::program().is_none()).then(|| {
            "dpdk-testpmd is not installed: run scripts/install-net-peers as root; where this Debian has no \
             dpdk-dev, it cannot be compared"
                .to_owned()
        })
    }

    /// Returns the `--nic` of `godwit vm run`, if a node serves the card.
    pub(crate) fn nic(self) -> Option<String> {
        (self == Self::Godwit).then(|| format!("tap={TAP},mac={MAC}"))
    }

    /// Returns QEMU's arguments for the card, empty if the node passes them. testpmd's socket is in `directory`.
    pub(crate) fn qemu_arguments(self, directory: &Path) -> Vec<String> {
        let tap = |id: &str, name: &str| {
            format!("tap,id={id},ifname={name},script=no,downscript=no,vhost=off")
        };
        match self {
            Self::Godwit => Vec::new(),
            Self::E1000 => vec![
                "-netdev".to_owned(),
                tap("net0", TAP),
                "-device".to_owned(),
                format!("e1000,netdev=net0,mac={MAC},romfile="),
            ],
            Self::VirtioNet => vec![
                "-netdev".to_owned(),
                tap("net0", TAP),
                "-device".to_owned(),
                format!("virtio-net-pci,netdev=net0,mac={MAC},romfile="),
            ],
            Self::Testpmd => vec![
                "-chardev".to_owned(),
                format!(
                    "socket,id=testpmd,path={}",
                    testpmd::socket(directory).display()
                ),
                "-netdev".to_owned(),
                "vhost-user,id=net0,chardev=testpmd".to_owned(),
                "-device".to_owned(),
                format!("virtio-net-pci,netdev=net0,mac={MAC},romfile="),
            ],
            Self::Failover => vec![
                "-netdev".to_owned(),
                tap("net0", TAP),
                "-device".to_owned(),
                format!("virtio-net-pci,id=standby,netdev=net0,mac={MAC},failover=on,romfile="),
                "-device".to_owned(),
                "pcie-root-port,id=primary-port,bus=pcie.0,chassis=9,slot=9".to_owned(),
                "-netdev".to_owned(),
                tap("net1", SECOND_TAP),
                "-device".to_owned(),
                format!(
                    "e1000e,id=primary,netdev=net1,mac={MAC},bus=primary-port,failover_pair_id=standby,romfile="
                ),
            ],
        }
    }
}
