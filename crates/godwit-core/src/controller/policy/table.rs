//! The table of policies: their options, and the policy of a migration.

pub use super::pre_copy::RoundOptions;
pub use super::push_pull::PushOptions;
use crate::controller::block_set::BlockSet;
use crate::controller::policy::Policy;
use crate::controller::policy::double_write::DoubleWrite;
use crate::controller::policy::mirror::Mirror;
use crate::controller::policy::pre_copy::PreCopy;
use crate::controller::policy::push_pull::PushPull;
use crate::controller::transfer::pass::Pass;
use crate::controller::{MigrationOptions, StartError};
#[cfg(feature = "planted-bugs")]
use crate::planted::PlantedBug;
use crate::units::{Extent, Lba, Sectors, Time};

/// Method by which the destination gets the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyOptions {
    /// The disk is copied once; the guest's writes to the copied part go to both nodes (Alg. 1 of the SmartNIC
    /// storage-migration paper).
    DoubleWrite,
    /// The disk is copied once; all of the guest's writes go to both nodes from the start.
    Mirror,
    /// The guest writes to its own disk; written blocks are copied again until little is left.
    PreCopy(RoundOptions),
    /// Rarely written blocks are pushed; the disk changes hands, and the destination pulls the rest (Alg. 1 to 4 of the
    /// hybrid storage-transfer paper). Requires [`Features::PULLS`](crate::wire::Features::PULLS) at the other node.
    PushPull(PushOptions),
}

impl PolicyOptions {
    /// Checks the options of the policy, among those of the migration of a disk.
    ///
    /// # Errors
    /// [`StartError::Option`].
    pub(in crate::controller) fn check(
        self,
        options: &MigrationOptions,
        capacity: Sectors,
    ) -> Result<(), StartError> {
        match self {
            Self::DoubleWrite | Self::Mirror => Ok(()),
            Self::PreCopy(rounds) => rounds.check(capacity),
            Self::PushPull(_) => PushOptions::check(options, capacity),
        }
    }

    /// Returns true if the disk may move without its image: copied blocks are tracked one by one.
    pub(in crate::controller) fn may_leave_image(self, options: &MigrationOptions) -> bool {
        match self {
            Self::DoubleWrite | Self::Mirror => false,
            Self::PreCopy(rounds) => rounds.may_leave_image(options),
            Self::PushPull(_) => PushOptions::may_leave_image(options),
        }
    }
}

/// The policy of a migration.
#[derive(Debug)]
pub(in crate::controller) enum AnyPolicy {
    DoubleWrite(DoubleWrite),
    Mirror(Mirror),
    PreCopy(PreCopy),
    PushPull(PushPull),
}

impl AnyPolicy {
    /// Creates a migration's policy. With `differences` the destination has the rest of the disk in the disk's image.
    pub(in crate::controller) fn new(
        options: PolicyOptions,
        differences: Option<&BlockSet>,
        capacity: Sectors,
        now: Time,
    ) -> Self {
        match (options, differences) {
            (PolicyOptions::DoubleWrite, _) => Self::DoubleWrite(DoubleWrite),
            (PolicyOptions::Mirror, _) => Self::Mirror(Mirror),
            (PolicyOptions::PreCopy(rounds), None) => Self::PreCopy(PreCopy::new(rounds, capacity)),
            (PolicyOptions::PreCopy(rounds), Some(different)) => {
                Self::PreCopy(PreCopy::of(rounds, different))
            }
            (PolicyOptions::PushPull(push), _) => {
                let mut policy = PushPull::new(push, capacity, now);
                if let Some(different) = differences {
                    policy.lacks_only(different);
                }
                Self::PushPull(policy)
            }
        }
    }

    /// Switches to push and pull. No chunk is in flight. Of this pass, the destination has the blocks before `head`,
    /// except those remembered by the policy. Before the pass the destination had the whole disk except `wanted`, or
    /// nothing.
    pub(in crate::controller) fn become_push_pull(
        &mut self,
        pass: Pass,
        options: PushOptions,
        head: Lba,
        wanted: Option<&BlockSet>,
        capacity: Sectors,
        now: Time,
    ) {
        if self.change(options, now) {
            return;
        }
        let mut push = PushPull::behind(pass, options, head, wanted, capacity, now);
        self.step_aside(head, |extent| push.add(extent));
        *self = Self::PushPull(push);
    }
}

/// Implements the seam by the policy at hand, without a virtual call: some of the calls are on the path of each request.
macro_rules! delegate {
    ($($(#[$attribute:meta])*
       fn $name:ident($this:ident: $kind:ty $(, $argument:ident: $type:ty)*) $(-> $result:ty)?;)*) => {
        impl Policy for AnyPolicy {
            $(
                #[inline]
                $(#[$attribute])*
                fn $name($this: $kind $(, $argument: $type)*) $(-> $result)? {
                    match $this {
                        Self::DoubleWrite(policy) => policy.$name($($argument),*),
                        Self::Mirror(policy) => policy.$name($($argument),*),
                        Self::PreCopy(policy) => policy.$name($($argument),*),
                        Self::PushPull(policy) => policy.$name($($argument),*),
                    }
                }
            )*
        }
    };
}

delegate! {
    fn reaches(self: &Self, pass: Pass, behind: bool) -> bool;
    fn only_marks(self: &Self, pass: Pass) -> bool;
    fn mark(self: &mut Self, pass: Pass, extent: Extent) -> bool;
    fn doubles(self: &Self) -> bool;
    fn mirrors(self: &Self) -> bool;
    fn lets_writes_through(self: &Self, pass: Pass) -> Option<bool>;
    fn begin_round(self: &mut Self, pass: Pass, capacity: Sectors) -> u64;
    fn next(self: &Self, pass: Pass, head: Lba, limit: u32, capacity: Sectors) -> Option<Extent>;
    fn locked(self: &mut Self, pass: Pass, extent: Extent);
    fn give_up(self: &mut Self, pass: Pass, extents: impl Iterator<Item = Extent>, head: Lba);
    fn sends_again(self: &Self, pass: Pass) -> bool;
    fn goes_on(self: &mut Self, pass: Pass, round: u32, compares: bool) -> bool;
    fn is_due_again(self: &Self, pass: Pass) -> bool;
    fn take_rest(self: &mut Self, remember: impl FnMut(Extent));
    fn rest(self: &Self) -> u64;
    fn pulls(self: &Self) -> bool;
    fn owes(self: &Self) -> u64;
    fn each_owed(self: &Self, visit: impl FnMut(Lba, u32, u8));
    fn lacks_only(self: &mut Self, blocks: &BlockSet);
    fn is_hole(self: &mut Self, start: Lba, end: Lba, sent: &BlockSet);
    fn leaves_at(self: &Self) -> Option<Time>;
    fn pass_time(self: &mut Self, now: Time) -> bool;
    fn leaves(self: &Self, ordered: bool) -> bool;
    fn change(self: &mut Self, options: PushOptions, now: Time) -> bool;
    fn step_aside(self: &mut Self, head: Lba, remember: impl FnMut(Extent));
    #[cfg(feature = "planted-bugs")]
    fn plant(self: &mut Self, bug: PlantedBug);
}
