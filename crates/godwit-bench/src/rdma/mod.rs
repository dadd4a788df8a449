//! The cost of a move to RDMA programs: three virtual machines with soft-RoCE, Debian's own programs, and the
//! measurements of figures 3, 4 and 5 and table 4 of the RDMA live-migration paper.

mod library;
mod moves;
mod throughput;

use std::io;

use clap::Args;
use godwit_testkit::process::target_dir;
use godwit_testkit::rdma::{Bed, Side, clean_up, payload};
use godwit_testkit::report::{Report, Runs, Table, Target};
use serde_json::Value;

use self::moves::{PARTS, Waiting};
use crate::common::chart::{Chart, Line};
use crate::common::interrupt;

const NAME: &str = "bench-rdma";

/// RDMA programs move, with pre-setup and without, in turns
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Few and small programs, only senders move, each once
    #[arg(long)]
    quick: bool,
    /// Number of rounds; 3, or 1 with --quick
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: Option<u32>,
    /// Queue pairs of the programs in the breakdown; 1,16,64,256, or 64 with --quick
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=4096))]
    qps: Vec<u32>,
    /// Only these of breakdown, waiting, partners, throughput and library; again for more
    #[arg(long)]
    only: Vec<Part>,
}

/// A part that can be measured alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    Breakdown,
    Waiting,
    Partners,
    Throughput,
    Library,
}

/// The extent of a run.
struct Plan {
    rounds: u32,
    /// Sides that move: a client sends, and a server receives.
    sides: &'static [Side],
    qps: Vec<u32>,
    waiting_qps: &'static [u32],
    message_bytes: &'static [u32],
    partners: &'static [u32],
    throughput_qps: u32,
    /// Runs of each program in a round with the library, and as many without.
    library_turns: u32,
}

impl Plan {
    fn of(arguments: &Arguments) -> Self {
        let quick = arguments.quick;
        let of = |few: &'static [u32], all: &'static [u32]| if quick { few } else { all };
        let qps = of(&[64], &[1, 16, 64, 256]);
        Self {
            rounds: arguments.rounds.unwrap_or(if quick { 1 } else { 3 }),
            sides: if quick {
                &[Side::Client]
            } else {
                &[Side::Client, Side::Server]
            },
            qps: match arguments.qps.as_slice() {
                [] => qps.to_vec(),
                given => given.to_vec(),
            },
            waiting_qps: of(&[16], &[1, 4, 16, 64]),
            message_bytes: of(&[65_536], &[512, 4096, 32_768, 131_072]),
            partners: of(&[2], &[1, 2, 4, 8]),
            throughput_qps: if quick { 4 } else { 16 },
            library_turns: if quick { 2 } else { 5 },
        }
    }
}

/// Returns the role of a moving side in `ib_write_bw`.
fn role(side: Side) -> &'static str {
    match side {
        Side::Client => "sender",
        Side::Server => "receiver",
    }
}

/// The bed, the plan and the report of a run.
struct Bench<'a> {
    bed: &'a Bed,
    plan: &'a Plan,
    report: &'a mut Report,
    round: u32,
}

impl Bench<'_> {
    /// Measures one run, clears the guests and adds the run to a table. A failed run is a problem.
    fn measure(
        &mut self,
        table: &str,
        mut run: Value,
        act: impl FnOnce(&Bed, &mut Value) -> io::Result<()>,
    ) -> io::Result<()> {
        interrupt::check()?;
        let failed = act(self.bed, &mut run).err();
        clean_up(self.bed)?;
        run["round"] = self.round.into();
        if let Some(error) = failed {
            self.report
                .problems
                .push(format!("{table}, {run}: {error}"));
            run["error"] = error.to_string().into();
        }
        self.report.add(table, run)
    }

    /// Returns both ways of a move, the first one in turns: without pre-setup and with it.
    const fn ways(&self) -> [bool; 2] {
        let first = self.round.is_multiple_of(2);
        [first, !first]
    }
}

pub(crate) fn bench(arguments: &Arguments) -> io::Result<()> {
    let plan = Plan::of(arguments);
    let wants = |part| arguments.only.is_empty() || arguments.only.contains(&part);
    let mut report = Report::new(NAME, &[])?;
    report.fact("quick", arguments.quick);
    // Figures show the steps and their growth, but not the times on hardware.
    report.fact("emulated", true);
    report.fact("overhead", overhead()?);
    report.tables = tables();
    println!("booting three virtual machines with soft-RoCE");
    let bed = Bed::start(3, &payload(&target_dir().join(NAME).join("guests"))?)?;
    bed.start_nodes(3)?;
    for round in 0..plan.rounds {
        let mut bench = Bench {
            bed: &bed,
            plan: &plan,
            report: &mut report,
            round,
        };
        if wants(Part::Breakdown) {
            bench.breakdown()?;
        }
        if wants(Part::Waiting) {
            bench.waiting()?;
        }
        if wants(Part::Partners) {
            bench.partners()?;
        }
        if wants(Part::Throughput) {
            bench.throughput()?;
        }
        if wants(Part::Library) {
            bench.library()?;
        }
    }
    draw(&mut report)?;
    report.targets = targets(&report);
    report.conclude()
}

fn tables() -> Vec<Table> {
    let parts = PARTS.map(|part| format!("{part} ms")).join(", ");
    let breakdown = format!("blackout_ms ms, {parts}, pre_setup_ms ms");
    let (kind, throughput) = (
        "side, qps, pre_setup",
        "before B/s, after B/s, longest_gap_ms ms",
    );
    vec![
        Table::new("breakdown", kind, &breakdown, ""),
        Table::new("waiting", Waiting::KEYS, "wbs_ms ms, blackout_ms ms", ""),
        Table::new("throughput", kind, throughput, ""),
        Table::new("library", "program, library", "mib_per_second MiB/s", ""),
    ]
}

/// Returns table 4, the figures of `make bench SCENE=verbs`; null if that did not run.
fn overhead() -> io::Result<Value> {
    match std::fs::read_to_string(target_dir().join("bench-verbs/overhead.json")) {
        Ok(text) => Ok(serde_json::from_str(&text)?),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            println!("make bench SCENE=verbs did not run: the report will have no table 4");
            Ok(Value::Null)
        }
        Err(error) => Err(error),
    }
}

/// Draws the figures of the paper's evaluation.
fn draw(report: &mut Report) -> io::Result<()> {
    let mut charts = Vec::new();
    for side in ["sender", "receiver"] {
        for (pre_setup, how) in [(false, "without"), (true, "with")] {
            let ahead = if pre_setup { "-pre-setup" } else { "" };
            let of = |table: &str| {
                report
                    .runs(table)
                    .only("side", side)
                    .only("pre_setup", pre_setup)
            };
            let title = format!("Blackout of a {side} that moves, {how} pre-setup");
            let breakdown = Chart::new(&title, "queue pairs", "ms", stacked(&of("breakdown")));
            charts.push((format!("breakdown-{side}{ahead}.svg"), breakdown));
            let runs = of("throughput").only("round", 0);
            for run in &runs.0 {
                let title =
                    format!("What the partner of a {side} sees while that moves, {how} pre-setup");
                let line = Line::of_pairs(&format!("{} queue pairs", run["qps"]), &run["points"]);
                let mut chart =
                    Chart::new(&title, "seconds", "bytes a second in 100 ms", vec![line]);
                let moved = run["move_seconds"][0]
                    .as_f64()
                    .zip(run["move_seconds"][1].as_f64());
                chart.shaded = moved
                    .map(|(began, ended)| began..ended)
                    .into_iter()
                    .collect();
                charts.push((format!("throughput-{side}{ahead}.svg"), chart));
            }
        }
    }
    for over in ["queue_pairs", "message_bytes", "partners"] {
        let runs = report.runs("waiting").only("over", over);
        let lines = ["wbs_ms", "blackout_ms"].into_iter().flat_map(|figure| {
            let mut lines = Line::over(&runs, "over", over, figure);
            lines
                .iter_mut()
                .for_each(|line| line.name = figure.trim_end_matches("_ms").to_owned());
            lines
        });
        let title = "Wait-before-stop beside the blackout that it is part of";
        let chart = Chart::new(title, &over.replace('_', " "), "ms", lines.collect()).logarithmic();
        charts.push((format!("waiting-{}.svg", over.replace('_', "-")), chart));
    }
    charts
        .iter()
        .try_for_each(|(file, chart)| chart.add(report, file))
}

/// Returns a line for each part of a blackout. Each line is the sum of a part and the parts before it, so the last line
/// is the blackout.
fn stacked(runs: &Runs<'_>) -> Vec<Line> {
    let groups = runs.groups(&["qps"]);
    let upto = |last: usize| Line {
        name: format!("up to {}", PARTS[last]),
        points: groups
            .iter()
            .filter_map(|group| {
                let sum: Option<f64> = PARTS[..=last].iter().map(|part| group.median(part)).sum();
                Some((group.first("qps").as_f64()?, sum?))
            })
            .collect(),
    };
    (0..PARTS.len()).map(upto).collect()
}

fn targets(report: &Report) -> Vec<Target> {
    let mut found = Vec::new();
    for side in ["sender", "receiver"] {
        let runs = report.runs("breakdown").only("side", side);
        // Receivers do not move with --quick.
        let Some(most) = runs.most("qps") else {
            continue;
        };
        let runs = runs.filter(|run| run["qps"].as_f64() == Some(most));
        let part = |pre_setup: bool| runs.only("pre_setup", pre_setup).median("restore_rdma");
        let share = part(true)
            .zip(part(false))
            .map(|(with, without)| with / without);
        let name =
            format!("{side}, {most} queue pairs: restore_rdma with pre-setup by that without");
        found.push(Target::at_most(name, 0.1, share));
    }
    let moves = report.runs("throughput");
    let missing = |run: &&Value| Some(1.0 - run["after"].as_f64()? / run["before"].as_f64()?);
    let most = moves.0.iter().filter_map(missing).max_by(f64::total_cmp);
    let name = "throughput that is missing after a move, by that before, of all moves";
    found.push(Target::at_most(name, 0.05, most));
    let most = library::missing(&report.runs("library"));
    let name = "throughput that is missing with the library, by that without, of all programs";
    found.push(Target::at_most(name, 0.02, most));
    found
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use godwit_testkit::report::Header;
    use serde_json::json;

    use super::*;

    #[test]
    fn the_largest_number_of_queue_pairs_is_judged() {
        let mut report = Report::of(Header::default(), Path::new("report.json"));
        report.tables = tables();
        let run = |qps, pre_setup, restore_rdma| json!({"side": "sender", "qps": qps, "pre_setup": pre_setup, "restore_rdma": restore_rdma});
        // A failed run has no figures.
        let failed = json!({"side": "sender", "qps": 64, "pre_setup": false, "error": "not today"});
        report.tables[0].runs = vec![
            run(1, false, 10.0),
            run(1, true, 10.0),
            run(64, false, 100.0),
            run(64, true, 9.0),
            failed,
        ];
        let targets = targets(&report);
        assert_eq!(targets[0].measured, Some(0.09));
        assert!(targets[0].holds && targets[0].name.contains("64 queue pairs"));
        // A figure that was not measured does not hold.
        assert_eq!(targets.len(), 3);
        for missing in &targets[1..] {
            assert!(missing.measured.is_none() && !missing.holds);
        }
    }
}
