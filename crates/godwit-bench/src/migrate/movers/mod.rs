//! Movers of a disk. Another policy or peer takes part by a [`Mover`] in [`all`].

mod credentials;
pub(super) mod godwit;
pub(super) mod qemu;

use std::borrow::Cow;
use std::fmt::Debug;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use godwit_testkit::nbd::NbdTarget;

use self::godwit::Godwit;
use self::qemu::{CopyMode, Qemu};
use crate::suite::site::Site;

/// A way to move disks.
pub(crate) trait Mover: Debug {
    fn name(&self) -> &str;

    /// Returns true if a quick run includes this mover.
    fn in_quick(&self) -> bool;

    /// Serves the site's image at the left end of its link, ready to move to the right end.
    fn open(&self, site: &Site) -> io::Result<Box<dyn Moving>>;
}

/// A served disk that can be moved once.
pub(crate) trait Moving: Debug {
    /// Returns the guest's target, valid before and after the move.
    fn guest(&self) -> NbdTarget;

    /// Returns the CPU seconds so far of all processes that serve and move the disk.
    fn cpu_seconds(&self) -> io::Result<f64>;

    /// Begins the move, like an operator's command.
    fn begin(&mut self) -> io::Result<()>;

    /// Advances the move for up to about `time`. Returns true once the switchover has ended.
    fn advance(&mut self, time: Duration) -> io::Result<bool>;

    /// Cancels a move that has not ended; the disk stays.
    fn cancel(&mut self) -> io::Result<()>;

    /// Returns the images at the left and the right end.
    fn images(&self) -> io::Result<[PathBuf; 2]>;

    /// Ends all processes that serve the disk, with their writes complete.
    fn close(&mut self) -> io::Result<()>;
}

/// Options of Godwit's default promise.
pub(super) const AUTO: [&str; 4] = ["--policy", "double-write", "--sla", "auto"];
/// Options of a promise that leaves room, and so favours move time over throughput.
const STATED: [&str; 4] = ["--policy", "double-write", "--sla", "p99.9<20ms"];

fn variant(name: &'static str, options: &'static [&'static str]) -> Godwit {
    Godwit {
        name: Cow::Borrowed(name),
        options,
        unencrypted_data: false,
        in_quick: false,
        program: None,
        node_options: Vec::new(),
    }
}

/// Returns Godwit with its default promise.
pub(super) fn godwit() -> Godwit {
    Godwit {
        in_quick: true,
        ..variant("godwit", &AUTO)
    }
}

/// Returns the variants that are judged against the targets.
pub(super) fn judged() -> [Godwit; 4] {
    let unencrypted = |name, options| Godwit {
        unencrypted_data: true,
        ..variant(name, options)
    };
    [
        godwit(),
        variant("godwit-20ms", &STATED),
        unencrypted("godwit-unencrypted", &AUTO),
        unencrypted("godwit-20ms-unencrypted", &STATED),
    ]
}

/// Returns another build of Godwit, which may know no policies.
pub(super) fn other_build(program: PathBuf) -> Godwit {
    Godwit {
        program: Some(program),
        ..variant("godwit-other", &["--sla", "auto"])
    }
}

/// Returns Godwit without a part of its governor.
pub(super) fn without(part: &str) -> Godwit {
    Godwit {
        name: Cow::Owned(format!("without-{part}")),
        node_options: vec![String::from("--governor-without"), part.to_owned()],
        ..godwit()
    }
}

/// Returns all movers, in the order of the report.
pub(crate) fn all() -> Vec<Box<dyn Mover>> {
    let policies = [
        variant(
            "godwit-pre-copy",
            &["--policy", "pre-copy", "--sla", "auto"],
        ),
        variant("godwit-mirror", &["--policy", "mirror", "--sla", "auto"]),
    ];
    let ours = judged()
        .into_iter()
        .chain(policies)
        .map(|godwit| Box::new(godwit) as Box<dyn Mover>);
    let mut all: Vec<Box<dyn Mover>> = ours.collect();
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
