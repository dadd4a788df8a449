//! Who can move a disk. Another policy or peer takes part by a [`Mover`] in [`all`].

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

/// Something that moves disks.
pub(crate) trait Mover: Debug {
    /// How the report calls it.
    fn name(&self) -> &str;

    /// Whether a quick run has it, too.
    fn in_quick(&self) -> bool {
        true
    }

    /// Serves the site's image at the left end of its link, ready to be moved to the right end.
    ///
    /// # Errors
    /// When it does not come up.
    fn open(&self, site: &Site) -> io::Result<Box<dyn Moving>>;
}

/// A disk that is served and can be moved, once.
pub(crate) trait Moving: Debug {
    /// Where the guest uses the disk, before and after the move.
    fn guest(&self) -> NbdTarget;

    /// CPU seconds so far of all processes that serve and move the disk.
    ///
    /// # Errors
    /// When one of them is gone.
    fn cpu_seconds(&self) -> io::Result<f64>;

    /// Begins to move: what an operator's command does.
    ///
    /// # Errors
    /// When it is refused.
    fn begin(&mut self) -> io::Result<()>;

    /// Goes on for about so long, less when something happens; says whether the switchover has
    /// ended.
    ///
    /// # Errors
    /// When the move failed.
    fn advance(&mut self, time: Duration) -> io::Result<bool>;

    /// Stops a move that has not ended; the disk stays where it is.
    ///
    /// # Errors
    /// When it does not stop.
    fn cancel(&mut self) -> io::Result<()>;

    /// The image at the left end and the one at the right end.
    ///
    /// # Errors
    /// When they are not known.
    fn images(&self) -> io::Result<[PathBuf; 2]>;

    /// Ends everything that serves the disk, with all that it wrote written.
    ///
    /// # Errors
    /// When something fails at the end.
    fn close(&mut self) -> io::Result<()>;
}

/// Godwit with the promise that it makes by itself.
pub(in crate::scenes::migrate) const AUTO: Godwit = Godwit {
    name: "godwit",
    options: &["--policy", "double-write", "--sla", "auto"],
    unencrypted_data: false,
    in_quick: true,
};

/// Godwit when somebody states a promise that leaves room, and so takes time before throughput.
const STATED: Godwit = Godwit {
    name: "godwit-20ms",
    options: &["--policy", "double-write", "--sla", "p99.9<20ms"],
    in_quick: false,
    ..AUTO
};

/// Godwit, in each way that is held against the targets.
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

/// Godwit by its other policies.
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

/// Another build of Godwit, which may know no policies.
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

/// Godwit without a part of its governor.
pub(in crate::scenes::migrate) fn without(part: &str) -> Variant {
    Variant {
        name: format!("without-{part}"),
        godwit: AUTO,
        program: None,
        node_options: vec![String::from("--governor-without"), part.to_owned()],
    }
}

/// All movers, in the order of the report.
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
