//! Coverage: counts of the faults and states that runs reached.

use godwit_core::{
    DOUBLE_WRITE, MIRROR, POLICIES, POST_COPY, PRE_COPY, PUSH_PULL, PolicyDescription,
};

/// Declares the states with their printed names.
macro_rules! states {
    ($($state:ident $name:literal,)*) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Reached { $($state,)* }

        impl Reached {
            pub(crate) const ALL: &'static [Self] = &[$(Self::$state,)*];

            pub(crate) const fn name(self) -> &'static str {
                match self { $(Self::$state => $name,)* }
            }
        }
    };
}

states! {
    Read "requests: read",
    Write "requests: write",
    FuaWrite "requests: write with FUA",
    WriteZeroes "requests: write zeroes",
    Discard "requests: discard",
    Flush "requests: flush",
    AcrossChunks "requests: across a chunk's end",
    Combined "requests: carried out by a later one",
    Failed "requests: failed by a disk error",
    Uniform "workload: uniform",
    Zipf "workload: zipf",
    Sequential "workload: sequential",
    Hot "workload: hot",
    Mixed "workload: mixed",
    DoubleWritePolicy "transfer: double write",
    MirrorPolicy "transfer: mirror",
    PreCopyPolicy "transfer: pre-copy",
    PushPullPolicy "transfer: push and pull",
    PostCopyPolicy "transfer: post-copy",
    MovedInPart "pulls: disks that moved without a part",
    PullConnected "pulls: connections",
    TwoPlaces "pulls: from a node and from an image",
    MissingStored "pulls: what a disk lacks stored",
    MissingRestored "pulls: went on after a crash",
    Whole "pulls: disks that became whole",
    OwesNothing "pulls: sources that were needed no longer",
    CrashLacking "crashed: owner of a part",
    CrashOwing "crashed: owing a part",
    BecameBase "deltas: images kept as the disk was",
    WrittenRestored "deltas: what was written known after a restart",
    DeltaByWritten "deltas: moves of what was written",
    DeltaByCompared "deltas: moves of what was found to differ",
    Compared "images: compared with a disk",
    LeavesImage "images: moves without them",
    LeftImage "images: left by disks that had not fetched all of them",
    Fetched "images: parts fetched",
    RepositoryAway "images: parts that could not be fetched",
    WindowOnly "policy: window only",
    Backpressure "policy: backpressure",
    Delayed "policy: delayed writes",
    Budget "policy: interface budget",
    Deadline "policy: deadline",
    Verify "policy: verify",
    RateLimit "policy: bandwidth limit",
    Changed "migrations: changed while they ran",
    Switched "migrations: went on by push and pull",
    Converged "migrations: converged, and waited for the guest's host",
    OrderedWhilePaused "migrations: ordered to switch over while paused",
    OrderedThere "migrations: ordered to switch over by the destination",
    NotStored "migrations: ended because the store refused",
    CrashConverged "crashed: converged",
    CrashFollowed "crashed: followed by the other node",
    Followed "protection: disks followed",
    Paired "protection: machines protected",
    Severed "protection: followers lost",
    Suspected "protection: living primaries taken for lost",
    WentAlone "protection: primaries that went on alone",
    Taken "protection: machines taken by the backup",
    Ended "protection: primaries that heard of their end",
    Yielded "protection: disks yielded",
    ActivityStored "protection: activity logs stored",
    ReturnedByLog "protection: old primaries that returned by their logs",
    FollowedEqual "protection: disks compared when they came to be followed",
    PowerLossProtected "protection: primary lost power",
    CheckpointWhole "checkpoints: whole at the backup",
    PacketsReleased "checkpoints: packets released",
    WorkUndone "checkpoints: work undone by a takeover",
    Moved "migrations: switchovers",
    MovedBack "migrations: back to where the disk was",
    ServedBeforeStored "migrations: served before that was stored",
    Verified "migrations: verified",
    VerifiedAgain "migrations: verified what was written meanwhile",
    DoubleWritten "migrations: double writes",
    Posted "migrations: double writes that the guest did not wait for",
    AbortCancelled "aborted: cancelled",
    AbortPeerLost "aborted: connection lost",
    AbortPeerTimeout "aborted: no answer in time",
    AbortSourceDisk "aborted: source's disk",
    AbortDestinationDisk "aborted: destination's disk",
    AbortDestinationNoSpace "aborted: no space at the destination",
    PausedGuestLatency "paused: guest latency",
    PausedLinkQueue "paused: link queue",
    PausedInterfaceBudget "paused: interface budget",
    Resumed "resumed",
    GivenUp "pauses: double writes given up",
    CopyDiscarded "pauses: unsent copies discarded",
    SyncDiscarded "pauses: unsent double writes discarded",
    AnsweredAlone "delayed writes: late double writes answered alone",
    StaleCopy "pauses: copies of an old generation dropped",
    DelayedRecorded "delayed writes: recorded",
    DelayedSent "delayed writes: sent",
    DelayedCancelled "delayed writes: made obsolete",
    PromiseChecked "promise: requests held to it",
    Reordered "links: copies overtook each other",
    Stalled "links: a connection stalled",
    Congested "links: congested",
    Traffic "links: other traffic",
    NoTag "links: a frame waited for a buffer",
    Cut "links: cut",
    LostInFlight "links: frames lost in flight",
    DiskSlow "disks: slow",
    StoreSlow "stores: slow",
    IoError "disks: I/O error",
    NoSpace "disks: no space",
    TornWrite "disks: write torn by a crash",
    LostWrite "disks: cached write lost with the power",
    Crash "processes: crashed",
    PowerLoss "hosts: lost power",
    PowerLossOfOwner "hosts: owner lost power and unflushed writes",
    PowerLossAfterMove "hosts: new owner lost power soon",
    RecordLost "stores: record lost by a crash",
    RecordKept "stores: record kept by a crash",
    CrashIdle "crashed: no migration",
    CrashCopying "crashed: copying",
    CrashVerifying "crashed: verifying",
    CrashDraining "crashed: draining",
    CrashPreparing "crashed: preparing",
    CrashRelinquishing "crashed: relinquishing",
    CrashCommitting "crashed: committing",
    CrashPaused "crashed: paused",
    InDoubt "authority: in doubt after a crash",
    Resolved "authority: asked the other node",
    Forwarded "forwarding: requests forwarded",
    ForwardedEarly "forwarding: before the destination confirmed",
    ForwardedAgain "forwarding: connected again",
    OwnerMoved "forwarding: owner moved",
    Deserted "forwarding: the guest left without its answers",
    Strayed "forwarding: requests of one guest at both nodes",
    Fence "forwarding: fences",
    ForwardVoid "forwarding: requests from before a fence dropped",
    Shared "forwarding: more than one party writes",
    Uncertain "forwarding: writes that nobody knows of",
    HoleFound "holes: found ahead of the window",
    LongHoleFound "holes: found before a disk leaves that is pulled",
    HoleFilled "holes: written to before they were locked",
    HoleCompared "holes: compared with the destination's",
    Settled "settled",
}

impl Reached {
    /// The state of a move by each policy.
    pub(crate) const BY_POLICY: [(&PolicyDescription, Self); POLICIES.len()] = [
        (DOUBLE_WRITE, Self::DoubleWritePolicy),
        (MIRROR, Self::MirrorPolicy),
        (PRE_COPY, Self::PreCopyPolicy),
        (PUSH_PULL, Self::PushPullPolicy),
        (POST_COPY, Self::PostCopyPolicy),
    ];
}

/// Counts per state.
#[derive(Clone, Debug)]
pub(crate) struct Coverage(Vec<u64>);

impl Default for Coverage {
    fn default() -> Self {
        Self(vec![0; Reached::ALL.len()])
    }
}

impl Coverage {
    pub(crate) fn add(&mut self, state: Reached, times: u64) {
        self.0[state as usize] += times;
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        for (ours, theirs) in self.0.iter_mut().zip(&other.0) {
            *ours += theirs;
        }
    }

    pub(crate) fn get(&self, state: Reached) -> u64 {
        self.0[state as usize]
    }
}
