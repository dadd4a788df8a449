//! Figure 4, (a) and (b): duration of wait-before-stop over the number of queue pairs and over the message size.

use std::io;

use godwit_bench::interrupt;
use godwit_testkit::rdma::{Bed, Program, Side, clean_up, write_bw};
use serde::Serialize;

use crate::rdma::Plan;
use crate::rdma::breakdown::{one, said};
use crate::rdma::report::Report;

/// Requests in flight on each queue pair, as in the paper.
pub(crate) const DEPTH: u32 = 64;
/// Bytes of a message while the number of queue pairs varies, as in the paper.
const MESSAGE: u32 = 4096;
/// Queue pairs while the message size varies.
const PAIRS: u32 = 4;
/// Upper limits of messages and bytes of a run; the smaller one applies. The run must still be at work when the process
/// moves.
const MESSAGES: u32 = 24_000;
const BYTES: u32 = 256 << 20;

/// One move of a sender.
#[derive(Debug, Serialize)]
pub(crate) struct Run {
    /// Name of the varied quantity: queue_pairs, message_bytes or partners.
    pub(crate) over: &'static str,
    pub(crate) queue_pairs: u32,
    pub(crate) message_bytes: u32,
    pub(crate) partners: u32,
    pub(crate) round: u32,
    /// Most bytes in flight when the process is told to stop.
    pub(crate) bytes_in_flight: u64,
    pub(crate) wbs_ms: Option<f64>,
    pub(crate) blackout_ms: Option<f64>,
    pub(crate) error: Option<String>,
}

impl Run {
    /// Returns the value of the varied quantity.
    pub(crate) fn at(&self) -> u32 {
        match self.over {
            "queue_pairs" => self.queue_pairs,
            "message_bytes" => self.message_bytes,
            _ => self.partners,
        }
    }
}

fn program(qps: u32, bytes: u32) -> Program {
    let messages = (MESSAGES.min(BYTES / bytes) / qps).max(2 * DEPTH);
    write_bw(qps, DEPTH, bytes, messages)
}

pub(crate) fn turn(bed: &Bed, plan: &Plan, round: u32, report: &mut Report) -> io::Result<()> {
    let pairs = plan
        .waiting_qps
        .iter()
        .map(|qps| ("queue_pairs", *qps, MESSAGE));
    let sizes = plan
        .message_bytes
        .iter()
        .map(|bytes| ("message_bytes", PAIRS, *bytes));
    for (over, qps, bytes) in pairs.chain(sizes) {
        interrupt::check()?;
        let mut moved = None;
        let error = one(bed, &program(qps, bytes), Side::Client, false, &mut moved).err();
        clean_up(bed)?;
        let error = error.map(|error| error.to_string());
        println!(
            "wait-before-stop, {qps} queue pairs, messages of {bytes}: {}",
            said(moved.as_ref(), error.as_deref())
        );
        report.waiting.push(Run {
            over,
            queue_pairs: qps,
            message_bytes: bytes,
            partners: 1,
            round,
            bytes_in_flight: u64::from(qps) * u64::from(bytes) * u64::from(DEPTH),
            wbs_ms: moved.as_ref().map(|moved| moved.wbs_ms),
            blackout_ms: moved.as_ref().map(|moved| moved.blackout_ms),
            error,
        });
        report.save()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_neither_over_before_it_is_moved_nor_without_end() {
        assert!(program(1, 512).command.ends_with("-n 24000"));
        assert!(program(4, 131_072).command.ends_with("-n 512"));
        // perftest wants more requests than are in flight at once.
        assert!(program(4096, 4096).command.ends_with("-n 128"));
    }
}
