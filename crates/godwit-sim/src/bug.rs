//! Bugs planted into the controllers, as a test of the simulator.

use std::str::FromStr;

use godwit_core::Controller;
#[cfg(feature = "planted-bugs")]
use godwit_core::PlantedBug;

/// A bug to plant into a controller. Only a build with the feature `planted-bugs` has any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bug(PlantedBug);

#[cfg(not(feature = "planted-bugs"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PlantedBug {}

#[cfg(not(feature = "planted-bugs"))]
impl PlantedBug {
    const ALL: [Self; 0] = [];

    const fn name(self) -> &'static str {
        match self {}
    }
}

impl Bug {
    /// Returns all bugs.
    pub fn all() -> impl Iterator<Item = Self> {
        PlantedBug::ALL.into_iter().map(Self)
    }

    /// Returns the name on the command line.
    pub const fn name(self) -> &'static str {
        self.0.name()
    }

    #[cfg(feature = "planted-bugs")]
    pub(crate) const fn plant(self, controller: &mut Controller) {
        controller.plant(self.0);
    }

    #[cfg(not(feature = "planted-bugs"))]
    pub(crate) const fn plant(self, _: &mut Controller) {
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
