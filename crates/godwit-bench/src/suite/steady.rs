//! The scene `steady`: a disk that is served and does not move.
//!
//! Each server takes its turn alone, on the same image, under the same client. The client is the testkit's own, the
//! same for both front ends. Every read is checked against the last write, and the whole image after each turn.

use std::io;
use std::path::Path;
use std::time::Duration;

use godwit_testkit::process::scratch_dir;
use godwit_testkit::report::{Report, Runs, Target, add_fields};
use serde_json::json;

use super::noise::{AGREE, await_quiet, disagree};
use super::{Extent, Options};
use crate::common::{in_turns, interrupt, named};
use crate::serve::{FrontEnd, Kind, Server, Stamps, Workload};

/// Depth at which requests per CPU second count.
const BUSY: u32 = 32;
/// Depth at which latency counts.
const ALONE: u32 = 1;

/// Figures of a server.
pub(crate) const FIGURES: &str =
    "iops, p50_us µs, p99_us µs, iops_per_cpu_second, cpu_seconds_per_mio s, client_cpu";
pub(crate) const KEYS: &str = "front_end, rw, depth, server";

/// Measures all servers of both front ends.
pub(crate) fn run(options: &Options, extent: Extent, report: &mut Report) -> io::Result<()> {
    let rounds = options.rounds.unwrap_or(extent.of(3, 5));
    let dir = scratch_dir()?;
    let image = dir.path().join("disk.img");
    let mut stamps = Stamps::create(&image, extent.of(512 << 20, 1 << 30))?;
    let workloads = Workload::all(extent.of(&[1, 32], &[1, 32, 128]));
    report.table("steady", KEYS, FIGURES, "");
    for front_end in FrontEnd::ALL {
        let servers = front_end.servers();
        in_turns(rounds, servers.len(), |round, turn| {
            let turn = Turn {
                kind: servers[turn],
                front_end,
                image: &image,
                dir: dir.path(),
                lasts: extent.of(Duration::from_millis(400), Duration::from_secs(2)),
                seed: round as u64,
            };
            // Flushes the last turn's pages, so that they do not disturb this turn.
            rustix::fs::sync();
            await_quiet()?;
            turn.take(&workloads, &mut stamps, report)
        })?;
    }
    report.mark_noisy("steady", |cell, _| {
        disagree(&cell.values("cpu_seconds_per_mio"), AGREE)
    });
    Ok(())
}

/// One server's turn at every workload.
pub(crate) struct Turn<'a> {
    pub(crate) kind: Kind,
    pub(crate) front_end: FrontEnd,
    pub(crate) image: &'a Path,
    pub(crate) dir: &'a Path,
    pub(crate) lasts: Duration,
    pub(crate) seed: u64,
}

impl Turn<'_> {
    /// Measures, adds the runs to the table `steady`, and checks the image.
    pub(crate) fn take(
        &self,
        workloads: &[Workload],
        stamps: &mut Stamps,
        report: &mut Report,
    ) -> io::Result<()> {
        let name = self.kind.name();
        let server = Server::start(self.kind, self.front_end, self.image, self.dir);
        let server = server.map_err(named(name))?;
        for workload in workloads {
            interrupt::check()?;
            let measured = workload.run(&server, stamps, self.lasts, self.seed);
            let measured = measured.map_err(named(name))?;
            let mut run = json!({
                "front_end": self.front_end.name(), "server": name, "bs": workload.bytes, "depth": workload.depth,
                "rw": workload.access.name(), "direct": self.kind.is_direct(), "disk_options": self.kind.disk_options(),
                "iops_per_cpu_second": measured.iops_per_cpu_second(),
                "cpu_seconds_per_mio": measured.cpu_seconds_per_mio(),
            });
            add_fields(&mut run, &measured, "");
            report.add("steady", run)?;
        }
        server.stop().map_err(named(name))?;
        rustix::fs::sync();
        let wrong = format!("what {name} wrote does not read back");
        stamps.check_image().map_err(named(&wrong))
    }
}

/// Returns targets for each front end and load, against the best peer of the same front end.
pub(crate) fn targets(runs: &Runs<'_>) -> Vec<Target> {
    let mut targets = Vec::new();
    for load in runs.groups(&["front_end", "depth", "rw"]) {
        let ours = load.only("server", Kind::Godwit.name());
        let peers = load.filter(|run| run["server"] != Kind::Godwit.name());
        let text = |field: &str| load.first(field).as_str().unwrap_or_default();
        let depth = load.first("depth");
        let name = format!(
            "steady {} {} at depth {depth}",
            text("front_end"),
            text("rw")
        );
        if *depth == BUSY {
            let best = best(&peers, "cpu_seconds_per_mio");
            let ratio = best
                .zip(ours.median("cpu_seconds_per_mio"))
                .map(|(best, ours)| best / ours);
            let name = format!("{name}: requests per CPU second over the best peer's");
            targets.push(Target::at_least(name, 1.1, ratio));
        }
        if *depth == ALONE {
            let latency = |peers: &Runs<'_>, who: &str| {
                let best = best(peers, "p50_us");
                let ratio = ours
                    .median("p50_us")
                    .zip(best)
                    .map(|(ours, best)| ours / best);
                Target::at_most(
                    format!("{name}: median latency over the best {who}"),
                    1.0,
                    ratio,
                )
            };
            targets.push(latency(&peers, "peer's"));
            if !peers.all("direct") {
                // Other peers answer a write once it is in memory.
                let direct = peers.filter(|run| run["direct"] == true);
                targets.push(latency(&direct, "peer's with direct I/O"));
            }
        }
    }
    targets
}

/// Returns the least median among the peers.
fn best(peers: &Runs<'_>, figure: &str) -> Option<f64> {
    let groups = peers.groups(&["server"]);
    groups
        .iter()
        .filter_map(|runs| runs.median(figure))
        .min_by(f64::total_cmp)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn row(server: &str, depth: u32, p50_us: f64, cpu_seconds_per_mio: f64) -> Value {
        json!({
            "front_end": "nbd", "server": server, "depth": depth, "rw": "randread", "p50_us": p50_us,
            "cpu_seconds_per_mio": cpu_seconds_per_mio, "direct": server != "cached",
        })
    }

    fn targets(rows: &[Value]) -> Vec<Target> {
        super::targets(&Runs(rows.iter().collect()))
    }

    fn measured(targets: &[Target]) -> Vec<Option<f64>> {
        targets.iter().map(|target| target.measured).collect()
    }

    #[test]
    fn the_best_peer_is_the_one_to_beat() {
        let targets = targets(&[
            row("godwit", 1, 50.0, 30.0),
            row("slow", 1, 70.0, 90.0),
            row("fast", 1, 40.0, 80.0),
            row("godwit", 32, 500.0, 10.0),
            row("slow", 32, 300.0, 20.0),
            row("fast", 32, 200.0, 12.0),
        ]);
        assert_eq!(measured(&targets), [Some(50.0 / 40.0), Some(12.0 / 10.0)]);
        assert!(!targets[0].holds && targets[1].holds);
    }

    #[test]
    fn a_peer_without_direct_io_counts_and_is_told_apart() {
        let targets = targets(&[
            row("godwit", 1, 50.0, 30.0),
            row("cached", 1, 40.0, 30.0),
            row("direct", 1, 60.0, 30.0),
        ]);
        assert_eq!(measured(&targets), [Some(50.0 / 40.0), Some(50.0 / 60.0)]);
    }

    #[test]
    fn without_a_peer_nothing_holds() {
        let targets = targets(&[row("godwit", 1, 50.0, 30.0)]);
        assert!(targets[0].measured.is_none() && !targets[0].holds);
    }
}
