//! Features of virtio-net, one bit each.

use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::bindings::virtio_net as bits;

/// The driver speaks virtio 1.0 or later; its header has 12 bytes.
pub(in crate::device) const VERSION_1: u64 = 1 << VIRTIO_F_VERSION_1;
/// A packet for the guest may span several buffers.
pub(in crate::device) const MERGEABLE: u64 = 1 << bits::VIRTIO_NET_F_MRG_RXBUF;
/// The guest takes packets without a checksum.
pub(in crate::device) const GUEST_CSUM: u64 = 1 << bits::VIRTIO_NET_F_GUEST_CSUM;
/// The guest takes unsegmented TCP over IPv4.
pub(in crate::device) const GUEST_TSO4: u64 = 1 << bits::VIRTIO_NET_F_GUEST_TSO4;
/// The guest takes unsegmented TCP over IPv6.
pub(in crate::device) const GUEST_TSO6: u64 = 1 << bits::VIRTIO_NET_F_GUEST_TSO6;
/// The guest takes unsegmented TCP packets with congestion marks.
pub(in crate::device) const GUEST_ECN: u64 = 1 << bits::VIRTIO_NET_F_GUEST_ECN;

/// The guest announces itself when the front end asks for an announcement, including its IP addresses and multicast
/// groups, which only the guest knows. QEMU asks after each move.
pub(in crate::device) const GUEST_ANNOUNCE: u64 = 1 << bits::VIRTIO_NET_F_GUEST_ANNOUNCE;

/// The guest may use several queue pairs.
pub(in crate::device) const SEVERAL_PAIRS: u64 = 1 << bits::VIRTIO_NET_F_MQ;

/// Features offered beside the transport features of every device. The kernel completes checksums and segmentation of
/// sent packets.
pub(in crate::device) const OFFERED: u64 = MERGEABLE
    | GUEST_CSUM
    | GUEST_TSO4
    | GUEST_TSO6
    | GUEST_ECN
    | GUEST_ANNOUNCE
    | 1 << bits::VIRTIO_NET_F_CSUM
    | 1 << bits::VIRTIO_NET_F_HOST_TSO4
    | 1 << bits::VIRTIO_NET_F_HOST_TSO6
    | 1 << bits::VIRTIO_NET_F_HOST_ECN;
