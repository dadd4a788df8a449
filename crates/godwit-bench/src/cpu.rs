//! CPU time of everything on some hosts that are network namespaces, whoever started it and whether it still runs.

use std::collections::BTreeMap;
use std::io;

use godwit_testkit::network::Namespace;
use godwit_testkit::process::cpu_seconds;
use rustix::process::{Pid, Signal, kill_process};

/// What the processes have used, each as far as it was last looked at.
#[derive(Debug)]
pub struct Meter<'a> {
    hosts: Vec<&'a Namespace>,
    used: BTreeMap<u32, f64>,
}

impl<'a> Meter<'a> {
    /// A meter of these hosts.
    pub const fn new(hosts: Vec<&'a Namespace>) -> Self {
        Self {
            hosts,
            used: BTreeMap::new(),
        }
    }

    /// CPU seconds of all processes that were ever seen. One that ends is counted up to the last look
    /// before.
    ///
    /// # Errors
    /// When `/proc` cannot be read.
    pub fn look(&mut self) -> io::Result<f64> {
        for process in inside(&self.hosts)? {
            if let Some(seconds) = cpu_seconds(process) {
                self.used.insert(process, seconds);
            }
        }
        Ok(self.used.values().sum())
    }
}

/// Ends whatever is left on these hosts: QEMU outlives the node that started it.
#[derive(Debug)]
pub struct Sweep<'a>(pub Vec<&'a Namespace>);

impl Drop for Sweep<'_> {
    fn drop(&mut self) {
        for process in inside(&self.0).unwrap_or_default() {
            if let Some(process) = i32::try_from(process).ok().and_then(Pid::from_raw) {
                // It may have ended by itself.
                let _ = kill_process(process, Signal::KILL);
            }
        }
    }
}

fn inside(hosts: &[&Namespace]) -> io::Result<Vec<u32>> {
    let mut all = Vec::new();
    for host in hosts {
        all.extend(host.processes()?);
    }
    Ok(all)
}

/// CPU seconds that the emulated processors of the machines on these hosts have used: of threads that QEMU names after
/// them. The rest of what QEMU uses goes to its devices.
///
/// # Errors
/// When `/proc` cannot be read.
pub fn guest_processor_seconds(hosts: &[&Namespace]) -> io::Result<f64> {
    let processes = inside(hosts)?.into_iter();
    let tasks = processes.flat_map(|process| {
        let tasks = std::fs::read_dir(format!("/proc/{process}/task"));
        tasks.into_iter().flatten().flatten()
    });
    let used = tasks.filter_map(|task| {
        let name = std::fs::read_to_string(task.path().join("comm")).ok()?;
        if !name.starts_with("CPU ") {
            return None;
        }
        // Nanoseconds on a processor, and two more numbers.
        let scheduled = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        scheduled.split(' ').next()?.parse::<f64>().ok()
    });
    Ok(used.sum::<f64>() / 1e9)
}
