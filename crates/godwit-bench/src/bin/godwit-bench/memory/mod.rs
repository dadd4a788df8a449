//! Measures the cost of a machine's move to the memory of its guest. One guest under one load moves with zero-copy
//! memory, with memory left in its pool, and in three ways that send the memory, in turns. Draws the counterparts of
//! figures 5, 6 and 7 of the zero-copy migration paper.

mod figures;
mod method;
mod report;
mod run;
mod summary;
mod targets;
mod timeline;

use std::io;

use clap::Args;
use godwit_bench::interrupt;

use method::Method;
use report::Report;
use run::Scene;

/// Smallest guest memory in MiB with room for the kernel beside the loads.
const SMALLEST_GUEST_MIB: u64 = 256;

/// A guest under memory load that moves in each way, in turns
#[derive(Clone, Debug, Args)]
pub(crate) struct Arguments {
    /// A small guest, each way once, one write rate: less than four minutes
    #[arg(long)]
    quick: bool,
    /// MiB of memory of the guest, at least 256: its loads take nearly all of it; 1024, or 512 with --quick
    #[arg(long, value_parser = clap::value_parser!(u64).range(SMALLEST_GUEST_MIB..))]
    guest_mib: Option<u64>,
    /// Rounds, each with one turn of every way; 3, or 1 with --quick
    #[arg(long)]
    rounds: Option<usize>,
    /// MiB of pages for the guest's writer to write each second. All figures but the one over the rate use the first
    /// rate; the others take one turn only; 128,32,512, or 128 with --quick
    #[arg(long, value_delimiter = ',')]
    dirty_mib: Vec<u64>,
    /// Bytes a second for memory that is sent, such as 1250M; unlimited when left out
    #[arg(long)]
    max_bandwidth: Option<String>,
    /// Only this way, such as zero-copy; again for more. Targets that compare it with others are not judged then
    #[arg(long = "only")]
    only: Vec<Method>,
}

/// The turns of all ways.
struct Plan {
    guest_mib: u64,
    rounds: usize,
    dirty_mib: Vec<u64>,
    methods: Vec<Method>,
    /// Time to watch the guest before and after the move.
    watch_seconds: f64,
    /// Time after which a move is cancelled: pre-copy may never end.
    longest_seconds: f64,
}

impl Plan {
    fn of(arguments: &Arguments) -> Self {
        let of = |quick, whole| if arguments.quick { quick } else { whole };
        let given = |given: &Vec<u64>| (!given.is_empty()).then(|| given.clone());
        let whole = if arguments.quick {
            vec![128]
        } else {
            vec![128, 32, 512]
        };
        Self {
            guest_mib: arguments.guest_mib.unwrap_or(of(512, 1024)),
            rounds: arguments
                .rounds
                .unwrap_or(if arguments.quick { 1 } else { 3 })
                .max(1),
            dirty_mib: given(&arguments.dirty_mib).unwrap_or(whole),
            methods: match arguments.only.as_slice() {
                [] => Method::ALL.to_vec(),
                only => only.to_vec(),
            },
            watch_seconds: if arguments.quick { 2.0 } else { 4.0 },
            longest_seconds: if arguments.quick { 15.0 } else { 30.0 },
        }
    }
}

/// # Errors
/// A guest found damage, or the benchmark could not finish.
pub(crate) fn bench(arguments: &Arguments) -> io::Result<()> {
    interrupt::catch()?;
    let plan = Plan::of(arguments);
    let mut report = Report::new(
        arguments.quick,
        plan.guest_mib,
        plan.rounds,
        &plan.dirty_mib,
    );
    println!("{}", run::HEADINGS);
    for (place, &dirty_mib) in plan.dirty_mib.iter().enumerate() {
        // Only the first rate is judged; the others are lines of a figure.
        let rounds = if place == 0 { plan.rounds } else { 1 };
        for round in 0..rounds {
            for turn in 0..plan.methods.len() {
                interrupt::check()?;
                let method = plan.methods[(round + turn) % plan.methods.len()];
                let scene = Scene {
                    method,
                    round,
                    guest_mib: plan.guest_mib,
                    dirty_mib,
                    watch_seconds: plan.watch_seconds,
                    longest_seconds: plan.longest_seconds,
                    max_bandwidth: arguments.max_bandwidth.as_deref(),
                };
                let done = scene.play().map_err(|error| {
                    io::Error::new(error.kind(), format!("{}: {error}", method.name()))
                })?;
                println!("{done}");
                report.add(done);
                // Saves now, so that a later failure does not lose this run.
                report.save()?;
            }
        }
    }
    report.draw()?;
    report.judge();
    println!("{}", report.save()?.display());
    match report.is_good() {
        true => Ok(()),
        false => Err(io::Error::other("a guest found damage; see the report")),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use crate::options;

    #[test]
    fn a_guest_too_small_for_its_loads_is_refused() {
        let said = |mib: &str| {
            options::Arguments::try_parse_from(["godwit-bench", "memory", "--guest-mib", mib])
        };
        assert!(said("255").is_err());
        let options::Command::Memory(taken) = said("256").expect("is taken").command else {
            panic!("another scene");
        };
        assert_eq!(taken.guest_mib, Some(256));
    }
}
