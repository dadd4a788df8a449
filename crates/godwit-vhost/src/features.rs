//! Features and sizes shared by every device here.

use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::bindings::virtio_ring::{
    VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC,
};

/// Most rings of a device.
pub const MOST_RINGS: u16 = 16;

/// Most descriptors of a ring.
pub const LARGEST_RING: u16 = 1024;

/// Logs the pages written by the device.
pub const LOG_ALL: u64 = 1 << 26;

/// Suppresses events by index.
pub const EVENT_INDEX: u64 = 1 << VIRTIO_RING_F_EVENT_IDX;

/// Negotiates protocol features; rings start disabled.
pub const PROTOCOL: u64 = 1 << 30;

/// Features offered by every device.
pub const TRANSPORT: u64 =
    1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_INDIRECT_DESC | EVENT_INDEX | LOG_ALL | PROTOCOL;
