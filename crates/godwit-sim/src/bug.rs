//! Bugs planted into the controllers, as a test of the simulator.

#[cfg(feature = "planted-bugs")]
pub use self::planted::Bug;
#[cfg(not(feature = "planted-bugs"))]
pub use self::sound::Bug;

#[cfg(feature = "planted-bugs")]
mod planted {
    use std::str::FromStr;
    use std::sync::Arc;

    use godwit_core::PlantedBug;

    use crate::world::Prepare;

    /// A bug to plant into a controller.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Bug(PlantedBug);

    impl Bug {
        /// All bugs.
        pub const ALL: &[Self] = &{
            let mut all = [Self(PlantedBug::ALL[0]); PlantedBug::ALL.len()];
            let mut at = 0;
            while at < all.len() {
                all[at] = Self(PlantedBug::ALL[at]);
                at += 1;
            }
            all
        };

        /// Returns the name on the command line.
        pub const fn name(self) -> &'static str {
            self.0.name()
        }

        pub(crate) fn prepare(self) -> Prepare {
            Arc::new(move |controller| controller.plant(self.0))
        }
    }

    impl FromStr for Bug {
        type Err = String;

        fn from_str(text: &str) -> Result<Self, String> {
            let found = Self::ALL.iter().find(|bug| bug.name() == text);
            found.copied().ok_or_else(|| {
                let names: Vec<_> = Self::ALL.iter().map(|bug| bug.name()).collect();
                format!("'{text}' is none of {}", names.join(", "))
            })
        }
    }
}

#[cfg(not(feature = "planted-bugs"))]
mod sound {
    use std::str::FromStr;

    use crate::world::Prepare;

    /// No bugs: only a build with the feature `planted-bugs` has any.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Bug {}

    impl Bug {
        /// All bugs.
        pub const ALL: &[Self] = &[];

        /// Returns the name on the command line.
        pub const fn name(self) -> &'static str {
            match self {}
        }

        pub(crate) fn prepare(self) -> Prepare {
            match self {}
        }
    }

    impl FromStr for Bug {
        type Err = String;

        fn from_str(text: &str) -> Result<Self, String> {
            Err(format!(
                "'{text}' cannot be planted: build with --features planted-bugs"
            ))
        }
    }
}
