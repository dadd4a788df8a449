//! `godwit-sim`: runs seeds, and runs one again.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use godwit_sim::{Bug, Report, Soak, reproduce, soak};

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
    /// Run one seed again, cut down to what it takes to fail, and tell what happened.
    Replay(Replay),
    /// List the bugs that can be planted.
    Plants,
}

#[derive(Args)]
struct Run {
    /// How many seeds.
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
    /// Tell the run as it is instead of cutting it down.
    #[arg(long)]
    whole: bool,
    /// How many lines of what happened to print.
    #[arg(long, default_value_t = LINES)]
    lines: usize,
}

/// Enough to see what led to a failure.
const LINES: usize = 160;

fn main() -> ExitCode {
    match Arguments::parse().command {
        Command::Run(run) => run.execute(),
        Command::Replay(replay) => replay.execute(),
        Command::Plants => {
            for bug in Bug::ALL {
                println!("{}", bug.name());
            }
            ExitCode::SUCCESS
        }
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
        if let Some(failure) = &report.failure {
            eprintln!(
                "seed {} violates: {}\n  {}",
                failure.seed, failure.claim, failure.detail
            );
            tell(failure.seed, self.plant, false, LINES);
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

/// Tells how a seed fails. False when it does not.
fn tell(seed: u64, bug: Option<Bug>, whole: bool, lines: usize) -> bool {
    let Some(found) = reproduce(seed, bug, whole, lines) else {
        return false;
    };
    for line in &found.trace {
        eprintln!("{line}");
    }
    eprintln!("\nThe run needs no more than:\n{}", found.plan);
    eprintln!("violated: {}\n  {}", found.claim, found.detail);
    if !found.repeatable {
        eprintln!("two runs of this seed differ: the simulator itself is at fault");
    }
    let (feature, plant) = match bug {
        Some(bug) => (
            " --features planted-bugs",
            format!(" --plant {}", bug.name()),
        ),
        None => ("", String::new()),
    };
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
    let coverage: serde_json::Map<_, _> = report
        .coverage()
        .into_iter()
        .map(|(name, times)| (name.to_owned(), times.into()))
        .collect();
    let result = serde_json::json!({
        "runs": report.runs,
        "seconds": report.elapsed.as_secs_f64(),
        "failed_seed": report.failure.as_ref().map(|failure| failure.seed),
        "violated": report.failure.as_ref().map(|failure| failure.claim),
        "never_reached": report.missed(),
        "coverage": coverage,
    });
    println!("{result:#}");
}
