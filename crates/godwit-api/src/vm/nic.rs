//! NICs of virtual machines.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A NIC for a new VM, served by the node. Exactly one of `tap` and `bridge` is required.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RunNic {
    /// An existing tap of the node's host, which is up.
    #[serde(default)]
    pub tap: Option<String>,
    /// A bridge of the node's host. The node makes a tap in the bridge, and removes the tap again.
    #[serde(default)]
    pub bridge: Option<String>,
    /// MAC address; chosen by the node if left out.
    #[serde(default)]
    #[schema(pattern = "^([0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}$")]
    pub mac: Option<String>,
    /// Queue pairs; 1 if left out.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 8)]
    pub queues: Option<u16>,
    /// With a VLAN-aware bridge: the VLAN of the guest's untagged frames.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 4094)]
    pub vlan: Option<u16>,
    /// With a VLAN-aware bridge: VLANs of the guest's tagged frames, as numbers and ranges joined by +: 5+10-20.
    #[serde(default)]
    pub trunk: Option<String>,
}

/// A NIC with a name of its own, for a VM that the node does not start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateNic {
    /// Name of the NIC, unique on the node.
    pub name: String,
    /// Settings of the NIC.
    pub nic: RunNic,
}

/// A NIC that a node serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Nic {
    /// Name of the VM and number of the NIC, `web/0`, or the NIC's own name.
    pub name: String,
    /// Name of the VM; absent for a NIC with a name of its own.
    pub vm: Option<String>,
    /// The unix socket at which the VM's QEMU uses the NIC over vhost-user.
    pub socket: String,
    /// The reason why the NIC is not served, why its packets do not reach the network, or why the node disconnected the
    /// VM's QEMU.
    pub problem: Option<String>,
    /// MAC address, which stays the same over moves.
    pub mac: String,
    /// The tap of the NIC.
    pub tap: String,
    /// The bridge to which the node added the tap.
    pub bridge: Option<String>,
    /// Mode of the NIC: `releasing` (packets pass), `buffering` (packets are held), `clone` (nothing moves), or
    /// `unserved`.
    pub mode: String,
    /// True while the VM's QEMU is connected to the NIC.
    pub attached: bool,
    /// True if the NIC is out of service because the guest put invalid entries into a ring, until the guest resets the
    /// NIC.
    pub broken: bool,
    /// Packets that wait for the guest now.
    pub waiting: u64,
    /// Packets of a protected guest that wait until their checkpoint is acknowledged; absent unless packets are held
    /// back so.
    pub held_back: Option<u64>,
    /// MAC addresses from which the guest sent lately, the most recent first. A move announces them. An address in a
    /// VLAN reads `52:54:00:12:34:56 in VLAN 5`.
    pub addresses: Vec<String>,
    /// Queue pairs of the NIC.
    pub queues: Vec<NicQueue>,
    /// Counters since the VM was started or the NIC was created, over all moves.
    pub counters: NicCounters,
}

/// A queue pair of a NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NicQueue {
    /// True while the guest uses the pair.
    pub used: bool,
    /// Packets received by the guest through the pair since the NIC came to this node or the node started.
    pub received_packets: u64,
    /// Packets sent by the guest through the pair since the NIC came to this node or the node started.
    pub sent_packets: u64,
}

/// Counters of a NIC, which only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NicCounters {
    /// Packets received by the guest.
    pub received_packets: u64,
    /// Bytes received by the guest.
    pub received_bytes: u64,
    /// Packets sent by the guest.
    pub sent_packets: u64,
    /// Bytes sent by the guest.
    pub sent_bytes: u64,
    /// Packets that were too large for the guest's buffers.
    pub receive_too_large: u64,
    /// Malformed packets from the guest, and packets refused by the tap.
    pub send_refused: u64,
    /// Packets held for the guest during moves.
    pub held: u64,
    /// Packets lost because too many were held already.
    pub held_overflow: u64,
    /// Packets for many that reached both nodes of a move and were dropped as duplicates.
    pub twins_dropped: u64,
    /// Moves that brought the NIC to another node.
    pub moves: u64,
}
