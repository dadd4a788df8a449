//! The table of policies: their descriptions and options, and the policy of a migration.
//!
//! A policy is one file with its [`PolicyDescription`] and its implementation of [`Policy`], and its lines in this file.
//! Nothing else asks which policy a migration has.

mod double_write;
mod mirror;
mod pre_copy;
mod push_pull;
mod seam;

pub use self::double_write::*;
pub use self::mirror::*;
pub use self::pre_copy::*;
pub use self::push_pull::*;
pub(in crate::controller) use self::seam::{Policy, Route};
use crate::controller::block_set::BlockSet;
use crate::controller::transfer::heat::BLOCK_SECTORS;
use crate::controller::transfer::pass::Pass;
use crate::controller::{MigrationOptions, StartError};
#[cfg(feature = "planted-bugs")]
use crate::planted::PlantedBug;
use crate::units::{Extent, Lba, Sectors, Time};
use crate::wire::Features;

/// The policies that can be chosen, in the order of the command line.
pub const POLICIES: [&PolicyDescription; 5] =
    [DOUBLE_WRITE, PRE_COPY, MIRROR, PUSH_PULL, POST_COPY];

/// Description of a policy, for those who offer, choose or count policies.
#[derive(Debug, PartialEq, Eq)]
pub struct PolicyDescription {
    /// Name in the API and on the command line.
    pub name: &'static str,
    /// Help on the command line.
    pub summary: &'static str,
    /// Code in an offer.
    pub(crate) code: u8,
    /// Features required at the other node.
    pub needs: Features,
    /// The policy with its usual options.
    pub usual: PolicyOptions,
    /// True if a node that chose the policy may go on by push and pull instead.
    pub reviewed: bool,
}

impl PolicyDescription {
    /// Returns true if the disk changes hands without a part, which the destination pulls.
    pub const fn pulls(&self) -> bool {
        self.needs.contain(Features::PULLS)
    }

    /// Returns true if a part of the disk is pushed before the disk changes hands without the rest.
    pub fn pushes(&self) -> bool {
        self.usual.push().is_some_and(|push| push.threshold > 0)
    }
}

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
    /// Returns the policy's description.
    pub const fn description(self) -> &'static PolicyDescription {
        match self {
            Self::DoubleWrite => DOUBLE_WRITE,
            Self::Mirror => MIRROR,
            Self::PreCopy(_) => PRE_COPY,
            Self::PushPull(PushOptions { threshold: 0, .. }) => POST_COPY,
            Self::PushPull(_) => PUSH_PULL,
        }
    }

    /// Returns the options of the rounds, if the policy has rounds.
    pub const fn rounds(self) -> Option<RoundOptions> {
        match self {
            Self::PreCopy(rounds) => Some(rounds),
            _ => None,
        }
    }

    /// Returns the options of the push, if the destination pulls the rest.
    pub const fn push(self) -> Option<PushOptions> {
        match self {
            Self::PushPull(push) => Some(push),
            _ => None,
        }
    }

    /// Returns the policy with these options, if given, where they apply.
    #[must_use]
    pub fn with(self, rounds: Option<RoundOptions>, push: Option<PushOptions>) -> Self {
        match self {
            Self::PreCopy(usual) => Self::PreCopy(rounds.unwrap_or(usual)),
            Self::PushPull(usual) => Self::PushPull(push.unwrap_or(usual)),
            _ => self,
        }
    }

    /// Returns the policy for a move without the disk's image, which tracks copied blocks one by one. A double write
    /// would need all of its block at both nodes.
    #[must_use]
    pub fn without_image(self) -> Self {
        match self {
            Self::PushPull(_) => self,
            _ => Self::PreCopy(RoundOptions {
                block_sectors: BLOCK_SECTORS,
                ..self.rounds().unwrap_or(RoundOptions::USUAL)
            }),
        }
    }

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
