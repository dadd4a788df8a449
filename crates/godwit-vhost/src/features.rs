//! Features and sizes that every device here has.

use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::bindings::virtio_ring::{
    VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC,
};

/// Rings that a device can have.
pub const MOST_RINGS: u16 = 16;

/// Descriptors that a ring can have.
pub const LARGEST_RING: u16 = 1024;

/// Log the pages that the device writes.
pub const LOG_ALL: u64 = 1 << 26;

/// Events are suppressed by index.
pub const EVENT_INDEX: u64 = 1 << VIRTIO_RING_F_EVENT_IDX;

/// Protocol features are negotiated, and rings start disabled.
pub const PROTOCOL: u64 = 1 << 30;

/// What every device offers.
pub const TRANSPORT: u64 =
    1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_INDIRECT_DESC | EVENT_INDEX | LOG_ALL | PROTOCOL;
