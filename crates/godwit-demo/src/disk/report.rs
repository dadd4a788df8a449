//! The demo's measurements, for people and for programs.

use godwit_testkit::fio::Window;
use serde::Serialize;

/// The whole report: `target/demo/report.json`.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// Seconds from the accepted offer to the destination serving.
    pub(crate) lm_seconds: f64,
    /// Seconds of the `godwit migrate` command.
    pub(crate) command_seconds: f64,
    /// Copied bytes of the disk.
    pub(crate) bytes_copied: u64,
    /// Data bytes sent: copies and double writes.
    pub(crate) bytes_sent: u64,
    /// The guest before, during and after the migration.
    pub(crate) guest: Guest,
    /// CPU seconds of the nodes from the migration's start to the end.
    pub(crate) cpu_seconds: Cpu,
    /// True if the nodes compared every byte, and this program the file system.
    pub(crate) verified: bool,
    /// True if the way back was verified too, and then everything on the disk.
    pub(crate) round_trip_verified: bool,
    /// The way back.
    pub(crate) round_trip: RoundTrip,
    /// The cost of both ways.
    pub(crate) cost: Rate,
    /// The cost of both ways at fixed rates, if requested.
    pub(crate) fixed_rates: Vec<Rate>,
    /// Requests of fio answered in all.
    pub(crate) guest_requests: u64,
    /// Descriptions of all problems.
    pub(crate) problems: Vec<String>,
}

/// The cost in seconds of a move there and back.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Rate {
    /// The rate limit of copies, in MiB/s.
    pub(crate) mebibytes: Option<u32>,
    pub(crate) there: f64,
    pub(crate) back: f64,
}

/// The guest's view.
#[derive(Debug, Serialize)]
pub(crate) struct Guest {
    pub(crate) before: Window,
    pub(crate) during: Window,
    pub(crate) after: Window,
}

/// CPU seconds of both nodes.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Cpu {
    pub(crate) source: f64,
    pub(crate) destination: f64,
}

/// The way back.
#[derive(Debug, Serialize)]
pub(crate) struct RoundTrip {
    pub(crate) lm_seconds: f64,
    pub(crate) bytes_copied: u64,
    pub(crate) during: Window,
    pub(crate) after: Window,
    pub(crate) cpu_seconds: Cpu,
}

impl Report {
    /// Prints the table for people.
    pub(crate) fn print(&self) {
        println!("\n  guest (fio, 4 KiB random writes at 40 MB/s, each read back and checked)");
        println!(
            "  {:<14} {:>6} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>7}",
            "", "s", "IOPS", "writes/s", "p50 µs", "p99 µs", "p99.99 µs", "max µs", "errors"
        );
        row("before", &self.guest.before);
        row("during", &self.guest.during);
        row("after", &self.guest.after);
        row("during, back", &self.round_trip.during);
        row("after, back", &self.round_trip.after);
        let back = &self.round_trip;
        println!("\n  {:<24} {:>10} {:>10}", "", "there", "back");
        println!(
            "  {:<24} {:>10.2} {:>10.2}",
            "LM time, s", self.lm_seconds, back.lm_seconds
        );
        println!(
            "  {:<24} {:>10.0} {:>10.0}",
            "disk copied, MiB",
            mib(self.bytes_copied),
            mib(back.bytes_copied)
        );
        println!(
            "  {:<24} {:>10.2} {:>10.2}",
            "CPU of the source, s", self.cpu_seconds.source, back.cpu_seconds.source
        );
        println!(
            "  {:<24} {:>10.2} {:>10.2}",
            "CPU of the destination, s", self.cpu_seconds.destination, back.cpu_seconds.destination
        );
        println!(
            "  {:<24} {:>10.2} {:>10.2}",
            "cost, s", self.cost.there, self.cost.back
        );
        for rate in &self.fixed_rates {
            let held = rate
                .mebibytes
                .map_or_else(|| "no limit".into(), |rate| format!("{rate} MiB/s"));
            println!(
                "  {:<24} {:>10.2} {:>10.2}",
                format!("  at {held}"),
                rate.there,
                rate.back
            );
        }
        if !self.fixed_rates.is_empty() {
            let least = |cost: fn(&Rate) -> f64| {
                let costs = self.fixed_rates.iter().map(cost);
                cost(&self.cost) / costs.fold(f64::INFINITY, f64::min)
            };
            println!(
                "  {:<24} {:>10.2} {:>10.2}",
                "by that of the best rate",
                least(|rate| rate.there),
                least(|rate| rate.back)
            );
        }
        let word = |good: bool| if good { "identical" } else { "NOT identical" };
        println!("\n  verified: {}", word(self.verified));
        println!("  round trip verified: {}", word(self.round_trip_verified));
    }
}

fn row(name: &str, window: &Window) {
    println!(
        "  {name:<14} {:>6.1} {:>9.0} {:>9.0} {:>9} {:>9} {:>9} {:>9} {:>7}",
        window.seconds,
        window.iops,
        window.write_iops,
        window.p50_us,
        window.p99_us,
        window.p9999_us,
        window.max_us,
        window.errors
    );
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
