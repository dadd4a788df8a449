//! Defects that the simulator plants and must find. They exist only in builds with the feature `planted-bugs`, and only
//! in a controller with a planted bug.

#![cfg_attr(
    not(feature = "planted-bugs"),
    allow(
        dead_code,
        unreachable_pub,
        reason = "without the feature they are only named, never planted"
    )
)]

/// A defect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PlantedBug {
    /// The destination is asked to accept before acknowledging all double writes.
    SwitchoverWithPosted,
    /// A pause forgets posted writes.
    ForgetPosted,
    /// A chunk is read during a double write to the chunk.
    ReadOverPosted,
    /// The destination carries out copies of older generations.
    IgnoreGeneration,
    /// Writes to chunks being copied do not wait.
    SkipWindowLock,
    /// A full table of delayed writes drops new entries instead of coarsening.
    DropDelayedOnOverflow,
    /// The destination accepts the disk without making received data durable.
    AcceptWithoutFlush,
    /// The destination accepts the disk before all acknowledged data is written.
    AcceptBeforeWritten,
    /// An acknowledged double write fails and the migration goes on.
    ForgetFailedWrite,
    /// The destination is asked to accept while delayed writes are left.
    SwitchoverWithDelayed,
    /// Kept back writes to hot places are never sent.
    ForgetHot,
    /// Authority is acted on before it is stored.
    PersistAfterUse,
    /// A write combined with a write that must be durable is not made durable.
    CombineForgetsFua,
    /// A write combined with an earlier write keeps its own place in the order of writes.
    CombineOutOfPlace,
    /// The owner takes requests forwarded before a client attached.
    ForgetFence,
    /// Requests forwarded on a lost connection are repeated although already carried out by the owner.
    RepeatForwarded,
    /// A hole found before its lock is not examined again.
    TrustHoles,
    /// A write that goes to both nodes anyway does not wait for the chunk that is copied over it.
    MirrorUnlocked,
    /// Pre-copy forgets writes to a block while the block is copied.
    ForgetRoundWrites,
    /// Pulled data is written over newer data of the guest.
    PullOverNewer,
    /// A write to a part of a missing block does not wait for the rest of the block.
    ForgetRestOfBlock,
    /// Blocks that a guest zeroes or discards are pulled all the same.
    ForgetZeroed,
    /// A flush is answered before the list of missing blocks is durable.
    FlushWithoutCheckpoint,
    /// A node that owes a part of the disk does not say so on a new connection.
    ForgetDebt,
    /// Write counts are lost when the disk changes hands without a part.
    LoseCounts,
    /// An owner tells the owing node that nothing is needed any more, before this is durable.
    RepaidEarly,
    /// An owner that lacks blocks in two places takes another node's blocks from the image.
    TakenFromImage,
    /// The destination is asked to follow before it has every acknowledged write.
    FollowBehind,
    /// The source of a disk that the destination follows goes on alone without a word of its body.
    AloneUnasked,
    /// The source posts writes although the destination follows.
    PostFollowed,
    /// A read may see a write that the follower does not have.
    ReadUnfollowed,
    /// A disk that follows with checkpoints is written at once, ahead of its machine's memory.
    DiskAhead,
    /// Kept writes of later checkpoints are dropped once a checkpoint is applied.
    KeptClearedEarly,
    /// The activity log forgets areas of unanswered writes.
    AreaClearedEarly,
    /// The activity log forgets areas of a checkpoint that the follower does not have.
    AreaClearedBehind,
    /// A write does not wait until the activity log has its area.
    AreaStoredLate,
    /// A source that has yielded the disk answers requests as if they were carried out.
    AnswerYielded,
    /// A node that will owe a part of the disk does not flush it before giving the disk away.
    OweUnflushed,
    /// Delayed writes are forgotten when the policy changes.
    SwitchForgetsDelayed,
    /// Chunks are pushed beside double writes in flight when the policy changes.
    SwitchOvertakes,
    /// An owner that cannot know the blocks written since the disk arrived assumes none.
    StaleWritten,
    /// Writes of the guest during a move of differences are not added to the differences.
    DeltaForgetsWrites,
    /// Blocks that a guest zeroes or discards do not count as different while the disk is compared with an image, or
    /// leaves the image behind.
    DiscardsAsInImage,
    /// Writes in flight at the start of a comparison with the image do not count as different.
    ComparedBesideWrites,
    /// The image of a departed disk counts as a base before it is durable.
    BaseUnflushed,
    /// Blocks that the guest writes during a search for holes count as holes.
    HolesOverWrites,
    /// Data sent earlier to a present hole is disregarded.
    HolesOverSent,
}

impl PlantedBug {
    /// All defects.
    pub const ALL: [Self; 47] = [
        Self::SwitchoverWithPosted,
        Self::ForgetPosted,
        Self::ReadOverPosted,
        Self::IgnoreGeneration,
        Self::SkipWindowLock,
        Self::DropDelayedOnOverflow,
        Self::AcceptWithoutFlush,
        Self::AcceptBeforeWritten,
        Self::ForgetFailedWrite,
        Self::SwitchoverWithDelayed,
        Self::ForgetHot,
        Self::PersistAfterUse,
        Self::CombineForgetsFua,
        Self::CombineOutOfPlace,
        Self::ForgetFence,
        Self::RepeatForwarded,
        Self::TrustHoles,
        Self::MirrorUnlocked,
        Self::ForgetRoundWrites,
        Self::PullOverNewer,
        Self::ForgetRestOfBlock,
        Self::ForgetZeroed,
        Self::FlushWithoutCheckpoint,
        Self::ForgetDebt,
        Self::RepaidEarly,
        Self::TakenFromImage,
        Self::LoseCounts,
        Self::OweUnflushed,
        Self::SwitchForgetsDelayed,
        Self::SwitchOvertakes,
        Self::StaleWritten,
        Self::DeltaForgetsWrites,
        Self::DiscardsAsInImage,
        Self::ComparedBesideWrites,
        Self::BaseUnflushed,
        Self::HolesOverWrites,
        Self::HolesOverSent,
        Self::FollowBehind,
        Self::AloneUnasked,
        Self::PostFollowed,
        Self::ReadUnfollowed,
        Self::DiskAhead,
        Self::KeptClearedEarly,
        Self::AnswerYielded,
        Self::AreaClearedEarly,
        Self::AreaClearedBehind,
        Self::AreaStoredLate,
    ];

    /// Returns the defect's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::SwitchoverWithPosted => "switchover-with-posted",
            Self::ForgetPosted => "forget-posted",
            Self::ReadOverPosted => "read-over-posted",
            Self::IgnoreGeneration => "ignore-generation",
            Self::SkipWindowLock => "skip-window-lock",
            Self::DropDelayedOnOverflow => "drop-delayed-on-overflow",
            Self::AcceptWithoutFlush => "accept-without-flush",
            Self::AcceptBeforeWritten => "accept-before-written",
            Self::ForgetFailedWrite => "forget-failed-write",
            Self::SwitchoverWithDelayed => "switchover-with-delayed",
            Self::ForgetHot => "forget-hot",
            Self::PersistAfterUse => "persist-after-use",
            Self::CombineForgetsFua => "combine-forgets-fua",
            Self::CombineOutOfPlace => "combine-out-of-place",
            Self::ForgetFence => "forget-fence",
            Self::RepeatForwarded => "repeat-forwarded",
            Self::TrustHoles => "trust-holes",
            Self::MirrorUnlocked => "mirror-unlocked",
            Self::ForgetRoundWrites => "forget-round-writes",
            Self::PullOverNewer => "pull-over-newer",
            Self::ForgetRestOfBlock => "forget-rest-of-block",
            Self::ForgetZeroed => "forget-zeroed",
            Self::FlushWithoutCheckpoint => "flush-without-checkpoint",
            Self::ForgetDebt => "forget-debt",
            Self::RepaidEarly => "repaid-early",
            Self::TakenFromImage => "taken-from-image",
            Self::LoseCounts => "lose-counts",
            Self::OweUnflushed => "owe-unflushed",
            Self::SwitchForgetsDelayed => "switch-forgets-delayed",
            Self::SwitchOvertakes => "switch-overtakes",
            Self::StaleWritten => "stale-written",
            Self::DeltaForgetsWrites => "delta-forgets-writes",
            Self::DiscardsAsInImage => "discards-as-in-image",
            Self::ComparedBesideWrites => "compared-beside-writes",
            Self::BaseUnflushed => "base-unflushed",
            Self::HolesOverWrites => "holes-over-writes",
            Self::HolesOverSent => "holes-over-sent",
            Self::FollowBehind => "follow-behind",
            Self::AloneUnasked => "alone-unasked",
            Self::PostFollowed => "post-followed",
            Self::ReadUnfollowed => "read-unfollowed",
            Self::DiskAhead => "disk-ahead",
            Self::KeptClearedEarly => "kept-cleared-early",
            Self::AnswerYielded => "answer-yielded",
            Self::AreaClearedEarly => "area-cleared-early",
            Self::AreaClearedBehind => "area-cleared-behind",
            Self::AreaStoredLate => "area-stored-late",
        }
    }
}
