//! Reports of the guest's loads on memory, one for each 100 ms.

use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::Value;

/// Windows kept of each load: an hour of them.
const KEPT: usize = 36_000;

/// A window of the pointer chase.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct ChaseWindow {
    /// Length by the guest's clock, in microseconds.
    pub window_us: u64,
    pub accesses: u64,
    /// Mean time of an access, in nanoseconds.
    pub mean_ns: f64,
    /// Time of the slowest 16 accesses in a row, in nanoseconds.
    pub slowest_run_ns: u64,
}

/// A window of the page writer.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct DirtyWindow {
    /// Length by the guest's clock, in microseconds.
    pub window_us: u64,
    /// Pages written.
    pub pages: u64,
}

impl DirtyWindow {
    /// Returns the MiB of pages a second.
    pub fn rate_mib(&self) -> f64 {
        let seconds = Duration::from_micros(self.window_us).as_secs_f64();
        self.pages as f64 * 4096.0 / f64::from(1 << 20) / seconds
    }
}

/// All windows so far, with the times at which the host received them.
#[derive(Clone, Debug, Default)]
pub struct Windows {
    pub pointer_chase: Vec<(Instant, ChaseWindow)>,
    pub dirty_pages: Vec<(Instant, DirtyWindow)>,
    /// True once cold memory has been written.
    pub cold: bool,
}

impl Windows {
    /// Takes a line that is an object; returns true if the line is a window.
    pub(super) fn take(&mut self, line: &Value, at: Instant) -> bool {
        if let Some(window) = line.get("pointer_chase") {
            keep(&mut self.pointer_chase, window, at);
        } else if let Some(window) = line.get("dirty_pages") {
            keep(&mut self.dirty_pages, window, at);
        } else if line.get("cold").is_some() {
            self.cold = true;
        } else {
            return false;
        }
        true
    }
}

fn keep<T: for<'a> Deserialize<'a>>(kept: &mut Vec<(Instant, T)>, window: &Value, at: Instant) {
    if kept.len() < KEPT
        && let Ok(window) = T::deserialize(window)
    {
        kept.push((at, window));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use serde_json::json;

    use super::Windows;

    #[test]
    fn only_whole_windows_are_kept() {
        let mut windows = Windows::default();
        let now = Instant::now();
        let dirty = json!({"dirty_pages": {"window_us": 100_000, "pages": 256}});
        assert!(windows.take(&dirty, now));
        assert!(windows.take(&json!({"pointer_chase": {"window_us": 1}}), now));
        assert!(!windows.take(&json!({"seq": 1}), now));
        assert!(windows.pointer_chase.is_empty());
        assert!(windows.take(&json!({"cold": {"pages": 7}}), now) && windows.cold);
        let rate = windows.dirty_pages[0].1.rate_mib();
        assert!((rate - 10.0).abs() < 1e-9, "{rate}");
    }
}
