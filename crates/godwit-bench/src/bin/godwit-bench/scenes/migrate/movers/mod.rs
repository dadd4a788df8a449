//! Movers of a disk. Another policy or peer takes part by a [`Mover`] in [`all`].

mod credentials;
pub(super) mod godwit;
pub(super) mod qemu;

use std::fmt::Debug;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use godwit_testkit::nbd::NbdTarget;

use crate::scenes::migrate::movers::godwit::{Godwit, Variant};
use crate::scenes::migrate::movers::qemu::{CopyMode, Qemu};
use crate::site::Site;

/// A way to move disks.
pub(crate) trait Mover: Debug {
    /// Returns the name in the report.
    fn name(&self) -> &str;

    /// Returns true if a quick run includes this mover.
    fn in_quick(&self) -> bool {
        true
    }

    /// Serves the site's image at the left end of its link, ready to move to the right end.
    ///
    /// # Errors
    /// A server that does not come up.
    fn open(&self, site: &Site) -> io::Result<Box<dyn Moving>>;
}

/// A served disk that can be moved once.
pub(crate) trait Moving: Debug {
    /// Returns the guest's target, valid before and after the move.
    fn guest(&self) -> NbdTarget;

    /// Returns the CPU seconds so far of all processes that serve and move the disk.
    ///
    /// # Errors
    /// A process is gone.
    fn cpu_seconds(&self) -> io::Result<f64>;

    /// Begins the move, like an operator's command.
    ///
    /// # Errors
    /// The move is refused.
    fn begin(&mut self) -> io::Result<()>;

    /// Advances the move for up to about `time`. Returns true once the switchover has ended.
    ///
    /// # Errors
    /// The move failed.
    fn advance(&mut self, time: Duration) -> io::Result<bool>;

    /// Cancels a move that has not ended; the disk stays.
    ///
    /// # Errors
    /// The move does not stop.
    fn cancel(&mut self) -> io::Result<()>;

    /// Returns the images at the left and the right end.
    ///
    /// # Errors
    /// The images are not known.
    fn images(&self) -> io::Result<[PathBuf; 2]>;

    /// Ends all processes that serve the disk, with their writes complete.
    ///
    /// # Errors
    /// A process fails at the end.
    fn close(&mut self) -> io::Result<()>;
}

/// Godwit with its default promise.
pub(in crate::scenes::migrate) const AUTO: Godwit = Godwit {
    name: "godwit",
    options: &["--policy", "double-write", "--sla", "auto"],
    unencrypted_data: false,
    in_quick: true,
};

/// Godwit with a stated promise that leaves room, and so favours move time over throughput.
const STATED: Godwit = Godwit {
    name: "godwit-20ms",
    options: &["--policy", "double-write", "--sla", "p99.9<20ms"],
    in_quick: false,
    ..AUTO
};

/// Godwit's variants that are judged against the targets.
pub(in crate::scenes::migrate) const GODWITS: [Godwit; 4] = [
    AUTO,
    STATED,
    Godwit {
        name: "godwit-unencrypted",
        unencrypted_data: true,
        in_quick: false,
        ..AUTO
    },
    Godwit {
        name: "godwit-20ms-unencrypted",
        unencrypted_data: true,
        ..STATED
    },
];

/// Godwit with its other policies.
const POLICIES: [Godwit; 2] = [
    Godwit {
        name: "godwit-pre-copy",
        options: &["--policy", "pre-copy", "--sla", "auto"],
        in_quick: false,
        ..AUTO
    },
    Godwit {
        name: "godwit-mirror",
        options: &["--policy", "mirror", "--sla", "auto"],
        in_quick: false,
        ..AUTO
    },
];

/// Returns another build of Godwit, which may know no policies.
pub(in crate::scenes::migrate) fn other_build(program: PathBuf) -> Variant {
    Variant {
        name: String::from("godwit-other"),
        godwit: Godwit {
            options: &["--sla", "auto"],
            ..AUTO
        },
        program: Some(program),
        node_options: Vec::new(),
    }
}

/// Returns Godwit without a part of its governor.
pub(in crate::scenes::migrate) fn without(part: &str) -> Variant {
    Variant {
        name: format!("without-{part}"),
        godwit: AUTO,
        program: None,
        node_options: vec![String::from("--governor-without"), part.to_owned()],
    }
}

/// Returns all movers, in the order of the report.
pub(crate) fn all() -> Vec<Box<dyn Mover>> {
    let mut all: Vec<Box<dyn Mover>> = Vec::from(GODWITS.map(|godwit| Box::new(godwit) as _));
    all.extend(POLICIES.map(|godwit| Box::new(godwit) as Box<dyn Mover>));
    for encrypted in [false, true] {
        for mode in [
            CopyMode::Background,
            CopyMode::WriteBlocking,
            CopyMode::Switched,
        ] {
            all.push(Box::new(Qemu { mode, encrypted }));
        }
    }
    all
}
