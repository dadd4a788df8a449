//! The cost of the library to Debian's programs when nothing moves: throughput with and without the library, in turns.

use std::io;
use std::time::Duration;

use godwit_bench::interrupt;
use godwit_bench::spread::Spread;
use godwit_testkit::process::wait_for;
use godwit_testkit::rdma::{Bed, RdmaGuest, clean_up, listening};
use serde::Serialize;

use crate::rdma::Plan;
use crate::rdma::report::Report;

/// Command prefix that loads the library in a guest.
const WITH: &str = "env LD_PRELOAD=/opt/godwit/libgodwit_verbs.so ";
/// Longest time for the server to end after its client.
const SERVER_END: Duration = Duration::from_secs(30);

/// Commands to run, without the partner's address. Small messages call the library most often. Each run takes a few
/// seconds on emulated processors.
pub(crate) const PROGRAMS: [&str; 4] = [
    "ib_write_bw -d rxe0 -F -x 1 -s 4096 -n 15000",
    "ib_send_bw -d rxe0 -F -x 1 -s 4096 -n 15000",
    "ib_read_bw -d rxe0 -F -x 1 -s 4096 -n 15000",
    "ib_write_bw -d rxe0 -F -x 1 -s 65536 -n 2000",
];

/// One run of a program.
#[derive(Debug, Serialize)]
pub(crate) struct Run {
    pub(crate) program: &'static str,
    pub(crate) library: bool,
    pub(crate) round: u32,
    /// Average rate that the client reports, in units of 2^20 bytes a second.
    pub(crate) mib_per_second: Option<f64>,
    pub(crate) error: Option<String>,
}

/// All runs of a program.
#[derive(Debug, Serialize)]
pub(crate) struct Summary {
    pub(crate) program: &'static str,
    pub(crate) with: Spread,
    pub(crate) without: Spread,
}

impl Summary {
    /// Returns the summaries of the programs that ran both ways.
    pub(crate) fn all(runs: &[Run]) -> Vec<Self> {
        let of = |program| {
            let spread = |library| {
                let same = |run: &&Run| run.program == program && run.library == library;
                let rates = runs
                    .iter()
                    .filter(same)
                    .filter_map(|run| run.mib_per_second);
                Spread::of(&rates.collect::<Vec<_>>())
            };
            Some(Self {
                program,
                with: spread(true)?,
                without: spread(false)?,
            })
        };
        PROGRAMS.into_iter().filter_map(of).collect()
    }

    /// Returns the share of throughput lost with the library, by the medians. Negative if the library gains.
    pub(crate) fn missing(&self) -> f64 {
        1.0 - self.with.median / self.without.median
    }
}

pub(crate) fn turn(bed: &Bed, plan: &Plan, round: u32, report: &mut Report) -> io::Result<()> {
    for turn in 0..plan.library_turns {
        for program in PROGRAMS {
            // The first run meets other caches than the second.
            for library in [turn.is_multiple_of(2), !turn.is_multiple_of(2)] {
                interrupt::check()?;
                let found = one(bed, program, library);
                clean_up(bed)?;
                let said = match &found {
                    Ok(rate) => format!("{rate:.2} MiB/s"),
                    Err(error) => format!("FAILED: {error}"),
                };
                println!(
                    "{program}, {} the library: {said}",
                    if library { "with" } else { "without" }
                );
                report.library.push(Run {
                    program,
                    library,
                    round,
                    mib_per_second: found.as_ref().ok().copied(),
                    error: found.err().map(|error| error.to_string()),
                });
                report.save()?;
            }
        }
    }
    Ok(())
}

/// Runs the program at guests 1 and 3 to its end and returns its throughput.
fn one(bed: &Bed, program: &str, library: bool) -> io::Result<f64> {
    let (client, server) = (bed.guest(1), bed.guest(3));
    let command = format!("{}{program}", if library { WITH } else { "" });
    let serving = server.background("server", &command)?;
    listening(server)?;
    let said = client.must(&format!("{command} {}", server.address()))?;
    wait_for(SERVER_END, || has_ended(server, serving))
        .ok_or_else(|| io::Error::other("the server does not end after its client has"))?;
    average(&said).ok_or_else(|| io::Error::other(format!("the client said {said}")))
}

fn has_ended(guest: &RdmaGuest, process: u32) -> Option<()> {
    let gone = format!("[ ! -e /proc/{process} ] || grep -q '^State:.Z' /proc/{process}/status");
    (guest.run(&gone).ok()?.status == 0).then_some(())
}

/// Parses the average from perftest's table: bytes, iterations, peak, average, message rate.
fn average(said: &str) -> Option<f64> {
    let mut lines = said.lines().skip_while(|line| !line.contains("#bytes"));
    let figures = lines.nth(1)?.split_whitespace();
    let figures: Option<Vec<f64>> = figures.map(|figure| figure.parse().ok()).collect();
    figures?.get(3).copied().filter(|rate| *rate > 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_average_is_read_from_perftests_table() {
        let said = " ---------\n #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]\n \
                     4096       15000            19.97              18.40\t\t   0.004710\n ---------\n";
        assert_eq!(average(said), Some(18.4));
        assert_eq!(average("Couldn't listen to port 18515"), None);
        assert_eq!(average(" #bytes     #iterations\n ----"), None);
    }

    #[test]
    fn what_is_missing_is_that_of_the_medians_of_a_program() {
        let run = |program, library, rate| Run {
            program,
            library,
            round: 0,
            mib_per_second: rate,
            error: None,
        };
        let mut runs: Vec<Run> = [
            (true, 9.0),
            (false, 10.0),
            (true, 9.8),
            (false, 10.0),
            (true, 90.0),
        ]
        .map(|(library, rate)| run(PROGRAMS[1], library, Some(rate)))
        .into();
        // The program has not run without the library.
        runs.push(run(PROGRAMS[0], true, Some(1.0)));
        runs.push(run(PROGRAMS[0], false, None));
        let all = Summary::all(&runs);
        assert_eq!(all.len(), 1);
        assert_eq!(all[0].program, PROGRAMS[1]);
        assert!((all[0].missing() - 0.02).abs() < 1e-9);
    }
}
