//! Who can move a machine. Another peer takes part by a [`Mover`] in [`all`].

use std::fmt::Debug;
use std::io;
use std::time::Duration;

use godwit_testkit::vm::{Finished, GuestConsole, GuestLoad};

use crate::scenes::vm::godwit::Godwit;
use crate::scenes::vm::qemu::Qemu;
use crate::site::Site;

/// Something that moves machines with their disks.
pub(crate) trait Mover: Debug {
    /// How the report calls it.
    fn name(&self) -> &str;

    /// Starts a machine on the site's image at the left end of its link and waits until its guest
    /// works.
    ///
    /// # Errors
    /// When it does not.
    fn start<'a>(&self, site: &'a Site, load: &GuestLoad) -> io::Result<Box<dyn Machine + 'a>>;
}

/// A machine that can be moved, once.
pub(crate) trait Machine: Debug {
    /// Its guest's console, wherever it runs.
    fn console(&self) -> &GuestConsole;

    /// Begins to move: what an operator's command does.
    ///
    /// # Errors
    /// When it is refused.
    fn begin(&mut self) -> io::Result<()>;

    /// Goes on for about so long, less when something happens; says whether the guest runs at the
    /// destination and the source is released.
    ///
    /// # Errors
    /// When the move failed.
    fn advance(&mut self, time: Duration) -> io::Result<bool>;

    /// How long QEMU had stopped the guest, in milliseconds, once it has moved.
    ///
    /// # Errors
    /// When that is not known.
    fn stopped_ms(&mut self) -> io::Result<f64>;

    /// Stops a move that has not ended; the machine stays where it is.
    ///
    /// # Errors
    /// When it does not stop.
    fn cancel(&mut self) -> io::Result<()>;

    /// Lets the guest compare everything, and ends the machine; its file system is checked.
    ///
    /// # Errors
    /// Whatever is wrong.
    fn finish(&mut self) -> io::Result<Finished>;
}

/// All movers, in the order of the report.
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
