//! The network cards under comparison. The machines differ in nothing but the card.

use std::path::Path;

use clap::ValueEnum;

use super::site::{MAC, SECOND_TAP, TAP};
use super::testpmd;

/// A network card and its back end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
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
    pub(super) const fn moves(self) -> bool {
        !matches!(self, Self::Testpmd)
    }

    /// Returns true if the peer is compared under steady load. `failover` has an emulated card in place of a
    /// passed-through one, which tells nothing about a real card.
    pub(super) const fn is_measured_steadily(self) -> bool {
        !matches!(self, Self::Failover)
    }

    /// Returns the number of network interfaces in the guest: the driver adds a third for two cards with one address.
    pub(super) const fn cards_in_guest(self) -> usize {
        match self {
            Self::Failover => 3,
            _ => 1,
        }
    }

    /// Returns the reason for leaving the peer out, if there is one.
    pub(super) fn missing(self) -> Option<String> {
        (self == Self::Testpmd && testpmd::program().is_none()).then(|| {
            "dpdk-testpmd is not installed: run scripts/install-net-peers as root; where this Debian has no \
             dpdk-dev, it cannot be compared"
                .to_owned()
        })
    }

    /// Returns the `--nic` of `godwit vm run`, if a node serves the card.
    pub(super) fn nic(self) -> Option<String> {
        (self == Self::Godwit).then(|| format!("tap={TAP},mac={MAC}"))
    }

    /// Returns QEMU's arguments for the card, empty if the node passes them. testpmd's socket is in `directory`.
    pub(super) fn qemu_arguments(self, directory: &Path) -> Vec<String> {
        let tap = |id: &str, name: &str| {
            format!("-netdev tap,id={id},ifname={name},script=no,downscript=no,vhost=off")
        };
        let virtio = format!("-device virtio-net-pci,netdev=net0,mac={MAC},romfile=");
        let words = match self {
            Self::Godwit => String::new(),
            Self::E1000 => {
                format!(
                    "{} -device e1000,netdev=net0,mac={MAC},romfile=",
                    tap("net0", TAP)
                )
            }
            Self::VirtioNet => format!("{} {virtio}", tap("net0", TAP)),
            Self::Testpmd => format!(
                "-chardev socket,id=testpmd,path={} -netdev vhost-user,id=net0,chardev=testpmd {virtio}",
                testpmd::socket(directory).display()
            ),
            Self::Failover => format!(
                "{} -device virtio-net-pci,id=standby,netdev=net0,mac={MAC},failover=on,romfile= \
                 -device pcie-root-port,id=primary-port,bus=pcie.0,chassis=9,slot=9 {} \
                 -device e1000e,id=primary,netdev=net1,mac={MAC},bus=primary-port,failover_pair_id=standby,romfile=",
                tap("net0", TAP),
                tap("net1", SECOND_TAP)
            ),
        };
        words.split_whitespace().map(str::to_owned).collect()
    }
}
