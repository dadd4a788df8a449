//! How a migration keeps its promise to the guest.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Why a migration pauses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum PauseReason {
    /// A request of the guest waited for the migration about as long as was promised.
    GuestLatency,
    /// What is queued on the way to the other node would take that long to be delivered.
    LinkQueue,
    /// The interface carries more than its budget.
    InterfaceBudget,
}

impl PauseReason {
    /// The reason's name as the API spells it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::GuestLatency => "guest_latency",
            Self::LinkQueue => "link_queue",
            Self::InterfaceBudget => "interface_budget",
        }
    }
}

/// What keeps a migration from coming to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Obstacle {
    /// Whenever it goes on, the guest's latency comes near what was promised.
    Promise,
    /// The guest writes as fast as delayed writes can be sent.
    WriteRate,
    /// Other traffic leaves nothing of the interface's budget.
    InterfaceBudget,
    /// The guest's writes alone take the bandwidth that the migration may take.
    Bandwidth,
    /// At this rate the deadline will be missed.
    Deadline,
}

/// Pauses so far, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Pauses {
    /// A request of the guest waited too long.
    pub guest_latency: u32,
    /// Too much was queued on the way.
    pub link_queue: u32,
    /// The interface carried more than its budget.
    pub interface_budget: u32,
}

impl Pauses {
    /// All of them.
    pub const fn total(&self) -> u32 {
        self.guest_latency + self.link_queue + self.interface_budget
    }
}

/// How an outgoing migration keeps its promise to the guest.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MigrationPromise {
    /// The longest latency promised, in microseconds.
    pub limit_us: Option<u64>,
    /// What requests may take at the moment, in microseconds: the limit, or more where the guest's take
    /// longer by themselves, or where nobody stated the limit and the migration could not end with it.
    pub allowed_us: Option<u64>,
    /// Sampling periods of 10 ms in which the guest had requests.
    pub periods: u64,
    /// Those of them in which a request took longer than the limit.
    pub breached_periods: u64,
    /// Why the migration pauses now, if it does.
    pub paused: Option<PauseReason>,
    /// Pauses so far.
    pub pauses: Pauses,
    /// Seconds spent in pauses.
    pub paused_seconds: f64,
    /// Bytes of the disk that delayed writes still have to bring to the destination.
    pub delayed_bytes: u64,
    /// Data bytes of delayed writes that were sent.
    pub delayed_bytes_sent: u64,
    /// Delayed bytes that a later write made obsolete before they were sent.
    pub delayed_bytes_cancelled: u64,
    /// Bytes per second that copies and delayed writes may take at the moment.
    pub rate_limit: Option<u64>,
    /// What keeps the migration from coming to its end, when something does.
    pub obstacle: Option<Obstacle>,
}
