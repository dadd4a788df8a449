//! CPU time of all processes in some hosts' network namespaces, ended ones included.

use std::collections::BTreeMap;
use std::io;

use godwit_testkit::network::Namespace;
use godwit_testkit::process::cpu_seconds;
use rustix::process::{Pid, Signal, kill_process};

/// CPU seconds of each process, as of the last look.
#[derive(Debug)]
pub(crate) struct Meter<'a> {
    hosts: Vec<&'a Namespace>,
    used: BTreeMap<u32, f64>,
}

impl<'a> Meter<'a> {
    /// Returns a meter of these hosts.
    pub(crate) const fn new(hosts: Vec<&'a Namespace>) -> Self {
        Self {
            hosts,
            used: BTreeMap::new(),
        }
    }

    /// Returns the CPU seconds of all processes ever seen. An ended process counts up to the last look before its end.
    pub(crate) fn look(&mut self) -> io::Result<f64> {
        for process in inside(&self.hosts)? {
            if let Some(seconds) = cpu_seconds(process) {
                self.used.insert(process, seconds);
            }
        }
        Ok(self.used.values().sum())
    }
}

/// A guard that kills all processes left on these hosts when dropped: QEMU outlives the node that started it.
#[derive(Debug)]
pub(crate) struct Sweep<'a>(pub Vec<&'a Namespace>);

impl Drop for Sweep<'_> {
    fn drop(&mut self) {
        for process in inside(&self.0).unwrap_or_default() {
            if let Some(process) = i32::try_from(process).ok().and_then(Pid::from_raw) {
                // The process may have ended by itself.
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

/// Returns the CPU seconds of the emulated processors on these hosts, from the threads that QEMU names after them. The
/// rest of QEMU's CPU time goes to its devices.
pub(crate) fn guest_processor_seconds(hosts: &[&Namespace]) -> io::Result<f64> {
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
