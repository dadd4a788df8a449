//! Defects that the simulator plants to prove that it finds them. They exist only in builds with the
//! feature `planted-bugs`, and only in a controller that was told so.

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
    /// The destination is asked to accept before it has acknowledged all double writes.
    SwitchoverWithPosted,
    /// A pause forgets the double writes that the guest does not wait for.
    ForgetPosted,
    /// A chunk is read while a double write to it is on its way.
    ReadOverPosted,
    /// The destination carries out copies of older generations.
    IgnoreGeneration,
    /// Writes to chunks that are being copied do not wait.
    SkipWindowLock,
    /// A full table of delayed writes drops what comes instead of coarsening.
    DropDelayedOnOverflow,
    /// The destination accepts the disk without making what it received durable.
    AcceptWithoutFlush,
    /// The destination accepts the disk before all that it acknowledged is written.
    AcceptBeforeWritten,
    /// A double write that was acknowledged fails and the migration goes on.
    ForgetFailedWrite,
    /// The destination is asked to accept while delayed writes are left.
    SwitchoverWithDelayed,
    /// Writes to hot places that were kept back are never sent.
    ForgetHot,
    /// Authority is acted on before it is stored.
    PersistAfterUse,
    /// A write that is combined with one that must be durable is not made durable.
    CombineForgetsFua,
    /// A write that is combined with an earlier one keeps its own place in the order of writes.
    CombineOutOfPlace,
    /// The owner takes what was forwarded before a client attached.
    ForgetFence,
    /// What was forwarded on a lost connection is done again although the owner has done it.
    RepeatForwarded,
    /// What was a hole before it was locked is not looked at again.
    TrustHoles,
    /// A write that goes to both nodes anyway does not wait for the chunk that is copied over it.
    MirrorUnlocked,
    /// Pre-copy forgets what is written to a block while that is copied.
    ForgetRoundWrites,
    /// What was pulled is written over what the guest has written since it was asked for.
    PullOverNewer,
    /// A write to a part of a missing block does not wait for the rest of it.
    ForgetRestOfBlock,
    /// What a guest zeroes or discards is pulled all the same.
    ForgetZeroed,
    /// A flush is answered before it is durable that what was written is not to be pulled.
    FlushWithoutCheckpoint,
    /// A node that owes a part of the disk does not say so on a new connection.
    ForgetDebt,
    /// How often the guest wrote is lost when the disk changes hands without a part.
    LoseCounts,
    /// An owner tells the node that owes it a part that it needs that no more, before this is durable.
    RepaidEarly,
    /// Where what an owner lacks is in two places, it takes what another node owes from the image.
    TakenFromImage,
    /// A node that will owe a part of the disk does not flush it before it gives the disk away.
    OweUnflushed,
    /// What was to be sent later is forgotten when the policy changes.
    SwitchForgetsDelayed,
    /// When the policy changes, chunks are pushed beside double writes that are on their way.
    SwitchOvertakes,
    /// An owner that cannot know what was written since the disk came to it takes that for nothing.
    StaleWritten,
    /// What the guest writes while only what differs is sent is not added to that.
    DeltaForgetsWrites,
    /// What a guest zeroes or discards while its disk is compared with an image, or leaves that behind, does not count
    /// as different.
    DiscardsAsInImage,
    /// Writes that are on their way when a disk begins to be compared with its image do not count as different.
    ComparedBesideWrites,
    /// The image of a disk that has left counts as what the disk was then before it is durable.
    BaseUnflushed,
    /// What the guest writes while its disk is searched for holes is taken for a part of them.
    HolesOverWrites,
    /// What was sent to a place that is a hole now does not count.
    HolesOverSent,
}

impl PlantedBug {
    /// All defects.
    pub const ALL: [Self; 37] = [
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
    ];

    /// The defect's name.
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
        }
    }
}
