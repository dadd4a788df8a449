//! CPU time of everything at both ends of a link, whoever started it and whether it still runs.

use std::collections::BTreeMap;
use std::io;

use godwit_testkit::network::Link;
use godwit_testkit::process::cpu_seconds;
use rustix::process::{Pid, Signal, kill_process};

/// What the processes have used, each as far as it was last looked at.
#[derive(Debug)]
pub(crate) struct Meter<'a> {
    link: &'a Link,
    used: BTreeMap<u32, f64>,
}

impl<'a> Meter<'a> {
    /// A meter of both ends.
    pub(crate) const fn new(link: &'a Link) -> Self {
        Self {
            link,
            used: BTreeMap::new(),
        }
    }

    /// CPU seconds of all processes that were ever seen. One that ends is counted up to the last look
    /// before.
    ///
    /// # Errors
    /// When `/proc` cannot be read.
    pub(crate) fn look(&mut self) -> io::Result<f64> {
        for process in inside(self.link)? {
            if let Some(seconds) = cpu_seconds(process) {
                self.used.insert(process, seconds);
            }
        }
        Ok(self.used.values().sum())
    }
}

/// Ends whatever is left at both ends of a link: QEMU outlives the node that started it.
#[derive(Debug)]
pub(crate) struct Sweep<'a>(pub(crate) &'a Link);

impl Drop for Sweep<'_> {
    fn drop(&mut self) {
        for process in inside(self.0).unwrap_or_default() {
            if let Some(process) = i32::try_from(process).ok().and_then(Pid::from_raw) {
                // It may have ended by itself.
                let _ = kill_process(process, Signal::KILL);
            }
        }
    }
}

fn inside(link: &Link) -> io::Result<Vec<u32>> {
    let mut all = link.left().processes()?;
    all.extend(link.right().processes()?);
    Ok(all)
}
