//! A card under steady load.

use std::io;

use crate::common::cpu::{Meter, guest_processor_seconds};
use serde_json::{Value, json};

use super::iperf::Workload;
use super::site::Site;

/// Measures one workload for `seconds`. `cpu_seconds` are those of QEMU, the node and the back end, the emulated
/// processor included; `guest_processor_seconds` are those of the emulated processor alone, and the rest is the card's.
pub(super) fn measure(site: &Site, workload: Workload, seconds: u64) -> io::Result<Value> {
    let hosts = site.hosts();
    let mut meter = Meter::new(hosts.clone());
    let counted = site.counters()?;
    let (used, by_guest) = (meter.look()?, guest_processor_seconds(&hosts)?);
    let outcome = workload.run(site, seconds)?;
    let cpu_seconds = meter.look()? - used;
    let guest_processor_seconds = guest_processor_seconds(&hosts)? - by_guest;
    let now = site.counters()?;
    // The guest's count inward, the client's count outward. Packets of a stream are as long as the card takes.
    let packets = match (workload.is_inward(), outcome.datagrams) {
        (true, _) => now.received - counted.received,
        (false, Some(datagrams)) => datagrams,
        (false, None) => now.sent - counted.sent,
    };
    let mut run = json!({
        "workload": workload.name(), "seconds": outcome.seconds, "mbps": outcome.mbps,
        "packets_per_second": packets as f64 / outcome.seconds, "cpu_seconds": cpu_seconds,
        "guest_processor_seconds": guest_processor_seconds, "packets_per_cpu_second": packets as f64 / cpu_seconds,
        "megabytes_per_cpu_second": outcome.mbps / 8.0 * outcome.seconds / cpu_seconds,
    });
    if let Some(retransmits) = outcome.retransmits {
        run["retransmits"] = retransmits.into();
    }
    Ok(run)
}
