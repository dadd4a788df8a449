//! NICs of virtual machines in the API.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A NIC of a new VM that its node serves. Either a tap or a bridge is named.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RunNic {
    /// A tap of the node's host, which somebody made and which is up.
    #[serde(default)]
    pub tap: Option<String>,
    /// A bridge of the node's host, for which the node makes a tap and removes it again.
    #[serde(default)]
    pub bridge: Option<String>,
    /// Its MAC address; chosen by the node when left out.
    #[serde(default)]
    #[schema(pattern = "^([0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}$")]
    pub mac: Option<String>,
    /// Pairs of queues; 1 when left out.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 8)]
    pub queues: Option<u16>,
    /// With a bridge that keeps VLANs apart: the VLAN that the guest is in, which sees no tags of it.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 4094)]
    pub vlan: Option<u16>,
    /// With such a bridge: VLANs that the guest is in with their tags, as numbers and ranges with + between them: 5+10-20.
    #[serde(default)]
    pub trunk: Option<String>,
}

/// A NIC with a name of its own, for a virtual machine that somebody else starts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateNic {
    /// Its name, which no other NIC of the node has.
    pub name: String,
    /// What it is.
    pub nic: RunNic,
}

/// A NIC that a node serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Nic {
    /// Its VM's name and its number, `web/0`, or its own name, if it has one.
    pub name: String,
    /// The VM; none of a NIC that has a name of its own.
    pub vm: Option<String>,
    /// The unix socket where the VM's QEMU uses it over vhost-user.
    pub socket: String,
    /// Why it is not served, what keeps its packets from the network, or why the node disconnected the VM's QEMU.
    pub problem: Option<String>,
    /// Its MAC address, which stays the same over moves.
    pub mac: String,
    /// The tap that its packets go through.
    pub tap: String,
    /// The bridge into which the node plugged the tap.
    pub bridge: Option<String>,
    /// What it does with packets: `releasing` lets them pass, `buffering` holds them, `clone` stands still; `unserved` is one
    /// that is not served.
    pub mode: String,
    /// Whether the VM's QEMU is connected to it.
    pub attached: bool,
    /// The guest put something into its rings that makes no sense; it rests until the guest resets it.
    pub broken: bool,
    /// Packets that wait for the guest now.
    pub waiting: u64,
    /// MAC addresses from which the guest sent lately, the last first: a move announces them. Of those in a VLAN it is
    /// said: `52:54:00:12:34:56 in VLAN 5`.
    pub addresses: Vec<String>,
    /// Its pairs of queues.
    pub queues: Vec<NicQueue>,
    /// What happened since the VM was started or the NIC was created, over all moves.
    pub counters: NicCounters,
}

/// A pair of queues of a NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NicQueue {
    /// Whether the guest uses it.
    pub used: bool,
    /// Packets that the guest got by it since the NIC came to this node, or the node started.
    pub received_packets: u64,
    /// Packets that the guest sent by it since then.
    pub sent_packets: u64,
}

/// What happened at a NIC; each number only grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NicCounters {
    /// Packets that the guest got.
    pub received_packets: u64,
    /// Their bytes.
    pub received_bytes: u64,
    /// Packets that the guest sent.
    pub sent_packets: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// Packets that were too large for the guest's buffers.
    pub receive_too_large: u64,
    /// Packets of the guest's that made no sense, or that the tap did not take.
    pub send_refused: u64,
    /// Packets that were held for the guest while it moved.
    pub held: u64,
    /// Packets that were lost because too many were held already.
    pub held_overflow: u64,
    /// Packets for many that reached both nodes of a move, of which the guest got only one.
    pub twins_dropped: u64,
    /// Moves that brought it to another node.
    pub moves: u64,
}
