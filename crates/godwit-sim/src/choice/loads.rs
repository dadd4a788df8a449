//! Twelve guests, and the requirements of each guest's move.

use std::time::Duration;

use godwit_core::sla::LatencyTarget;

use crate::plan::{Places, SteadyLoad};

/// Bytes per second of the link.
pub(super) const LINK: u64 = 4_000_000;

const SECTOR: u64 = 512;
/// Sectors of a MiB.
const MIB: u64 = (1 << 20) / SECTOR;

/// Sectors of the disk.
pub(super) const DISK: u64 = 128 * MIB;
/// Sectors of the disk with data, for most guests.
const FULL: u64 = 96 * MIB;

/// A guest, and the requirements of its disk's move.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    pub(super) name: &'static str,
    /// Sectors with data.
    pub(super) full: u64,
    pub(super) does: SteadyLoad,
    /// Bytes per second of the guest's reads and writes.
    pub(super) rate: u64,
    pub(super) deadline: Option<Duration>,
    pub(super) sla: Option<LatencyTarget>,
}

impl Load {
    /// Returns a guest with this many bytes per second, without requirements.
    pub(super) const fn new(name: &'static str, full: u64, does: SteadyLoad, rate: u64) -> Self {
        Self {
            name,
            full,
            does,
            rate,
            deadline: None,
            sla: None,
        }
    }
}

/// Returns a load of requests of 4 KiB, each sent after an answer.
pub(super) const fn does(places: Places, reads: u64) -> SteadyLoad {
    SteadyLoad {
        places,
        reads,
        own_pace: false,
    }
}

const fn writes(name: &'static str, places: Places, percent_of_link: u64) -> Load {
    Load::new(name, FULL, does(places, 0), LINK * percent_of_link / 100)
}

/// Returns all twelve loads.
pub(super) fn all() -> [Load; 12] {
    let anywhere = Places::Within(FULL);
    [
        writes("idle", anywhere, 0),
        Load {
            full: 12 * MIB,
            ..writes("idle, thin", anywhere, 0)
        },
        Load {
            does: does(Places::Skewed(FULL), 100),
            ..writes("reads, skewed, 50 % of the link", anywhere, 50)
        },
        writes("a log, 12 %", Places::InOrder(32 * MIB), 12),
        writes("random writes, 10 %", anywhere, 10),
        writes("random writes, 40 %", anywhere, 40),
        writes("random writes, 80 %", anywhere, 80),
        writes("random writes, 150 %", anywhere, 150),
        writes("skewed writes, 80 %", Places::Skewed(FULL), 80),
        writes("few places, 150 %", Places::Within(8 * MIB), 150),
        Load {
            deadline: Some(Duration::from_secs(12)),
            ..writes("random writes, 40 %, within 12 s", anywhere, 40)
        },
        Load {
            sla: Some(LatencyTarget {
                limit: Duration::from_millis(10),
                allowed_per_million: 10_000,
            }),
            does: does(anywhere, 50),
            ..writes("reads and writes, 40 %, p99<10ms", anywhere, 40)
        },
    ]
}
