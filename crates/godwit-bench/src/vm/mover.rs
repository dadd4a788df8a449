//! Movers of a machine. Another peer takes part by a [`Mover`] in [`all`].

use std::fmt::Debug;
use std::io;
use std::time::Duration;

use godwit_testkit::vm::{Finished, GuestConsole, GuestLoad};

use super::godwit::Godwit;
use super::qemu::Qemu;
use crate::suite::site::Site;

/// A way to move machines with their disks.
pub(crate) trait Mover: Debug {
    fn name(&self) -> &str;

    /// Starts a machine on the site's image at the left end of its link and waits until its guest works.
    fn start<'a>(&self, site: &'a Site, load: &GuestLoad) -> io::Result<Box<dyn Machine + 'a>>;
}

/// A machine that can be moved once.
pub(crate) trait Machine: Debug {
    /// Returns the guest's console, valid at both ends.
    fn console(&self) -> &GuestConsole;

    /// Begins the move, like an operator's command.
    fn begin(&mut self) -> io::Result<()>;

    /// Advances the move for up to about `time`. Returns true once the guest runs at the destination and the source is
    /// released.
    fn advance(&mut self, time: Duration) -> io::Result<bool>;

    /// Returns the milliseconds for which QEMU had stopped the guest, after the move.
    fn stopped_ms(&mut self) -> io::Result<f64>;

    /// Cancels a move that has not ended; the machine stays.
    fn cancel(&mut self) -> io::Result<()>;

    /// Keeps a second copy at the other end from now on, which has each write before its acknowledgement.
    fn keep_in_step(&mut self) -> io::Result<()>;

    /// Ends that.
    fn go_alone(&mut self) -> io::Result<()>;

    /// Lets the guest verify its data, ends the machine, and checks its file system.
    fn finish(&mut self) -> io::Result<Finished>;
}

/// Returns all movers, in the order of the report.
pub(crate) fn all() -> Vec<Box<dyn Mover>> {
    vec![
        Box::new(Godwit),
        Box::new(Qemu {
            name: "qemu-background",
            copy_mode: "background",
        }),
        Box::new(Qemu {
            name: "qemu-write-blocking",
            copy_mode: "write-blocking",
        }),
    ]
}
