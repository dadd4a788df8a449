//! The demo's report: `target/demo-net/report.json`.

use std::collections::BTreeMap;

use godwit_testkit::network::{Ping, Talked};
use godwit_testkit::report::median;
use serde::Serialize;

/// Longest median excess of the client's gap over the guest's blackout, in milliseconds.
const GAP_GOAL: f64 = 30.0;

/// All moves.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) moves: Vec<Moved>,
    /// Number of pings, also between the moves.
    pub(crate) pings: usize,
    /// Pings that were lost or answered twice in all.
    pub(crate) pings_lost: usize,
    pub(crate) pings_twice: usize,
    /// Bytes of the conversation that came back, and those that came back different.
    pub(crate) bytes_checked: u64,
    pub(crate) bytes_wrong: u64,
    pub(crate) connections_reset: u32,
    /// Packets dropped in all by the interfaces of each host and of the switch, to find the place of a loss. Packets
    /// without a receiver are among them.
    pub(crate) dropped_by_kernel: BTreeMap<String, BTreeMap<String, u64>>,
    /// Medians over all moves.
    pub(crate) blackout_ms_guest: f64,
    pub(crate) gap_ms_client: f64,
    /// Median excess of the client's gap over the guest's blackout, and true if the excess is within the goal.
    pub(crate) gap_beyond_blackout_ms: f64,
    pub(crate) goal_met: bool,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Moved {
    pub(crate) from: String,
    pub(crate) to: String,
    /// Time from QEMU's stop at the source to QEMU's start at the destination.
    pub(crate) blackout_ms_guest: f64,
    /// The client's longest time without an answer.
    pub(crate) gap_ms_client: f64,
    pub(crate) packets_lost: usize,
    pub(crate) packets_twice: usize,
    pub(crate) connections_reset: u32,
    pub(crate) held_packets: u64,
}

impl Moved {
    /// Adds the outcome of the pings that left from shortly before the move until shortly after.
    pub(crate) fn judge(&mut self, pings: &[Ping]) {
        (self.packets_lost, self.packets_twice) = faults(pings);
        let mut answers: Vec<_> = pings.iter().filter_map(|ping| ping.answered).collect();
        answers.sort_unstable();
        let gaps = answers.windows(2).map(|pair| pair[1] - pair[0]);
        self.gap_ms_client = gaps.max().unwrap_or_default().as_secs_f64() * 1000.0;
    }
}

/// Returns the number of lost pings, and of pings answered more than once.
fn faults(pings: &[Ping]) -> (usize, usize) {
    let lost = pings.iter().filter(|ping| ping.answers == 0).count();
    (lost, pings.iter().filter(|ping| ping.answers > 1).count())
}

impl Report {
    pub(crate) fn new(moves: Vec<Moved>, pings: &[Ping], talked: Talked) -> Self {
        let of = |pick: fn(&Moved) -> f64| median(&moves.iter().map(pick).collect::<Vec<_>>());
        let beyond = of(|moved| moved.gap_ms_client - moved.blackout_ms_guest);
        let (pings_lost, pings_twice) = faults(pings);
        Self {
            pings: pings.len(),
            pings_lost,
            pings_twice,
            bytes_checked: talked.bytes,
            bytes_wrong: talked.wrong,
            connections_reset: u32::from(talked.reset),
            dropped_by_kernel: BTreeMap::new(),
            blackout_ms_guest: of(|moved| moved.blackout_ms_guest),
            gap_ms_client: of(|moved| moved.gap_ms_client),
            gap_beyond_blackout_ms: beyond,
            goal_met: beyond <= GAP_GOAL,
            moves,
        }
    }

    pub(crate) fn tell(&self) {
        println!(
            "{} moves: {} pings, {} lost, {} twice; {} bytes of TCP checked, {} wrong; {} connections reset",
            self.moves.len(),
            self.pings,
            self.pings_lost,
            self.pings_twice,
            self.bytes_checked,
            self.bytes_wrong,
            self.connections_reset
        );
        let word = if self.goal_met { "met" } else { "NOT met" };
        println!(
            "medians: the guest stood still for {:.0} ms, the client missed it for {:.0} ms, {:.1} ms longer \
             (at most {GAP_GOAL:.0}: {word})",
            self.blackout_ms_guest, self.gap_ms_client, self.gap_beyond_blackout_ms
        );
    }

    /// Returns true if the client lost nothing. The client's waiting time does not count here.
    pub(crate) fn is_good(&self) -> bool {
        let faults = self.pings_lost + self.pings_twice + self.connections_reset as usize;
        faults == 0 && self.bytes_wrong == 0 && self.bytes_checked > 0 && !self.moves.is_empty()
    }
}
