//! The cost of a move to RDMA programs: three virtual machines with soft-RoCE, Debian's own programs, and the
//! measurements of figures 3, 4 and 5 and table 4 of the RDMA live-migration paper.

mod breakdown;
mod figures;
mod library;
mod partners;
mod report;
mod targets;
mod throughput;
mod waiting;

use std::io;

use clap::Args;
use godwit_bench::interrupt;
use godwit_testkit::process::target_dir;
use godwit_testkit::rdma::{Bed, Side, payload};

use report::{NAME, Report};

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
    /// Queue pairs of the wait-before-stop measurement, with messages of [`waiting::MESSAGE`] bytes.
    waiting_qps: &'static [u32],
    /// Message sizes in bytes, on [`waiting::PAIRS`] queue pairs.
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
            qps: if arguments.qps.is_empty() {
                qps.to_vec()
            } else {
                arguments.qps.clone()
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

/// # Errors
/// A program did not end with success after its move, or the benchmark could not finish.
pub(crate) fn bench(arguments: &Arguments) -> io::Result<()> {
    interrupt::catch()?;
    let plan = Plan::of(arguments);
    let wants = |part| arguments.only.is_empty() || arguments.only.contains(&part);
    let mut report = Report::new(arguments.quick, plan.rounds)?;
    println!("booting three virtual machines with soft-RoCE");
    let bed = Bed::start(3, &payload(&target_dir().join(NAME).join("guests"))?)?;
    bed.start_nodes(3)?;
    for round in 0..plan.rounds {
        if wants(Part::Breakdown) {
            breakdown::turn(&bed, &plan, round, &mut report)?;
        }
        if wants(Part::Waiting) {
            waiting::turn(&bed, &plan, round, &mut report)?;
        }
        if wants(Part::Partners) {
            partners::turn(&bed, &plan, round, &mut report)?;
        }
        if wants(Part::Throughput) {
            throughput::turn(&bed, &plan, round, &mut report)?;
        }
        if wants(Part::Library) {
            library::turn(&bed, &plan, round, &mut report)?;
        }
    }
    report.draw()?;
    report.judge();
    println!("{}", report.save()?.display());
    match report.is_good() {
        true => Ok(()),
        false => Err(io::Error::other(
            "a program did not end with success after its move; see the report",
        )),
    }
}
