//! The state of an engine as others see it.

use godwit_core::Progress;
use godwit_core::authority::AuthorityRecord;
use godwit_core::request::RequestError;
use godwit_core::units::Bytes;

/// Upper bounds, in microseconds, of the buckets of [`Latencies::counts`]; the last bucket has no
/// upper bound.
pub const LATENCY_BOUNDS_US: [u64; 16] = [
    50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000,
    1_000_000, 5_000_000, 30_000_000,
];

/// What an engine last published: at most 100 ms old while it is busy, exact while it is idle.
#[derive(Clone, Copy, Debug)]
pub struct Snapshot {
    /// What is durably known about who owns the disk.
    pub record: AuthorityRecord,
    /// Whether guest I/O is served from this node's disk.
    pub serves: bool,
    /// How far the outgoing migration is, or how the last one ended.
    pub progress: Option<Progress>,
    /// By how many bytes the outgoing migration's copies were shorter on their way than what they copied.
    pub copies_saved: u64,
    /// Clients attached: those of NBD, and the front end.
    pub clients: u32,
    /// The virtual machine's side of the disk.
    pub front_end: FrontEndState,
    /// Whether requests of the virtual machine wait because the image has no room for them.
    pub lacks_room: bool,
    /// True if the virtual machine was disconnected because [memory that it shared was lost](godwit_vhost::memory::LOST_PAGES),
    /// and none has shared any since.
    pub lost_pages: bool,
    /// Whether a request waits for a part of the disk that is not here, for as long as is worth that its virtual machine
    /// is stopped; or would, if it were not.
    pub waits_long: bool,
    /// How much of the disk is still at the node that gave it away, while this one serves it without.
    pub missing: Option<Bytes>,
    /// How much of that is at the node that gave it away, where the rest is in the disk's image.
    pub missing_at_source: Option<Bytes>,
    /// Whether that node is needed beside the image: until what only it has is here, durably.
    pub needs_source: bool,
    /// Whether whoever has what is missing is there to be asked for it.
    pub missing_is_owed: bool,
    /// Whether the owner of a disk of which this node owes a part is connected and shows that it lives.
    pub owner_is_there: bool,
    /// Why what came last of what is missing could not be written here, or not be read there. It is tried again.
    pub missing_trouble: Option<RequestError>,
    /// Requests that have entered and not been answered.
    pub requests_in_flight: u32,
    /// Totals since the engine started.
    pub counters: Counters,
    /// Latency of clients' requests over the last full second.
    pub latency: LatencySummary,
    /// Latencies of clients' requests since the engine started.
    pub latencies: Latencies,
    /// Processor time of the engine's thread in seconds.
    pub cpu_seconds: f64,
}

/// A virtual machine that uses the disk by vhost-user.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FrontEndState {
    /// None is attached.
    #[default]
    Absent,
    /// One is attached.
    Attached,
    /// One is attached and has a ring that cannot be served, because of what the guest put there.
    /// Other rings go on. The guest has to reset the device.
    Broken,
}

/// Requests of this node's clients since the engine started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Reads answered.
    pub reads: u64,
    /// Writes answered.
    pub writes: u64,
    /// Flushes answered.
    pub flushes: u64,
    /// Discards and write-zeroes answered.
    pub discards: u64,
    /// Bytes of successful reads.
    pub read_bytes: u64,
    /// Bytes of successful writes, zeroes not counted.
    pub written_bytes: u64,
    /// Requests answered with an error.
    pub errors: u64,
    /// Requests that another node forwarded here.
    pub forwarded: u64,
    /// Bytes of migrations' data that were compressed before they left.
    pub compressed_from: u64,
    /// Bytes that those became.
    pub compressed_to: u64,
}

/// Latency of requests over a period, from the last byte of the request to the answer's start.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LatencySummary {
    /// Median in microseconds.
    pub p50_us: u64,
    /// 99th percentile in microseconds.
    pub p99_us: u64,
    /// 99.99th percentile in microseconds.
    pub p9999_us: u64,
    /// Longest in microseconds.
    pub max_us: u64,
    /// Requests answered per second.
    pub iops: f64,
}

/// A histogram with fixed buckets, for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Latencies {
    /// Requests per bucket, not cumulative: bucket `i` holds those of at most
    /// [`LATENCY_BOUNDS_US`]`[i]` microseconds that are in no bucket before it.
    pub counts: [u64; LATENCY_BOUNDS_US.len() + 1],
    /// Sum of all latencies in microseconds.
    pub sum_us: u64,
}
