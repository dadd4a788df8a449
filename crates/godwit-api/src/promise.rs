//! A migration's promise to the guest.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The reason of a pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum PauseReason {
    /// A request of the guest waited for the migration for about the promised latency.
    GuestLatency,
    /// Data queued on the link would take about the promised latency to be delivered.
    LinkQueue,
    /// The interface carries more than its budget.
    InterfaceBudget,
}

impl PauseReason {
    /// Returns the reason's name as spelled in the API.
    pub const fn name(self) -> &'static str {
        match self {
            Self::GuestLatency => "guest_latency",
            Self::LinkQueue => "link_queue",
            Self::InterfaceBudget => "interface_budget",
        }
    }
}

/// An obstacle to the end of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Obstacle {
    /// Whenever the migration goes on, the guest's latency comes near the promise.
    Promise,
    /// The guest writes as fast as delayed writes can be sent.
    WriteRate,
    /// Other traffic uses up the interface's budget.
    InterfaceBudget,
    /// The guest's writes alone take the migration's bandwidth limit.
    Bandwidth,
    /// At this rate the deadline will be missed.
    Deadline,
}

/// Number of pauses so far, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Pauses {
    /// Pauses because a request of the guest waited too long.
    pub guest_latency: u32,
    /// Pauses because too much data was queued on the link.
    pub link_queue: u32,
    /// Pauses because the interface carried more than its budget.
    pub interface_budget: u32,
}

impl Pauses {
    /// Returns the number of all pauses.
    pub const fn total(&self) -> u32 {
        self.guest_latency + self.link_queue + self.interface_budget
    }
}

/// The state of an outgoing migration's promise to the guest.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MigrationPromise {
    /// Longest latency promised, in microseconds.
    pub limit_us: Option<u64>,
    /// Latency allowed at the moment, in microseconds. This is the limit, or more if the guest's requests take longer
    /// by themselves, or if the node chose the limit and the migration could not end within it.
    pub allowed_us: Option<u64>,
    /// Sampling periods of 10 ms in which the guest had requests.
    pub periods: u64,
    /// Sampling periods in which a request took longer than the limit.
    pub breached_periods: u64,
    /// Reason of the current pause; absent if there is none.
    pub paused: Option<PauseReason>,
    /// Pauses so far.
    pub pauses: Pauses,
    /// Seconds spent in pauses.
    pub paused_seconds: f64,
    /// Bytes of the disk still to be sent as delayed writes.
    pub delayed_bytes: u64,
    /// Data bytes of delayed writes that were sent.
    pub delayed_bytes_sent: u64,
    /// Delayed bytes made obsolete by later writes before being sent.
    pub delayed_bytes_cancelled: u64,
    /// Current limit of copies and delayed writes in bytes per second.
    pub rate_limit: Option<u64>,
    /// Obstacle to the end of the migration; absent if there is none.
    pub obstacle: Option<Obstacle>,
}
