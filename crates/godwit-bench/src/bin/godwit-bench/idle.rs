//! Migration time of an idle disk full of random data, beside `nbdcopy --flush` between two `nbdkit file` servers on
//! the same file system.
//!
//! The three ways alternate in every round, in a rotating order. Before each, all dirty data is written back and the
//! source image leaves the page cache.

use std::io;

use godwit_bench::idle_copy::{IdleDisk, Way};
use godwit_testkit::process::scratch_dir;
use godwit_testkit::report::{median, write_report};
use serde::Serialize;

const DEFAULT_MIB: u64 = 4096;
const DEFAULT_ROUNDS: usize = 3;

/// `target/bench-idle-copy/report.json`.
#[derive(Debug, Serialize)]
struct Report {
    bytes: u64,
    /// Median seconds from the migrate command until the destination serves, plain TCP.
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

pub(crate) fn bench() -> io::Result<()> {
    let mib = number("GODWIT_BENCH_MIB", DEFAULT_MIB);
    let rounds = number("GODWIT_BENCH_ROUNDS", DEFAULT_ROUNDS as u64) as usize;
    let dir = scratch_dir()?;
    println!("writing {mib} MiB of random data");
    let mut disk = IdleDisk::create(dir.path(), mib << 20)?;
    println!(
        "{:<8} {:>12} {:>12} {:>12}",
        "round", "nbdcopy s", "godwit s", "godwit TLS s"
    );
    let mut all = Vec::new();
    for number in 0..rounds {
        let mut round = Round::default();
        for turn in 0..3 {
            match (number + turn) % 3 {
                0 => round.nbdcopy = disk.seconds(Way::Nbdcopy)?,
                1 => round.godwit = disk.seconds(Way::Godwit)?,
                _ => round.godwit_tls = disk.seconds(Way::GodwitTls)?,
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

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable)
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(default)
}
