//! A card under steady load.

use std::fmt;
use std::io;

use godwit_bench::cpu::{Meter, guest_processor_seconds};
use serde::Serialize;

use crate::net::loads::iperf::Workload;
use crate::net::site::Site;

/// A measurement of one workload.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Steady {
    pub(crate) workload: Workload,
    /// Duration of the measurement.
    pub(crate) seconds: f64,
    /// Megabits a second at the receiving program.
    pub(crate) mbps: f64,
    /// Retransmitted segments, for a stream.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) retransmits: Option<u64>,
    /// Packets a second through the card: the guest's count inward, the client's count outward. Packets of a stream are
    /// as long as the card takes.
    pub(crate) packets_per_second: f64,
    /// CPU seconds of QEMU, the node and the back end, the emulated processor included.
    pub(crate) cpu_seconds: f64,
    /// CPU seconds of the emulated processor alone; the rest is the card's.
    pub(crate) guest_processor_seconds: f64,
    /// Packets per CPU second.
    pub(crate) packets_per_cpu_second: f64,
    /// Megabytes per CPU second.
    pub(crate) megabytes_per_cpu_second: f64,
}

/// Measures every workload once, for `seconds` each.
///
/// # Errors
/// A guest that does not answer, or an error of iperf3.
pub(crate) fn steady(site: &Site, seconds: u64) -> io::Result<Vec<Steady>> {
    let each = Workload::ALL.into_iter();
    each.map(|workload| one(site, workload, seconds)).collect()
}

fn one(site: &Site, workload: Workload, seconds: u64) -> io::Result<Steady> {
    let hosts = site.hosts();
    let mut meter = Meter::new(hosts.clone());
    let counted = site.counters()?;
    let (used, by_guest) = (meter.look()?, guest_processor_seconds(&hosts)?);
    let outcome = workload.run(site, seconds)?;
    let cpu_seconds = meter.look()? - used;
    let guest_processor_seconds = guest_processor_seconds(&hosts)? - by_guest;
    let now = site.counters()?;
    let packets = match (workload.is_inward(), outcome.datagrams) {
        (true, _) => now.received - counted.received,
        (false, Some(datagrams)) => datagrams,
        (false, None) => now.sent - counted.sent,
    };
    Ok(Steady {
        workload,
        seconds: outcome.seconds,
        mbps: outcome.mbps,
        retransmits: outcome.retransmits,
        packets_per_second: packets as f64 / outcome.seconds,
        cpu_seconds,
        guest_processor_seconds,
        packets_per_cpu_second: packets as f64 / cpu_seconds,
        megabytes_per_cpu_second: outcome.mbps / 8.0 * outcome.seconds / cpu_seconds,
    })
}

impl fmt::Display for Steady {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "{:<10} {:>8.1} Mbit/s, {:>7.0} packets/s, {:>7.0} packets and {:>5.0} MB for a CPU second",
            self.workload.name(),
            self.mbps,
            self.packets_per_second,
            self.packets_per_cpu_second,
            self.megabytes_per_cpu_second
        )?;
        match self.retransmits {
            Some(retransmits) => write!(formatter, ", {retransmits} sent again"),
            None => Ok(()),
        }
    }
}
