//! Ctrl-C: the run ends at the next safe place, so that its processes and network namespaces go with their handles.

use std::ffi::{c_int, c_void};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use libc::siginfo_t;
use rustix::process::Signal;
use vmm_sys_util::signal::register_signal_handler;

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Time between two checks of a sleeper.
const LOOK: Duration = Duration::from_millis(50);

/// Records termination signals from now on.
pub(crate) fn catch() -> io::Result<()> {
    for signal in [Signal::INT, Signal::TERM] {
        register_signal_handler(signal.as_raw(), note).map_err(io::Error::from)?;
    }
    Ok(())
}

extern "C" fn note(_signal: c_int, _information: *mut siginfo_t, _context: *mut c_void) {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

/// Checks that the run may go on.
pub(crate) fn check() -> io::Result<()> {
    if INTERRUPTED.load(Ordering::Relaxed) {
        return Err(io::Error::new(
            io::ErrorKind::Interrupted,
            "interrupted by a signal",
        ));
    }
    Ok(())
}

/// Sleeps, unless interrupted.
pub(crate) fn sleep(how_long: Duration) -> io::Result<()> {
    let end = Instant::now() + how_long;
    loop {
        check()?;
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        std::thread::sleep(left.min(LOOK));
    }
}
