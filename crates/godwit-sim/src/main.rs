//! `godwit-sim`: runs seeds, and replays a single seed.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use godwit_core::GovernorParts;
use godwit_sim::{Bug, Choice, Move, Report, Soak, choices, moves, reproduce, soak};

/// Migrations between two simulated hosts: one seed, one run.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run many seeds; stop at the first that fails.
    Run(Run),
    /// Run one seed again, cut down to the decisions needed to fail, and print its trace.
    Replay(Replay),
    /// List the bugs that can be planted.
    Plants,
    /// Move the disks of twelve guests by each policy and by the node's own choice; fail if the choice costs more than
    /// a tenth more than the best.
    Choose,
    /// Move the disks of guests under a promise, beside copies that share the guest's disk; print the time of the
    /// moves and the guests' losses.
    Promises {
        /// Number of seeds for each cell, of which medians are printed.
        #[arg(long, default_value_t = 5)]
        seeds: u64,
        /// Leave these parts of the governor out.
        #[arg(long, default_value = "")]
        without: GovernorParts,
        /// Only the cells whose name contains this text.
        #[arg(long, default_value = "")]
        only: String,
    },
}

#[derive(Args)]
struct Run {
    /// Number of seeds.
    #[arg(long, default_value_t = 6_000)]
    seeds: u64,
    /// The first seed.
    #[arg(long, default_value_t = 0)]
    first: u64,
    /// Threads; one for each core when left out.
    #[arg(long)]
    jobs: Option<usize>,
    /// Plant a bug into the controllers (see `plants`).
    #[arg(long, value_name = "BUG")]
    plant: Option<Bug>,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct Replay {
    /// The seed.
    seed: u64,
    /// Plant a bug into the controllers (see `plants`).
    #[arg(long, value_name = "BUG")]
    plant: Option<Bug>,
    /// Print the whole run, without cutting it down.
    #[arg(long)]
    whole: bool,
    /// Number of trace lines to print.
    #[arg(long, default_value_t = LINES)]
    lines: usize,
}

/// Default number of trace lines, enough to see the events before a failure.
const LINES: usize = 160;

fn main() -> ExitCode {
    match Arguments::parse().command {
        Command::Run(run) => run.execute(),
        Command::Replay(replay) => replay.execute(),
        Command::Plants => {
            for bug in Bug::all() {
                println!("{}", bug.name());
            }
            ExitCode::SUCCESS
        }
        Command::Choose => choose(),
        Command::Promises {
            seeds,
            without,
            only,
        } => promises(seeds, without, &only),
    }
}

/// Prints the time of a move and the guest's losses for each cell.
fn promises(seeds: u64, without: GovernorParts, only: &str) -> ExitCode {
    let tell = |it: &Move| {
        println!(
            "{:<44} {:>6.2} s, guest {:>5.1} %, p99 {:>6.2} ms, p99.99 {:>7.2} ms, promised {:>5.1} ms, late {:>6.0} ppm{}",
            it.name,
            it.seconds,
            it.kept * 100.0,
            it.p99 * 1e3,
            it.p9999 * 1e3,
            it.promised * 1e3,
            it.late * 1e6,
            match it.given_up {
                0 => String::new(),
                times => format!(", {times} given up"),
            },
        );
    };
    match moves(seeds, without, only, tell) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Prints the cost of each policy for each guest.
fn choose() -> ExitCode {
    let choices = match choices(print_choice) {
        Ok(choices) => choices,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    let behind = choices.iter().filter(|choice| !choice.holds());
    let behind: Vec<_> = behind.map(|choice| choice.load).collect();
    if behind.is_empty() {
        return ExitCode::SUCCESS;
    }
    eprintln!("the choice costs too much with: {}", behind.join("; "));
    ExitCode::FAILURE
}

fn print_choice(choice: &Choice) {
    println!("{}: {:.3} of the best", choice.load, choice.ratio());
    for (policy, figures) in &choice.figures {
        let cost = &figures.cost;
        let given_up = if figures.handed_over.is_none() {
            ", given up"
        } else {
            ""
        };
        let left = figures.why.map(|why| format!(", left: {why:?}"));
        println!(
            "    {policy:<13} costs {:>7.2}: free after {:>7.2} s, {:>6.2} s on two nodes, {:>6.2} s lost, {:>5.2} s late, {:>6.1} MB{given_up}{}",
            cost.seconds(),
            cost.until_free.as_secs_f64(),
            cost.on_two_nodes.as_secs_f64(),
            cost.lost.as_secs_f64(),
            cost.late.as_secs_f64(),
            figures.carried as f64 / 1e6,
            left.unwrap_or_default(),
        );
    }
}

impl Run {
    fn execute(self) -> ExitCode {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let what = Soak {
            first: self.first,
            seeds: self.seeds,
            jobs: self.jobs.unwrap_or(cores),
            bug: self.plant,
        };
        let shows_progress = std::io::stderr().is_terminal();
        let report = soak(what, |done| {
            if shows_progress {
                eprint!("\r{done} of {} seeds", self.seeds);
                let _ = std::io::stderr().flush();
            }
        });
        if shows_progress {
            eprint!("\r");
        }
        if self.json {
            print_json(&report);
        } else {
            print_table(&report);
        }
        let missed = report.missed();
        if let Some((seed, violation)) = &report.failure {
            eprintln!("seed {seed} {violation}");
            tell(*seed, self.plant, false, LINES);
        }
        if !missed.is_empty() {
            eprintln!("never reached: {}", missed.join(", "));
        }
        if report.failure.is_some() || !missed.is_empty() {
            return ExitCode::FAILURE;
        }
        ExitCode::SUCCESS
    }
}

impl Replay {
    fn execute(self) -> ExitCode {
        if tell(self.seed, self.plant, self.whole, self.lines) {
            return ExitCode::FAILURE;
        }
        println!("seed {} holds", self.seed);
        ExitCode::SUCCESS
    }
}

/// Prints the failure of a seed. Returns false if the seed does not fail.
fn tell(seed: u64, bug: Option<Bug>, whole: bool, lines: usize) -> bool {
    let Some(found) = reproduce(seed, bug, whole, lines) else {
        return false;
    };
    for line in &found.trace {
        eprintln!("{line}");
    }
    eprintln!("\nThe run needs no more than:\n{}", found.plan);
    eprintln!("{}", found.violation);
    if !found.repeatable {
        eprintln!("two runs of this seed differ: the simulator itself is at fault");
    }
    let plant = bug.map(|bug| {
        (
            " --features planted-bugs",
            format!(" --plant {}", bug.name()),
        )
    });
    let (feature, plant) = plant.unwrap_or_default();
    eprintln!(
        "repeat it with\n  cargo run --release -p godwit-sim{feature} -- replay {seed}{plant}"
    );
    true
}

fn print_table(report: &Report) {
    for (name, times) in report.coverage() {
        println!("{times:>12}  {name}");
    }
    let seconds = report.elapsed.as_secs_f64();
    println!(
        "{} runs with {} moves in {seconds:.1} s, {:.0} a second",
        report.runs,
        report.moves(),
        report.runs as f64 / seconds
    );
}

fn print_json(report: &Report) {
    let coverage = report.coverage();
    let coverage = coverage.map(|(name, times)| (name.to_owned(), times.into()));
    let coverage: serde_json::Map<_, _> = coverage.collect();
    let failure = report.failure.as_ref();
    let result = serde_json::json!({
        "runs": report.runs,
        "seconds": report.elapsed.as_secs_f64(),
        "failed_seed": failure.map(|(seed, _)| seed),
        "violated": failure.map(|(_, violation)| violation.claim),
        "never_reached": report.missed(),
        "coverage": coverage,
    });
    println!("{result:#}");
}
