//! A machine that moves under a load, as seen by its clients.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use godwit_testkit::network::{Ping, Pinger, Requests};
use serde_json::{Value, json};

use super::loads::{Load, Running};
use super::machine::Machine;
use super::site::{GUEST, Site, WEB};
use super::timeline::{Reading, read_until, samples};
use crate::common::awaited;

/// Number of clients of the guest's web server. Each requests a few bytes, one request at a time.
const CLIENTS: u32 = 8;
/// Longest wait for the first answer.
const PATIENCE: Duration = Duration::from_secs(30);
/// Time between two pings. The guest's kernel answers pings before its programs run, so more pings would starve the
/// programs of a guest on an emulated processor.
const PING_EVERY: Duration = Duration::from_millis(5);
/// Longest time in flight of the last pings.
const LAST_PINGS: Duration = Duration::from_secs(1);

/// Moves the machine to the other host under a load that lasts for `around` before and after.
pub(super) fn measure(
    site: &Site,
    machine: &mut Machine,
    load: Load,
    around: Duration,
) -> io::Result<Value> {
    machine.is_whole(site)?;
    let from = machine.host();
    let every = Duration::from_secs(1) * CLIENTS / load.requests_per_second();
    let clients = Requests::start(site.clients(), WEB, CLIENTS, every);
    let pinger = Pinger::start(site.clients(), GUEST, PING_EVERY)?;
    let began = Instant::now();
    awaited(
        "an answer of the guest's web server to each client",
        PATIENCE,
        || {
            let answers = clients.between(began, Instant::now()).answers;
            (answers >= CLIENTS as usize).then_some(())
        },
    )?;
    let mut running = load.start(site)?;
    // Leaves out the load's start.
    std::thread::sleep(around / 2);
    if running.as_mut().is_some_and(Running::has_ended) {
        let name = load.name();
        return Err(io::Error::other(format!(
            "the program of the load '{name}' ended before the move: the guest does not take its connections"
        )));
    }
    let before = Instant::now();
    let Watched {
        shown,
        readings,
        began,
        ended,
    } = watch(site, machine, around)?;
    let after = Instant::now();
    let load_ended = running.as_mut().is_some_and(Running::has_ended);
    if let Some(running) = running {
        running.end();
    }
    let service = clients.between(began, after);
    let before = clients.between(before, began);
    let connections_broken = clients.broken();
    clients.finish()?;
    let mut pings = pinger.finish(LAST_PINGS)?;
    pings.retain(|ping| (began..=after).contains(&ping.sent));
    let ms = |duration: Duration| duration.as_secs_f64() * 1000.0;
    let of = |at: Instant| at_or_after(&readings, at);
    let mut run = json!({
        "load": load.name(), "from": from, "to": machine.host(), "seconds": (ended - began).as_secs_f64(),
        "gap_ms": ms(service.gap), "gap_before_ms": ms(before.gap), "longest_wait_ms": ms(service.longest_wait),
        "ping_gap_ms": ms(longest_silence(&pings, began, after)),
        "pings_lost": pings.iter().filter(|ping| ping.answers == 0).count(),
        "pings_twice": pings.iter().filter(|ping| ping.answers > 1).count(),
        "connections_broken": connections_broken, "load_ended": load_ended,
        "retransmits": of(after).retransmitted - of(began).retransmitted,
        "cpu_seconds": of(ended).cpu_seconds - of(began).cpu_seconds,
        "timeline": samples(&readings, began),
    });
    // The node does not know the blackout of every move.
    if !shown["blackout_ms"].is_null() {
        run["blackout_ms"] = shown["blackout_ms"].clone();
    }
    Ok(run)
}

/// A move, and the counters meanwhile.
struct Watched {
    shown: Value,
    readings: Vec<Reading>,
    began: Instant,
    ended: Instant,
}

/// Moves the machine, and reads the counters from `around` before until `around` after.
fn watch(site: &Site, machine: &mut Machine, around: Duration) -> io::Result<Watched> {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
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
        let panicked = |_| Err(io::Error::other("the reader of counters panicked"));
        Ok(Watched {
            shown: whole.and(shown)?,
            readings: readings.unwrap_or_else(panicked)?,
            began,
            ended,
        })
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
