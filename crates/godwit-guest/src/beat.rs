//! A beat that depends on nothing but the machine's processors. On the host, missing beats show the time in which the
//! processors did not run.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use crate::console;

/// Prints `=N` each `milliseconds` until told to stop; never with 0.
pub(crate) fn run(milliseconds: u64, stop: &AtomicBool) {
    let mut number = 0u64;
    while milliseconds > 0 && !stop.load(Relaxed) {
        thread::sleep(Duration::from_millis(milliseconds));
        number += 1;
        console::say(&format!("={number}"));
    }
}
