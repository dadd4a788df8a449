//! Ends of a boot without a preceding unmount.

use std::fs;
use std::sync::OnceLock;

use rustix::system::{RebootCommand, reboot};

use crate::console;

/// The way in which a boot ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The kernel shuts its devices down and resets the machine.
    Reboot,
    /// The kernel resets the machine at once (`panic=-1`).
    Panic,
    /// The kernel shuts its devices down and switches the machine off.
    PowerOff,
}

impl Ending {
    pub(crate) fn of(word: &str) -> Option<Self> {
        match word {
            "reboot" => Some(Self::Reboot),
            "panic" => Some(Self::Panic),
            "power-off" => Some(Self::PowerOff),
            _ => None,
        }
    }
}

/// Returns the id of this boot. With the id, a repeated command to end a boot does not end the next one.
pub(crate) fn boot() -> &'static str {
    static BOOT: OnceLock<String> = OnceLock::new();
    BOOT.get_or_init(|| {
        let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        id.trim().to_owned()
    })
}

/// Announces the end, and ends this boot in the midst of all loads.
pub(crate) fn end(how: Ending) {
    console::say_text("ending", boot());
    console::drain();
    let ended = match how {
        Ending::Reboot => reboot(RebootCommand::Restart).map_err(Into::into),
        Ending::PowerOff => reboot(RebootCommand::PowerOff).map_err(Into::into),
        Ending::Panic => fs::write("/proc/sysrq-trigger", "c"),
    };
    if let Err(error) = ended {
        console::say_text("error", &format!("cannot end by {how:?}: {error}"));
    }
}
