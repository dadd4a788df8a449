//! A card under steady load.

use std::fmt;
use std::io;

use godwit_bench::cpu::{Meter, guest_processor_seconds};
use serde::Serialize;

use crate::loads::iperf::Workload;
use crate::site::Site;

/// One workload, measured once.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Steady {
    pub(crate) workload: Workload,
    /// How long it was measured.
    pub(crate) seconds: f64,
    /// Megabits a second that the receiving program got.
    pub(crate) mbps: f64,
    /// Segments that were sent again, of a stream.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) retransmits: Option<u64>,
    /// Packets a second that came through the card: to the guest by its own count; from it, those that the client got. Of
    /// a stream these are as long as the card takes them.
    pub(crate) packets_per_second: f64,
    /// CPU seconds of QEMU, the node and the back end, the emulated processor among them.
    pub(crate) cpu_seconds: f64,
    /// Those of the emulated processor alone: without them it is the card.
    pub(crate) guest_processor_seconds: f64,
    /// Packets for each of the CPU seconds.
    pub(crate) packets_per_cpu_second: f64,
    /// Megabytes for each of the CPU seconds.
    pub(crate) megabytes_per_cpu_second: f64,
}

/// Measures every workload once, for so long each.
///
/// # Errors
/// When the guest does not answer, or iperf3 fails.
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
