//! Godwit beside its peers, on one machine, in one run. See bench/README.md for the scenes and the report.

mod idle;
mod memory;
mod net;
mod noise;
mod options;
mod policies;
mod qmp;
mod rdma;
mod report;
mod rest;
mod scenes;
mod site;
mod sla;
mod suite;
mod vhost;

use std::io;
use std::path::Path;
use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use godwit_bench::{environment, interrupt};

use self::noise::Noise;
use self::options::{Arguments, Command, Extent, Options, Scene};
use self::report::Report;
use self::suite::Suite;

/// Programs that take part beside `godwit`.
const PROGRAMS: [&str; 6] = [
    "qemu-system-x86_64",
    "qemu-storage-daemon",
    "qemu-nbd",
    "fio",
    "nbdkit",
    "nbdcopy",
];

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Quick(options) => bench(Extent::Quick, &options),
        Command::Full(options) => bench(Extent::Full, &options),
        Command::Document { reports, out } => report::document::write(&reports, &out),
        Command::Sla(arguments) => sla::bench(arguments),
        Command::Policies(arguments) => policies::bench(&arguments),
        Command::Vhost(arguments) => vhost::bench(&arguments),
        Command::Memory(arguments) => memory::bench(&arguments),
        Command::Net(options) => net::bench(&options),
        Command::Rdma(arguments) => rdma::bench(&arguments),
        Command::Idle => idle::bench(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("godwit-bench: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the scenes and judges the run. A refused run is reported with its reason.
fn bench(extent: Extent, options: &Options) -> io::Result<()> {
    interrupt::catch()?;
    std::fs::create_dir_all(&options.out)?;
    let mut report = Report::new(extent, environment::read(&options.out, &PROGRAMS)?);
    report.settle_seconds = options.settle(extent).as_secs();
    let mut suite = Suite::new(report, &options.out.join("report.json"));
    let noise = Noise::begin()?;
    let outcome = scenes(options, &mut suite);
    suite.report.noise = noise.end(&suite.report)?;
    let outcome = outcome.and_then(|()| suite.report.noise.judge());
    if let Err(error) = outcome {
        suite.refuse(&error)?;
        return Err(io::Error::other(format!("refusing to report: {error}")));
    }
    suite.finish()?;
    summary(&suite.report, suite.path());
    Ok(())
}

fn scenes(options: &Options, suite: &mut Suite) -> io::Result<()> {
    let extent = suite.report.extent;
    for scene in Scene::value_variants() {
        if !options.wants(*scene, extent) {
            println!("not part of this run: scene {}", scene.name());
            suite.report.left_out.push(scene.name());
        }
    }
    if options.wants(Scene::Migrate, extent) {
        scenes::migrate::run(options, suite)?;
    }
    if options.wants(Scene::Steady, extent) {
        scenes::steady::run(options, suite)?;
    }
    if options.wants(Scene::IdleCopy, extent) {
        scenes::idle_copy::run(options, suite)?;
    }
    if options.wants(Scene::DiskLimit, extent) {
        scenes::disk_limit::run(options, suite)?;
    }
    if options.wants(Scene::Vm, extent) {
        scenes::vm::run(options, suite)?;
    }
    suite.save()
}

fn summary(report: &Report, path: &Path) {
    for target in &report.targets {
        println!("{target}");
    }
    let met = report.targets.iter().filter(|target| target.met).count();
    println!("{met} of {} targets met", report.targets.len());
    println!("{}", path.display());
}
