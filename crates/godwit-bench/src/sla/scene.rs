//! The scene of a crowded link: its bandwidth, its other traffic, and the guest's load.

use std::time::Duration;

use clap::Args;
use godwit_testkit::fio::{FioLoad, Requests};
use serde::Serialize;

/// The parameters of the scene. The defaults belong together: the guest's double writes fit beside other traffic of 45
/// % of the link, but not beside 90 %.
#[derive(Clone, Debug, Args, Serialize)]
pub(super) struct SceneOptions {
    /// Bandwidth out of the source's host, in Mbit/s.
    #[arg(long, default_value_t = 1000)]
    pub(super) link_mbit: u64,
    /// Per cent of the bandwidth that the other traffic usually takes.
    #[arg(long, default_value_t = 45)]
    pub(super) usual_percent: u64,
    /// Per cent of the bandwidth that the other traffic takes while the link is crowded.
    #[arg(long, default_value_t = 90)]
    pub(super) crowded_percent: u64,
    /// Seconds of crowding, from when half of the disk was copied.
    #[arg(long, default_value_t = 5)]
    pub(super) crowded_seconds: u64,
    /// KiB of each message of the other traffic.
    #[arg(long, default_value_t = 64)]
    pub(super) message_kib: usize,
    /// Size of the disk in MiB.
    #[arg(long, default_value_t = 1024)]
    pub(super) image_mib: u64,
    /// KB that the guest requests per second.
    #[arg(long, default_value_t = 40_000)]
    pub(super) guest_kb: u64,
    /// Per cent of the guest's requests that write.
    #[arg(long, default_value_t = 90)]
    pub(super) writes_percent: u8,
    /// Requests that the guest keeps in flight.
    #[arg(long, default_value_t = 16)]
    pub(super) depth: u32,
    /// The promise of the variants that keep one.
    #[arg(long, default_value = "p99.99<20ms")]
    pub(super) sla: String,
}

impl SceneOptions {
    pub(super) const fn image_bytes(&self) -> u64 {
        self.image_mib << 20
    }

    pub(super) const fn link_bits(&self) -> u64 {
        self.link_mbit * 1_000_000
    }

    /// Returns the other traffic's bytes per second at a share of the link.
    pub(super) const fn traffic(&self, percent: u64) -> u64 {
        self.link_bits() / 8 * percent / 100
    }

    pub(super) const fn crowded(&self) -> Duration {
        Duration::from_secs(self.crowded_seconds)
    }

    /// Returns the guest's load: random requests all over the disk.
    pub(super) fn load(&self) -> FioLoad {
        FioLoad {
            requests: Requests::Mixed(self.writes_percent),
            region: 0..self.image_bytes(),
            rate: Some(self.guest_kb * 1000),
            depth: self.depth,
            ..FioLoad::default()
        }
    }
}
