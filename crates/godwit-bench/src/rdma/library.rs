//! The cost of the library to Debian's programs when nothing moves: throughput with and without the library, in turns.

use std::io;
use std::time::Duration;

use godwit_testkit::rdma::{Bed, RdmaGuest, listening};
use godwit_testkit::report::Runs;
use serde_json::json;

use super::Bench;
use crate::common::awaited;

/// Command prefix that loads the library in a guest.
const WITH: &str = "env LD_PRELOAD=/opt/godwit/libgodwit_verbs.so ";
/// Longest time for the server to end after its client.
const SERVER_END: Duration = Duration::from_secs(30);

/// Commands to run, without the partner's address. Small messages call the library most often. Each run takes a few
/// seconds on emulated processors.
const PROGRAMS: [&str; 4] = [
    "ib_write_bw -d rxe0 -F -x 1 -s 4096 -n 15000",
    "ib_send_bw -d rxe0 -F -x 1 -s 4096 -n 15000",
    "ib_read_bw -d rxe0 -F -x 1 -s 4096 -n 15000",
    "ib_write_bw -d rxe0 -F -x 1 -s 65536 -n 2000",
];

impl Bench<'_> {
    /// Runs each program with the library and without.
    pub(super) fn library(&mut self) -> io::Result<()> {
        for turn in 0..self.plan.library_turns {
            for program in PROGRAMS {
                // The first run meets other caches than the second.
                for library in [turn.is_multiple_of(2), !turn.is_multiple_of(2)] {
                    let run = json!({"program": program, "library": library});
                    self.measure("library", run, |bed, run| {
                        run["mib_per_second"] = one(bed, program, library)?.into();
                        Ok(())
                    })?;
                }
            }
        }
        Ok(())
    }
}

/// Returns the largest share of throughput that a program lost with the library, by the medians. Negative if the
/// library gains.
pub(super) fn missing(runs: &Runs<'_>) -> Option<f64> {
    let missing = |program: &Runs<'_>| {
        let rate = |library: bool| program.only("library", library).median("mib_per_second");
        Some(1.0 - rate(true)? / rate(false)?)
    };
    runs.groups(&["program"])
        .iter()
        .filter_map(missing)
        .max_by(f64::total_cmp)
}

/// Runs the program at guests 1 and 3 to its end and returns its throughput.
fn one(bed: &Bed, program: &str, library: bool) -> io::Result<f64> {
    let (client, server) = (bed.guest(1), bed.guest(3));
    let command = format!("{}{program}", if library { WITH } else { "" });
    let serving = server.background("server", &command)?;
    listening(server)?;
    let said = client.must(&format!("{command} {}", server.address()))?;
    awaited("the server's end after its client's", SERVER_END, || {
        has_ended(server, serving)
    })?;
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
    fn the_missing_throughput_is_that_of_the_medians_of_a_program() {
        let run = |program: &str, library: bool, rate: f64| json!({"program": program, "library": library, "mib_per_second": rate});
        let rates = [
            (true, 9.0),
            (false, 10.0),
            (true, 9.8),
            (false, 10.0),
            (true, 90.0),
        ];
        let mut runs = rates
            .map(|(library, rate)| run("a", library, rate))
            .to_vec();
        // The program has not run without the library.
        runs.push(run("b", true, 1.0));
        runs.push(json!({"program": "b", "library": false, "error": "not today"}));
        let found = missing(&Runs(runs.iter().collect())).unwrap();
        assert!((found - 0.02).abs() < 1e-9);
    }
}
