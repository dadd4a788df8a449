//! The published state of an engine.

use godwit_core::authority::{AuthorityRecord, Ownership};
use godwit_core::request::RequestError;
use godwit_core::units::Bytes;
use godwit_core::{Missing, Progress};

/// Upper bounds, in microseconds, of the buckets of [`Latencies::counts`]; the last bucket has no upper bound.
pub const LATENCY_BOUNDS_US: [u64; 16] = [
    50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000,
    1_000_000, 5_000_000, 30_000_000,
];

/// The last published state of an engine: at most 100 ms old while the engine is busy, exact while idle.
#[derive(Clone, Copy, Debug)]
pub struct Snapshot {
    /// Durable record of the disk's owner.
    pub record: AuthorityRecord,
    /// True if this node's disk serves guest I/O.
    pub serves: bool,
    /// Progress of the outgoing migration, or the end of the last one.
    pub progress: Option<Progress>,
    /// Bytes saved by compression in the copies of the outgoing migration.
    pub copies_saved: u64,
    /// Attached clients: NBD clients and the front end.
    pub clients: u32,
    /// The virtual machine's side of the disk.
    pub front_end: FrontEndState,
    /// True if requests of the virtual machine wait for room in the image.
    pub lacks_room: bool,
    /// True if the virtual machine was disconnected because [its shared memory was
    /// lost](godwit_vhost::memory::LOST_PAGES), and no memory has been shared since.
    pub lost_pages: bool,
    /// True if a request has waited for a missing part of the disk long enough to justify stopping its virtual machine,
    /// or would have if the machine still ran.
    pub waits_long: bool,
    /// Bytes of the disk that are not here while this node serves the disk.
    pub missing: Option<Bytes>,
    /// Missing bytes at the node that gave the disk away, if the rest is in the disk's image.
    pub missing_at_source: Option<Bytes>,
    /// True if that node is needed beside the image: until its own part is here, durably.
    pub needs_source: bool,
    /// True if the holder of the missing parts is connected.
    pub missing_is_owed: bool,
    /// True if this node owes a part of the disk, and the owner is connected and shows signs of life.
    pub owner_is_there: bool,
    /// Error of the last missing piece, written here or read there. Retried.
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

impl Snapshot {
    /// Returns the state of an engine that is about to start.
    pub(in crate::engine) fn before_start(
        record: AuthorityRecord,
        missing: Option<&Missing>,
    ) -> Self {
        Self {
            record,
            serves: record.ownership == Ownership::Serving,
            progress: None,
            copies_saved: 0,
            clients: 0,
            front_end: FrontEndState::Absent,
            lacks_room: false,
            lost_pages: false,
            waits_long: false,
            missing: missing.map(Missing::bytes),
            missing_at_source: None,
            needs_source: missing.is_some_and(|missing| missing.at_source().is_some()),
            missing_is_owed: false,
            owner_is_there: false,
            missing_trouble: None,
            requests_in_flight: 0,
            counters: Counters::default(),
            latency: LatencySummary::default(),
            latencies: Latencies::default(),
            cpu_seconds: 0.0,
        }
    }
}

/// The state of a virtual machine that uses the disk by vhost-user.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FrontEndState {
    /// No virtual machine is attached.
    #[default]
    Absent,
    /// A virtual machine is attached.
    Attached,
    /// A virtual machine is attached, and a ring cannot be served because of its contents. Other rings go on. The guest
    /// has to reset the device.
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
    /// Bytes of migrations' data before compression.
    pub compressed_from: u64,
    /// Bytes of the same data after compression.
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
    /// Requests per bucket, not cumulative: bucket `i` holds requests of at most [`LATENCY_BOUNDS_US`]`[i]`
    /// microseconds that are in no bucket before.
    pub counts: [u64; LATENCY_BOUNDS_US.len() + 1],
    /// Sum of all latencies in microseconds.
    pub sum_us: u64,
}
