//! Migration time of an idle disk full of random data, beside `nbdcopy --flush` between two `nbdkit file` servers on
//! the same file system.

use std::io;

use godwit_testkit::report::Report;

use crate::suite::idle_copy::measure;
use crate::suite::idle_disk::Way;

const DEFAULT_MIB: u64 = 4096;
const DEFAULT_ROUNDS: u64 = 3;

pub(crate) fn bench() -> io::Result<()> {
    let mut report = Report::new("bench-idle-copy", &["nbdkit", "nbdcopy"])?;
    let bytes = number("GODWIT_BENCH_MIB", DEFAULT_MIB) << 20;
    let rounds = number("GODWIT_BENCH_ROUNDS", DEFAULT_ROUNDS) as usize;
    measure(
        &mut report,
        &[Way::Nbdcopy, Way::Godwit, Way::GodwitTls],
        bytes,
        rounds,
    )?;
    for (name, way) in [("ratio", Way::Godwit), ("ratio_tls", Way::GodwitTls)] {
        let seconds = |way: Way| {
            report
                .runs("idle-copy")
                .only("way", way.name())
                .median("seconds")
        };
        let ratio = seconds(way)
            .zip(seconds(Way::Nbdcopy))
            .map(|(ours, copy)| ours / copy);
        report.fact(name, ratio);
    }
    report.conclude()
}

fn number(variable: &str, default: u64) -> u64 {
    let given = std::env::var(variable)
        .ok()
        .and_then(|text| text.parse().ok());
    given.unwrap_or(default)
}
