//! A machine that moves under a load, as its clients see it.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use godwit_testkit::network::{Ping, Pinger, Requests};
use serde::Serialize;

use super::timeline::{Reading, Sample, read_until, samples};
use crate::loads::{Load, Running};
use crate::machine::Machine;
use crate::site::{GUEST, Site, WEB};

/// Clients that ask the guest's web server for a few bytes, one request at a time.
const CLIENTS: u32 = 8;
/// Longest wait for the first answer.
const PATIENCE: Duration = Duration::from_secs(30);
/// Rarely enough that a guest on an emulated processor, whose kernel answers them before its programs run, has time for
/// its programs.
const PING_EVERY: Duration = Duration::from_millis(5);
/// How long the last pings may be on their way.
const LAST_PINGS: Duration = Duration::from_secs(1);

/// One move.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Moved {
    pub(crate) load: Load,
    pub(crate) from: &'static str,
    pub(crate) to: &'static str,
    /// How long the command took.
    pub(crate) seconds: f64,
    /// How long QEMU had stopped the guest, as the node says.
    pub(crate) blackout_ms: Option<f64>,
    /// The longest time without an answer to any of the clients' requests, from the move's begin.
    pub(crate) gap_ms: f64,
    /// The same before the move: what the machine and the load do by themselves.
    pub(crate) gap_before_ms: f64,
    /// The longest time that one client waited for one answer.
    pub(crate) longest_wait_ms: f64,
    /// The longest time without an answer to a ping, from the move's begin.
    pub(crate) ping_gap_ms: f64,
    pub(crate) pings_lost: usize,
    pub(crate) pings_twice: usize,
    /// Connections of the clients that broke.
    pub(crate) connections_broken: u32,
    /// Whether the load's program ended by itself, which it does when its connections break.
    pub(crate) load_ended: bool,
    /// TCP segments that clients sent again, the load's among them, from the move's begin.
    pub(crate) retransmits: u64,
    /// CPU seconds at both hosts from the move's begin to its end.
    pub(crate) cpu_seconds: f64,
    /// What clients got and what the hosts used over time.
    pub(crate) timeline: Vec<Sample>,
}

/// Moves the machine to the other host under a load that lasts for `around` before and after.
///
/// # Errors
/// When the machine does not move, or its guest does not answer before.
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
    // The load's own begin is not part of it.
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
        // A card that was unplugged comes back later, and clients may miss the guest then, too.
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

/// The first reading at a moment or after it, or else the last. There is one.
fn at_or_after(readings: &[Reading], at: Instant) -> Reading {
    let found = readings.iter().find(|reading| reading.at >= at);
    *found.unwrap_or(&readings[readings.len() - 1])
}

/// The longest time without an answer to any of the pings that were sent in this time: also before the first answer, and
/// after the last.
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
