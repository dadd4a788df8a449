//! Godwit beside its peers, and beside itself, on one machine, in one run. See bench/README.md for the scenes and the
//! reports.

mod common;
mod idle;
mod memory;
mod migrate;
mod net;
mod policies;
mod protect;
mod rdma;
mod serve;
mod sla;
mod stop;
mod suite;
mod vhost;
mod vm;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use godwit_testkit::report::exit_code;

use self::suite::{Extent, document};

/// Godwit beside its peers, on one machine, in one run
#[derive(Debug, Parser)]
struct Arguments {
    #[command(subcommand)]
    scene: Scene,
}

#[derive(Debug, Subcommand)]
enum Scene {
    /// A selection that takes about ten minutes
    Quick(suite::Options),
    /// Everything, for days unless part of it is selected
    Full(suite::Options),
    /// Writes docs/benchmarks.md and its plots from the reports of a machine
    Document {
        /// A report; more of them when the machine was measured in parts
        #[arg(long = "report", default_value = "target/bench/report.json")]
        reports: Vec<PathBuf>,
        /// Directory of benchmarks.md; its plots go into benchmarks/ beside it
        #[arg(long, default_value = "docs")]
        out: PathBuf,
    },
    Sla(sla::Arguments),
    Policies(policies::Arguments),
    Vhost(vhost::Arguments),
    Memory(memory::Arguments),
    Net(net::Options),
    Protect(protect::Options),
    Rdma(rdma::Arguments),
    Stop(stop::Arguments),
    /// An idle disk that moves, beside nbdcopy between two nbdkit servers
    Idle,
}

fn main() -> ExitCode {
    let scene = Arguments::parse().scene;
    let ended = common::interrupt::catch().and_then(|()| match scene {
        Scene::Quick(options) => suite::bench(Extent::Quick, &options),
        Scene::Full(options) => suite::bench(Extent::Full, &options),
        Scene::Document { reports, out } => document::write(&reports, &out),
        Scene::Sla(arguments) => sla::bench(arguments),
        Scene::Policies(arguments) => policies::bench(&arguments),
        Scene::Vhost(arguments) => vhost::bench(&arguments),
        Scene::Memory(arguments) => memory::bench(&arguments),
        Scene::Net(options) => net::bench(&options),
        Scene::Protect(options) => protect::bench(&options),
        Scene::Rdma(arguments) => rdma::bench(&arguments),
        Scene::Stop(arguments) => stop::bench(&arguments),
        Scene::Idle => idle::bench(),
    });
    exit_code(ended)
}
