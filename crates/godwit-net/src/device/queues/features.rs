//! Features of virtio-net, one bit each.

use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::bindings::virtio_net as bits;

/// The driver speaks virtio 1.0 or later, so that its header has 12 bytes.
pub(in crate::device) const VERSION_1: u64 = 1 << VIRTIO_F_VERSION_1;
/// A packet for the guest may go into several of its buffers.
pub(in crate::device) const MERGEABLE: u64 = 1 << bits::VIRTIO_NET_F_MRG_RXBUF;
/// The guest takes packets without a checksum.
pub(in crate::device) const GUEST_CSUM: u64 = 1 << bits::VIRTIO_NET_F_GUEST_CSUM;
/// The guest takes TCP over IPv4 that is not cut.
pub(in crate::device) const GUEST_TSO4: u64 = 1 << bits::VIRTIO_NET_F_GUEST_TSO4;
/// The guest takes TCP over IPv6 that is not cut.
pub(in crate::device) const GUEST_TSO6: u64 = 1 << bits::VIRTIO_NET_F_GUEST_TSO6;
/// The guest takes such packets with congestion marks.
pub(in crate::device) const GUEST_ECN: u64 = 1 << bits::VIRTIO_NET_F_GUEST_ECN;

/// The guest tells the network itself where it is, when the front end asks it to: that of which nobody else knows, such as
/// its IP addresses and the groups that it listens to. A front end that is QEMU asks after each move.
pub(in crate::device) const GUEST_ANNOUNCE: u64 = 1 << bits::VIRTIO_NET_F_GUEST_ANNOUNCE;

/// The guest may use several pairs of queues.
pub(in crate::device) const SEVERAL_PAIRS: u64 = 1 << bits::VIRTIO_NET_F_MQ;

/// What the device offers beside what every device does. The way back is the kernel's to finish.
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
