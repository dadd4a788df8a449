//! Bugs planted into the nodes, as a test of the simulator.

use std::str::FromStr;

use godwit_core::Controller;
#[cfg(feature = "planted-bugs")]
use godwit_core::PlantedBug;

/// A bug of the nodes around their controllers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BodyBug {
    /// The packets of an epoch leave once its checkpoint is captured.
    ReleaseUnacknowledged,
    /// A backup goes on from its newest memory, whether or not the disk is as new.
    HalfEpoch,
}

/// A bug to plant into a controller, or around it. Only a build with the feature `planted-bugs` has any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bug(Planted);

#[cfg(feature = "planted-bugs")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Planted {
    Controller(PlantedBug),
    Body(BodyBug),
}

#[cfg(not(feature = "planted-bugs"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Planted {}

#[cfg(feature = "planted-bugs")]
impl Bug {
    /// Returns all bugs.
    pub fn all() -> impl Iterator<Item = Self> {
        let bodies = [BodyBug::ReleaseUnacknowledged, BodyBug::HalfEpoch];
        let controllers = PlantedBug::ALL.into_iter().map(Planted::Controller);
        controllers.chain(bodies.map(Planted::Body)).map(Self)
    }

    /// Returns the name on the command line.
    pub const fn name(self) -> &'static str {
        match self.0 {
            Planted::Controller(bug) => bug.name(),
            Planted::Body(BodyBug::ReleaseUnacknowledged) => "release-unacknowledged",
            Planted::Body(BodyBug::HalfEpoch) => "half-epoch",
        }
    }

    pub(crate) const fn plant(self, controller: &mut Controller) {
        if let Planted::Controller(bug) = self.0 {
            controller.plant(bug);
        }
    }

    pub(crate) fn is(self, bug: BodyBug) -> bool {
        self.0 == Planted::Body(bug)
    }
}

#[cfg(not(feature = "planted-bugs"))]
impl Bug {
    /// Returns all bugs.
    pub fn all() -> impl Iterator<Item = Self> {
        std::iter::empty()
    }

    /// Returns the name on the command line.
    pub const fn name(self) -> &'static str {
        match self.0 {}
    }

    pub(crate) const fn plant(self, _: &mut Controller) {
        match self.0 {}
    }

    pub(crate) const fn is(self, _: BodyBug) -> bool {
        match self.0 {}
    }
}

impl FromStr for Bug {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::all().find(|bug| bug.name() == text);
        found.ok_or_else(|| {
            let names: Vec<_> = Self::all().map(Self::name).collect();
            match names[..] {
                [] => format!("'{text}' cannot be planted: build with --features planted-bugs"),
                _ => format!("'{text}' is none of {}", names.join(", ")),
            }
        })
    }
}
