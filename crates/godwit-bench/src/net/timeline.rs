//! Throughput of the clients and CPU use of the hosts, ten times a second.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::common::cpu::Meter;
use godwit_testkit::network::Lan;
use serde::Serialize;

use super::site::Site;

const EVERY: Duration = Duration::from_millis(100);

/// The measurements of a tenth of a second.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Sample {
    /// End of the sample, in seconds since the start of the move.
    pub(super) seconds: f64,
    /// Megabits a second of the clients, both directions.
    pub(super) mbps: f64,
    /// CPU use of QEMU, nodes and back ends at both hosts, in per cent of one processor.
    pub(super) cpu_percent: f64,
}

/// The counters at one moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reading {
    pub(super) at: Instant,
    /// Bytes of the clients, both directions.
    pub(super) bytes: u64,
    /// Segments that the clients' TCP retransmitted.
    pub(super) retransmitted: u64,
    /// CPU seconds at both hosts.
    pub(super) cpu_seconds: f64,
}

/// Reads the counters until `stop` is set. The thread enters the clients' network namespace and stays there.
pub(super) fn read_until(stop: &AtomicBool, site: &Site) -> io::Result<Vec<Reading>> {
    site.clients().enter()?;
    let mut meter = Meter::new(site.hosts());
    let mut readings = Vec::new();
    loop {
        let last = stop.load(Ordering::Relaxed);
        let devices = std::fs::read_to_string("/proc/thread-self/net/dev")?;
        let snmp = std::fs::read_to_string("/proc/thread-self/net/snmp")?;
        let known = bytes(&devices, Lan::BRIDGE).zip(retransmitted(&snmp));
        let (bytes, retransmitted) =
            known.ok_or_else(|| io::Error::other("the kernel has no counters of the clients"))?;
        readings.push(Reading {
            at: Instant::now(),
            bytes,
            retransmitted,
            cpu_seconds: meter.look()?,
        });
        if last {
            return Ok(readings);
        }
        std::thread::sleep(EVERY);
    }
}

/// Returns the differences between consecutive readings, with times relative to `began`.
pub(super) fn samples(readings: &[Reading], began: Instant) -> Vec<Sample> {
    let since = |at: Instant| match at.checked_duration_since(began) {
        Some(after) => after.as_secs_f64(),
        None => -(began - at).as_secs_f64(),
    };
    let pairs = readings.windows(2);
    pairs
        .map(|pair| {
            let seconds = (pair[1].at - pair[0].at).as_secs_f64();
            Sample {
                seconds: since(pair[1].at),
                mbps: (pair[1].bytes - pair[0].bytes) as f64 * 8.0 / 1e6 / seconds,
                cpu_percent: (pair[1].cpu_seconds - pair[0].cpu_seconds) / seconds * 100.0,
            }
        })
        .collect()
}

/// Returns the bytes received and sent by an interface, from Linux's table of devices.
fn bytes(table: &str, interface: &str) -> Option<u64> {
    let line = table.lines().find_map(|line| {
        let (name, counters) = line.trim().split_once(':')?;
        (name == interface).then_some(counters)
    })?;
    let mut counters = line.split_whitespace();
    let received: u64 = counters.next()?.parse().ok()?;
    let sent: u64 = counters.nth(7)?.parse().ok()?;
    Some(received + sent)
}

/// Returns the retransmitted TCP segments from Linux's table of protocols: names in one line, numbers in the next.
fn retransmitted(table: &str) -> Option<u64> {
    let mut lines = table.lines().filter_map(|line| line.strip_prefix("Tcp:"));
    let (names, numbers) = (lines.next()?, lines.next()?);
    let mut pairs = names.split_whitespace().zip(numbers.split_whitespace());
    pairs
        .find(|(name, _)| *name == "RetransSegs")?
        .1
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_of_the_kernel_are_read() {
        let devices = "Inter-| Receive\n face |bytes\n  br0: 100 1 0 0 0 0 0 0 50 2 0 0 0 0 0 0\n";
        assert_eq!(bytes(devices, "br0"), Some(150));
        assert_eq!(bytes(devices, "br1"), None);
        let snmp = "Ip: A\nIp: 1\nTcp: InSegs RetransSegs\nTcp: 9 4\n";
        assert_eq!(retransmitted(snmp), Some(4));
        assert_eq!(retransmitted("Tcp: A\n"), None);
    }

    #[test]
    fn samples_are_rates_since_the_move_began() {
        let start = Instant::now();
        let reading = |ms, bytes, cpu_seconds| Reading {
            at: start + Duration::from_millis(ms),
            bytes,
            retransmitted: 0,
            cpu_seconds,
        };
        let readings = [reading(0, 0, 1.0), reading(500, 125_000, 1.25)];
        let began = start + Duration::from_secs(1);
        let samples = samples(&readings, began);
        assert_eq!(
            samples,
            [Sample {
                seconds: -0.5,
                mbps: 2.0,
                cpu_percent: 50.0
            }]
        );
    }
}
