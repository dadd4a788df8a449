//! The demo from beginning to end.

use std::io;
use std::time::{Duration, Instant};

use godwit_core::auto::Cost;
use godwit_testkit::Cluster;
use godwit_testkit::cluster::{ClusterOptions, release_binary};
use godwit_testkit::fio::{RunningFio, now_ms};
use godwit_testkit::report::write_report;
use serde_json::Value;

use crate::disk::guest_disk::GuestDisk;
use crate::disk::report::{Cpu, Guest, Rate, Report, RoundTrip};

const DISK: &str = "demo";
const WARM_UP: Duration = Duration::from_secs(2);
const QUIET: Duration = Duration::from_secs(5);

/// The fixed rates compared with `--rates`, in MiB/s; `None` for no limit.
const RATES: [Option<u32>; 5] = [Some(50), Some(100), Some(200), Some(400), None];

/// A successful migration.
struct Moved {
    answer: Value,
    from_ms: u64,
    to_ms: u64,
    command_seconds: f64,
    cpu: Cpu,
}

impl Moved {
    fn lm_seconds(&self) -> f64 {
        self.answer["lm_seconds"]
            .as_f64()
            .unwrap_or(self.command_seconds)
    }

    /// Returns the cost in seconds for a guest with `before` requests per second before and `during` during the move.
    fn cost(&self, before: f64, during: f64) -> f64 {
        let elapsed = Duration::from_secs_f64(self.lm_seconds());
        let lost = (1.0 - during / before).clamp(0.0, 1.0);
        let cost = Cost {
            until_free: elapsed,
            on_two_nodes: elapsed,
            lost: elapsed.mul_f64(lost),
            late: Duration::ZERO,
        };
        cost.seconds()
    }

    fn bytes(&self, field: &str) -> u64 {
        self.answer["progress"][field].as_u64().unwrap_or(0)
    }

    fn verified(&self) -> bool {
        self.answer["verified"].as_bool().unwrap_or(false)
    }
}

/// Runs the demo, with `rates` also at [`RATES`]; returns the problems.
pub(crate) fn demo(rates: bool) -> io::Result<Vec<String>> {
    let options = ClusterOptions {
        godwit: release_binary()?,
        tls: true,
    };
    step("starting two nodes with certificates of their own");
    let mut cluster = Cluster::start_with(&["a", "b"], options)?;
    step("making a 2 GiB disk: ext4 with content, and a region for fio");
    let guest = GuestDisk::make(cluster.dir())?;
    step("importing it at node a");
    let image = guest.image().to_string_lossy().into_owned();
    cluster
        .node("a")
        .godwit(&["disk", "import", DISK, &image])
        .json()?;

    step("starting fio at node a");
    let mut fio = GuestDisk::load().start(&cluster.node("a").nbd(DISK), cluster.dir())?;
    std::thread::sleep(WARM_UP);
    let started_ms = now_ms();
    stay(&mut fio, QUIET)?;

    let mut problems = Vec::new();
    let there = migrate(&cluster, "a", "b", &[])?;
    stay(&mut fio, QUIET)?;
    let after_ms = now_ms();
    expect_states(&cluster, "departed", "serving", &mut problems);
    step("comparing the file system at node b with the original");
    let different = guest.compare_file_system(&cluster.node("b").nbd(DISK))?;
    let verified = there.verified() && different.is_none();
    problems.extend(different.map(|words| format!("at node b: {words}")));

    let back = migrate(&cluster, "b", "a", &[])?;
    stay(&mut fio, QUIET)?;
    let end_ms = now_ms();
    expect_states(&cluster, "serving", "departed", &mut problems);
    let trips = if rates {
        fixed_rates(&cluster, &mut fio)?
    } else {
        Vec::new()
    };
    let load = fio.stop()?;
    if load.error != 0 {
        problems.push(format!(
            "fio ended with error {}: {}",
            load.error, load.messages
        ));
    }

    step("checking every block of fio and every file after the round trip");
    let before_checks = problems.len();
    problems.extend(check_disk(&cluster, &guest)?);
    let round_trip_verified = back.verified() && problems.len() == before_checks;
    for (moved, way) in [(&there, "there"), (&back, "back")] {
        if !moved.verified() {
            problems.push(format!(
                "the migration {way} was not verified: {}",
                moved.answer
            ));
        }
    }
    step("stopping both nodes");
    for name in ["a", "b"] {
        if let Err(error) = cluster.node_mut(name).terminate(Duration::from_secs(20)) {
            problems.push(error.to_string());
        }
    }

    let window = |from_ms, to_ms| load.window(from_ms, to_ms);
    let before = window(started_ms, there.from_ms);
    let cost = |moved: &Moved| moved.cost(before.iops, window(moved.from_ms, moved.to_ms).iops);
    let fixed_rates = trips.iter().map(|(mebibytes, [there, back])| Rate {
        mebibytes: *mebibytes,
        there: cost(there),
        back: cost(back),
    });
    let report = Report {
        cost: Rate {
            mebibytes: None,
            there: cost(&there),
            back: cost(&back),
        },
        fixed_rates: fixed_rates.collect(),
        lm_seconds: there.lm_seconds(),
        command_seconds: there.command_seconds,
        bytes_copied: there.bytes("bytes_copied"),
        bytes_sent: there.bytes("bytes_sent") + there.bytes("double_write_bytes"),
        guest: Guest {
            before,
            during: window(there.from_ms, there.to_ms),
            after: window(there.to_ms, after_ms),
        },
        cpu_seconds: there.cpu,
        verified,
        round_trip_verified,
        round_trip: RoundTrip {
            lm_seconds: back.lm_seconds(),
            bytes_copied: back.bytes("bytes_copied"),
            during: window(back.from_ms, back.to_ms),
            after: window(back.to_ms, end_ms),
            cpu_seconds: back.cpu,
        },
        guest_requests: load.samples.len() as u64,
        problems,
    };
    report.print();
    println!("\n  {}", write_report("demo", &report)?.display());
    Ok(report.problems)
}

/// Moves the disk there and back at each of [`RATES`], without a promise.
fn fixed_rates(
    cluster: &Cluster,
    fio: &mut RunningFio,
) -> io::Result<Vec<(Option<u32>, [Moved; 2])>> {
    let mut trips = Vec::new();
    for mebibytes in RATES {
        let bandwidth = mebibytes.map(|rate| format!("{rate}MiB"));
        let mut options = vec!["--sla", "off", "--policy", "double-write"];
        if let Some(bandwidth) = &bandwidth {
            options.extend(["--max-bandwidth", bandwidth]);
        }
        // The copy left by the way back would be compared, and hardly anything sent.
        cluster.node("b").godwit(&["disk", "rm", DISK]).json()?;
        let there = migrate(cluster, "a", "b", &options)?;
        stay(fio, QUIET)?;
        let back = migrate(cluster, "b", "a", &options)?;
        stay(fio, QUIET)?;
        trips.push((mebibytes, [there, back]));
    }
    Ok(trips)
}

fn migrate(cluster: &Cluster, from: &str, to: &str, options: &[&str]) -> io::Result<Moved> {
    let command = [&["migrate", DISK, "--to", to, "--verify"], options].concat();
    step(&format!("godwit {}", command.join(" ")));
    let (source, destination) = (cluster.node(from), cluster.node(to));
    let cpu = || (source.cpu_seconds(), destination.cpu_seconds());
    let (before, from_ms, started) = (cpu(), now_ms(), Instant::now());
    let answer = source.godwit(&command).json()?;
    let (command_seconds, to_ms, after) = (started.elapsed().as_secs_f64(), now_ms(), cpu());
    let cpu = Cpu {
        source: after.0 - before.0,
        destination: after.1 - before.1,
    };
    if answer["phase"] != "completed" {
        return Err(io::Error::other(format!(
            "the migration did not complete: {answer}"
        )));
    }
    Ok(Moved {
        answer,
        from_ms,
        to_ms,
        command_seconds,
        cpu,
    })
}

/// Lets the load run; fails if the load has ended.
fn stay(fio: &mut RunningFio, how_long: Duration) -> io::Result<()> {
    std::thread::sleep(how_long);
    if fio.alive() {
        return Ok(());
    }
    Err(io::Error::other(fio.explain()))
}

fn expect_states(cluster: &Cluster, a: &str, b: &str, problems: &mut Vec<String>) {
    for (name, expected) in [("a", a), ("b", b)] {
        let state = cluster.node(name).disk_state(DISK);
        if state != expected {
            problems.push(format!(
                "node {name} says '{state}' where '{expected}' is right"
            ));
        }
    }
}

fn check_disk(cluster: &Cluster, guest: &GuestDisk) -> io::Result<Vec<String>> {
    let node = cluster.node("a");
    let mut problems = Vec::new();
    if let Err(error) = GuestDisk::load().check(&node.nbd(DISK), cluster.dir()) {
        problems.push(format!("fio finds wrong blocks at node a: {error}"));
    }
    if let Some(words) = guest.compare_file_system(&node.nbd(DISK))? {
        problems.push(format!("at node a: {words}"));
    }
    let exported = cluster.dir().join("exported.img");
    node.godwit(&["disk", "export", DISK, &exported.to_string_lossy()])
        .json()?;
    problems.extend(guest.check_export(&exported)?);
    Ok(problems)
}

fn step(what: &str) {
    println!("• {what}");
}
