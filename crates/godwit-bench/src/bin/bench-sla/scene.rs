//! The scene of a crowded link: how wide it is, who uses it, and what the guest does.

use std::time::Duration;

use clap::Args;
use godwit_testkit::fio::{FioLoad, Requests};
use serde::Serialize;

/// What the scene is made of. The defaults belong together: while the other traffic takes 45 % of
/// the link, what the guest writes to both sides fits beside it; at 90 % it does not.
#[derive(Clone, Debug, Args, Serialize)]
pub(crate) struct SceneOptions {
    /// Bandwidth that leaves the source's host, in Mbit/s.
    #[arg(long, default_value_t = 1000)]
    pub(crate) link_mbit: u64,
    /// Per cent of it that the other traffic takes as a rule.
    #[arg(long, default_value_t = 45)]
    pub(crate) usual_percent: u64,
    /// Per cent of it that the other traffic takes for a while.
    #[arg(long, default_value_t = 90)]
    pub(crate) crowded_percent: u64,
    /// Seconds of that, from when half of the disk was copied.
    #[arg(long, default_value_t = 5)]
    pub(crate) crowded_seconds: u64,
    /// KiB of each message of the other traffic.
    #[arg(long, default_value_t = 64)]
    pub(crate) message_kib: usize,
    /// Size of the disk in MiB.
    #[arg(long, default_value_t = 1024)]
    pub(crate) image_mib: u64,
    /// KB that the guest asks for per second.
    #[arg(long, default_value_t = 40_000)]
    pub(crate) guest_kb: u64,
    /// Per cent of the guest's requests that write.
    #[arg(long, default_value_t = 90)]
    pub(crate) writes_percent: u8,
    /// Requests that the guest keeps in flight.
    #[arg(long, default_value_t = 16)]
    pub(crate) depth: u32,
    /// The promise of the variants that keep one.
    #[arg(long, default_value = "p99.99<20ms")]
    pub(crate) sla: String,
}

impl SceneOptions {
    pub(crate) const fn image_bytes(&self) -> u64 {
        self.image_mib << 20
    }

    pub(crate) const fn link_bits(&self) -> u64 {
        self.link_mbit * 1_000_000
    }

    /// Bytes per second of the other traffic at this share of the link.
    pub(crate) const fn traffic(&self, percent: u64) -> u64 {
        self.link_bits() / 8 * percent / 100
    }

    pub(crate) const fn crowded(&self) -> Duration {
        Duration::from_secs(self.crowded_seconds)
    }

    /// The guest: random requests all over the disk.
    pub(crate) const fn load(&self) -> FioLoad {
        FioLoad {
            requests: Requests::Mixed(self.writes_percent),
            region: 0..self.image_bytes(),
            rate: Some(self.guest_kb * 1000),
            depth: self.depth,
            runtime: Duration::from_secs(1200),
            compressible: false,
        }
    }
}
