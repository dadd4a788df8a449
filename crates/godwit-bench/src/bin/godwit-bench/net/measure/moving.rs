//! A machine that moves under a load, as seen by its clients.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use godwit_testkit::network::{Ping, Pinger, Requests};
use serde::Serialize;

use super::timeline::{Reading, Sample, read_until, samples};
use crate::net::loads::{Load, Running};
use crate::net::machine::Machine;
use crate::net::site::{GUEST, Site, WEB};

/// Number of clients of the guest's web server. Each requests a few bytes, one request at a time.
const CLIENTS: u32 = 8;
/// Longest wait for the first answer.
const PATIENCE: Duration = Duration::from_secs(30);
/// Time between two pings. The guest's kernel answers pings before its programs run, so more pings would starve the
/// programs of a guest on an emulated processor.
const PING_EVERY: Duration = Duration::from_millis(5);
/// Longest time in flight of the last pings.
const LAST_PINGS: Duration = Duration::from_secs(1);

/// The measurements of one move.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Moved {
    pub(crate) load: Load,
    pub(crate) from: &'static str,
    pub(crate) to: &'static str,
    /// Duration of the command.
    pub(crate) seconds: f64,
    /// Time for which QEMU had stopped the guest, as reported by the node.
    pub(crate) blackout_ms: Option<f64>,
    /// Longest time without an answer to any client's request, from the start of the move.
    pub(crate) gap_ms: f64,
    /// Longest time without an answer before the move: the baseline of the machine and the load.
    pub(crate) gap_before_ms: f64,
    /// Longest wait of a single client for a single answer.
    pub(crate) longest_wait_ms: f64,
    /// Longest time without an answer to a ping, from the start of the move.
    pub(crate) ping_gap_ms: f64,
    pub(crate) pings_lost: usize,
    pub(crate) pings_twice: usize,
    /// Client connections that broke.
    pub(crate) connections_broken: u32,
    /// True if the load's program ended by itself, as on broken connections.
    pub(crate) load_ended: bool,
    /// TCP segments that clients retransmitted, the load's among them, from the start of the move.
    pub(crate) retransmits: u64,
    /// CPU seconds at both hosts from the start of the move to its end.
    pub(crate) cpu_seconds: f64,
    /// Throughput of the clients and CPU use of the hosts over time.
    pub(crate) timeline: Vec<Sample>,
}

/// Moves the machine to the other host under a load that lasts for `around` before and after.
///
/// # Errors
/// A failed move, or a guest that does not answer before the move.
pub(crate) fn moving(
    site: &Site,
    machine: &mut Machine,
    load: Load,
    around: Duration,
) -> io::Result<Moved> {
    machine.is_whole(site)?;
    let from = machine.host();
    let per_second = load.requests_per_second() / CLIENTS;
    let clients = Requests::start(site.clients(), WEB, CLIENTS, per_second);
    let pinger = Pinger::start(site.clients(), GUEST, PING_EVERY)?;
    let began = Instant::now();
    while clients.between(began, Instant::now()).answers < CLIENTS as usize {
        if began.elapsed() > PATIENCE {
            return Err(io::Error::other("the guest's web server does not answer"));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let mut running = load.start(site)?;
    // Leaves out the load's start.
    std::thread::sleep(around / 2);
    if running.as_mut().is_some_and(Running::has_ended) {
        let name = load.name();
        return Err(io::Error::other(format!(
            "the program of the load '{name}' ended before the move: the guest does not take its connections"
        )));
    }

    let stop = AtomicBool::new(false);
    let before = Instant::now();
    let (moved, readings) = std::thread::scope(|scope| {
        let reader = scope.spawn(|| read_until(&stop, site));
        std::thread::sleep(around);
        let began = Instant::now();
        let shown = machine.migrate(site);
        let ended = Instant::now();
        // An unplugged card comes back later, and clients may lose the guest then, too.
        let whole = machine.is_whole(site);
        std::thread::sleep(around);
        stop.store(true, Ordering::Relaxed);
        let readings = reader.join();
        let readings =
            readings.unwrap_or_else(|_| Err(io::Error::other("the reader of counters panicked")));
        let shown = whole.and(shown);
        (shown.map(|shown| (shown, began, ended)), readings)
    });
    let after = Instant::now();
    let (shown, began, ended) = moved?;
    let readings = readings?;
    let load_ended = running.as_mut().is_some_and(|running| running.has_ended());
    if let Some(running) = running {
        running.end();
    }
    let service = clients.between(began, after);
    let before = clients.between(before, began);
    let connections_broken = clients.broken();
    clients.finish()?;
    let pings = pinger.finish(LAST_PINGS)?;
    let pings: Vec<Ping> = pings
        .into_iter()
        .filter(|ping| (began..=after).contains(&ping.sent))
        .collect();
    let ms = |duration: Duration| duration.as_secs_f64() * 1000.0;
    let of = |at: Instant| at_or_after(&readings, at);
    Ok(Moved {
        load,
        from,
        to: machine.host(),
        seconds: (ended - began).as_secs_f64(),
        blackout_ms: shown["blackout_ms"].as_f64(),
        gap_ms: ms(service.gap),
        gap_before_ms: ms(before.gap),
        longest_wait_ms: ms(service.longest_wait),
        ping_gap_ms: ms(longest_silence(&pings, began, after)),
        pings_lost: pings.iter().filter(|ping| ping.answers == 0).count(),
        pings_twice: pings.iter().filter(|ping| ping.answers > 1).count(),
        connections_broken,
        load_ended,
        retransmits: of(after).retransmitted - of(began).retransmitted,
        cpu_seconds: of(ended).cpu_seconds - of(began).cpu_seconds,
        timeline: samples(&readings, began),
    })
}

/// Returns the first reading at or after a moment, or else the last. There is at least one.
fn at_or_after(readings: &[Reading], at: Instant) -> Reading {
    let found = readings.iter().find(|reading| reading.at >= at);
    *found.unwrap_or(&readings[readings.len() - 1])
}

/// Returns the longest time without an answer to any ping of this interval, before the first answer and after the last
/// included.
fn longest_silence(pings: &[Ping], began: Instant, ended: Instant) -> Duration {
    let answers = pings.iter().filter_map(|ping| ping.answered);
    let mut moments: Vec<Instant> = answers.chain([began, ended]).collect();
    moments.sort_unstable();
    let gaps = moments.windows(2).map(|pair| pair[1] - pair[0]);
    gaps.max().unwrap_or_default()
}

impl fmt::Display for Moved {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "{:<7} {} -> {} in {:.1} s: stopped for {:.0} ms; without an answer for {:.0} ms (before: {:.0}), to a ping \
             for {:.0} ms; {} pings lost, {} twice; {} segments sent again, {} connections broken",
            self.load.name(),
            self.from,
            self.to,
            self.seconds,
            self.blackout_ms.unwrap_or(f64::NAN),
            self.gap_ms,
            self.gap_before_ms,
            self.ping_gap_ms,
            self.pings_lost,
            self.pings_twice,
            self.retransmits,
            self.connections_broken
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silence_at_either_end_counts_and_so_does_one_without_an_answer() {
        let began = Instant::now();
        let at = |ms| began + Duration::from_millis(ms);
        let silence = |answers: &[u64]| {
            let pings: Vec<Ping> = answers
                .iter()
                .map(|ms| Ping {
                    sent: began,
                    answered: Some(at(*ms)),
                    answers: 1,
                })
                .collect();
            longest_silence(&pings, began, at(100)).as_millis()
        };
        assert_eq!(silence(&[1, 50, 99]), 49);
        assert_eq!(silence(&[70, 99]), 70);
        assert_eq!(silence(&[1, 20]), 80);
        assert_eq!(silence(&[]), 100);
    }
}
