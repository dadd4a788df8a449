//! How long an idle disk full of random data takes to move, next to what copying it with
//! `nbdcopy --flush` between two `nbdkit file` servers takes on the same file system.
//!
//! The three ways alternate in every round, in a rotating order; before each, everything dirty is
//! written back and the source image leaves the page cache.

use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use godwit_testkit::Cluster;
use godwit_testkit::client::RawImage;
use godwit_testkit::cluster::{ClusterOptions, free_port, release_binary};
use godwit_testkit::image::{first_difference, write_random};
use godwit_testkit::nbd::{NbdConnection, NbdTarget};
use godwit_testkit::process::{Process, run, scratch_dir, wait_for};
use godwit_testkit::report::{median, write_report};
use rustix::fs::{Advice, fadvise};
use serde::Serialize;

const DEFAULT_MIB: u64 = 4096;
const DEFAULT_ROUNDS: usize = 3;

/// `target/bench-idle-copy/report.json`.
#[derive(Debug, Serialize)]
struct Report {
    bytes: u64,
    /// Median seconds from the migrate command to the destination serving, plain TCP.
    godwit_seconds: f64,
    /// The same with mutual TLS.
    godwit_tls_seconds: f64,
    /// Median seconds of `nbdcopy --flush`, plain TCP.
    nbdcopy_seconds: f64,
    /// godwit / nbdcopy.
    ratio: f64,
    /// godwit with TLS / nbdcopy without.
    ratio_tls: f64,
    rounds: Vec<Round>,
}

#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Round {
    nbdcopy: f64,
    godwit: f64,
    godwit_tls: f64,
}

fn main() -> ExitCode {
    match bench() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("idle-copy: {error}");
            ExitCode::FAILURE
        }
    }
}

fn bench() -> io::Result<()> {
    let mib = number("GODWIT_BENCH_MIB", DEFAULT_MIB);
    let rounds = number("GODWIT_BENCH_ROUNDS", DEFAULT_ROUNDS as u64) as usize;
    let dir = scratch_dir()?;
    let source = dir.path().join("source.img");
    println!("writing {mib} MiB of random data");
    write_random(&source, mib << 20, 42)?;

    let godwit = release_binary()?;
    let cluster = |tls| {
        Cluster::start_with(
            &["a", "b"],
            ClusterOptions {
                godwit: godwit.clone(),
                tls,
            },
        )
    };
    let (plain, tls) = (cluster(false)?, cluster(true)?);
    println!(
        "{:<8} {:>12} {:>12} {:>12}",
        "round", "nbdcopy s", "godwit s", "godwit TLS s"
    );
    let mut all = Vec::new();
    for number in 0..rounds {
        let mut round = Round::default();
        for turn in 0..3 {
            settle(&source)?;
            match (number + turn) % 3 {
                0 => round.nbdcopy = nbdcopy(&source, dir.path())?,
                1 => round.godwit = migrate(&plain, &source, number)?,
                _ => round.godwit_tls = migrate(&tls, &source, number)?,
            }
        }
        println!(
            "{:<8} {:>12.2} {:>12.2} {:>12.2}",
            number + 1,
            round.nbdcopy,
            round.godwit,
            round.godwit_tls
        );
        all.push(round);
    }
    let of = |pick: fn(&Round) -> f64| median(&all.iter().map(pick).collect::<Vec<_>>());
    let (copy, plain, tls) = (of(|r| r.nbdcopy), of(|r| r.godwit), of(|r| r.godwit_tls));
    let report = Report {
        bytes: mib << 20,
        godwit_seconds: plain,
        godwit_tls_seconds: tls,
        nbdcopy_seconds: copy,
        ratio: plain / copy,
        ratio_tls: tls / copy,
        rounds: all,
    };
    println!("{:<8} {copy:>12.2} {plain:>12.2} {tls:>12.2}", "median");
    println!(
        "{:<8} {:>12} {:>12.2} {:>12.2}",
        "ratio", "1.00", report.ratio, report.ratio_tls
    );
    println!("{}", write_report("bench-idle-copy", &report)?.display());
    Ok(())
}

/// Nothing is dirty, and the source is read from the disk again.
fn settle(source: &Path) -> io::Result<()> {
    rustix::fs::sync();
    fadvise(File::open(source)?, 0, None, Advice::DontNeed)?;
    std::thread::sleep(Duration::from_secs(1));
    Ok(())
}

fn nbdcopy(source: &Path, dir: &Path) -> io::Result<f64> {
    let destination = dir.join("nbdcopy.img");
    File::create(&destination)?.set_len(source.metadata()?.len())?;
    let (_from, from) = nbdkit(source)?;
    let (_to, to) = nbdkit(&destination)?;
    let started = Instant::now();
    run(Command::new("nbdcopy").args(["--flush", &from.uri(), &to.uri()]))?;
    let seconds = started.elapsed().as_secs_f64();
    same(source, &destination)?;
    std::fs::remove_file(destination)?;
    Ok(seconds)
}

fn nbdkit(file: &Path) -> io::Result<(Process, NbdTarget)> {
    let address: SocketAddr = free_port()?;
    let mut command = Command::new("nbdkit");
    command
        .args([
            "-f",
            "-i",
            "127.0.0.1",
            "-p",
            &address.port().to_string(),
            "file",
        ])
        .arg(file);
    let process = Process::spawn(&mut command)?;
    let target = NbdTarget::tcp(address, "");
    wait_for(Duration::from_secs(10), || {
        NbdConnection::connect(&target).ok()
    })
    .ok_or_else(|| io::Error::other(format!("nbdkit does not serve {}", file.display())))?;
    Ok((process, target))
}

fn migrate(cluster: &Cluster, source: &Path, number: usize) -> io::Result<f64> {
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    let disk = format!("idle-{number}");
    a.godwit(&["disk", "create", &disk, "--path", &source.to_string_lossy()])
        .json()?;
    let started = Instant::now();
    let answer = a.godwit(&["migrate", &disk, "--to", "b"]).json()?;
    let seconds = started.elapsed().as_secs_f64();
    if answer["phase"] != "completed" || b.disk_state(&disk) != "serving" {
        return Err(io::Error::other(format!("the disk did not move: {answer}")));
    }
    let image: PathBuf = b.image(&disk)?;
    same(source, &image)?;
    for node in [b, a] {
        node.godwit(&["disk", "rm", &disk]).text()?;
    }
    Ok(seconds)
}

/// A fast copy that is wrong does not count.
fn same(source: &Path, copy: &Path) -> io::Result<()> {
    let range = 0..source.metadata()?.len();
    match first_difference(
        &mut RawImage::open(source)?,
        &mut RawImage::open(copy)?,
        range,
    )? {
        None => Ok(()),
        Some(at) => Err(io::Error::other(format!(
            "{} differs at byte {at}",
            copy.display()
        ))),
    }
}

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable)
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(default)
}
