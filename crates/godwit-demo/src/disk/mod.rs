//! The main job, shown: a disk with a file system and a running load moves between two nodes and back, and everything
//! is checked by programs that are not Godwit.
//!
//! The disk's first half holds an ext4 file system that nobody writes to, so it must come out byte-identical. Its
//! second half belongs to fio, which writes random blocks with checksums all the time and reads every one back. fio
//! works at half of what the host carries, so there is room for a move that the guest does not notice.
//!
//! With `--rates` the disk also moves at five fixed rates, and the report compares what they cost.

mod guest_disk;

use std::io;
use std::time::{Duration, Instant};

use clap::Args;
use godwit_core::auto::Cost;
use godwit_testkit::Cluster;
use godwit_testkit::cluster::ClusterOptions;
use godwit_testkit::fio::{FioLoad, FioReport, RunningFio, now_ms};
use godwit_testkit::report::{Report, Target, add_fields, step};
use serde_json::{Value, json};

use self::guest_disk::GuestDisk;

const DISK: &str = "demo";
const WARM_UP: Duration = Duration::from_secs(2);
const QUIET: Duration = Duration::from_secs(5);
/// Part of the load that the host carries.
const SHARE: f64 = 0.5;
/// The promise to the guest, the same for both ways, and the least share of its throughput that the guest is to keep.
const PROMISE: [&str; 2] = ["--sla", "auto"];
const KEPT: f64 = 0.9;
/// Bytes of fio's requests.
const BLOCK: f64 = 4096.0;

/// The fixed rates compared with `--rates`, in MiB/s; `None` for no limit.
const RATES: [Option<u32>; 5] = [Some(50), Some(100), Some(200), Some(400), None];

const GUEST: &str =
    "share_of_before, seconds s, iops, write_iops, p50_us µs, p99_us µs, p9999_us µs, max_us µs";

const MOVES: &str = "lm_seconds s, bytes_copied B, bytes_sent B, cpu_seconds_source s, cpu_seconds_destination s, \
    cost_seconds s";

/// Moves a busy disk between two nodes and back
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Move the disk at five fixed rates, too, and compare what they cost
    #[arg(long)]
    rates: bool,
}

/// A successful migration.
struct Moved {
    way: &'static str,
    /// The options in words.
    held: String,
    answer: Value,
    from_ms: u64,
    to_ms: u64,
    command_seconds: f64,
    cpu: [f64; 2],
}

impl Moved {
    fn lm_seconds(&self) -> f64 {
        self.answer["lm_seconds"]
            .as_f64()
            .unwrap_or(self.command_seconds)
    }

    /// Returns the cost in seconds for a guest that keeps this share of its throughput.
    fn cost(&self, kept: f64) -> f64 {
        let elapsed = Duration::from_secs_f64(self.lm_seconds());
        let cost = Cost {
            until_free: elapsed,
            on_two_nodes: elapsed,
            lost: elapsed.mul_f64((1.0 - kept).clamp(0.0, 1.0)),
            late: Duration::ZERO,
        };
        cost.seconds()
    }

    fn verified(&self) -> bool {
        self.answer["verified"] == true
    }
}

/// The cluster, the guest's disk and the load.
struct Stage {
    cluster: Cluster,
    guest: GuestDisk,
    fio: RunningFio,
}

pub(crate) fn play(arguments: &Arguments) -> io::Result<()> {
    let mut report = Report::new("demo-disk", &["fio"])?;
    step("starting two nodes with certificates of their own");
    let cluster = Cluster::start_with(&["a", "b"], ClusterOptions::release()?)?;
    step("making a 2 GiB disk: ext4 with content, and a region for fio");
    let guest = GuestDisk::make(cluster.dir())?;
    step("importing it at node a");
    let image = guest.image().to_string_lossy();
    cluster
        .node("a")
        .godwit(&["disk", "import", DISK, &image])
        .json()?;
    let carried = carried(&cluster)?;
    let rate = (carried * SHARE) as u64;
    report.fact("carried_bytes_per_second", carried);
    report.fact("written_bytes_per_second", rate);
    step(&format!(
        "starting fio at node a with half of it: it writes {:.0} MB/s and reads all of it back",
        rate as f64 / 1e6
    ));
    let fio = GuestDisk::load(Some(rate)).start(&cluster.node("a").nbd(DISK), cluster.dir())?;
    let mut stage = Stage {
        cluster,
        guest,
        fio,
    };
    std::thread::sleep(WARM_UP);
    let started_ms = now_ms();
    stage.fio.stay(QUIET)?;
    let mut moves = there_and_back(&mut stage, &mut report)?;
    if arguments.rates {
        moves.extend(fixed_rates(&mut stage)?);
    }
    let end_ms = now_ms();
    let load = finish(stage, &moves, &mut report)?;
    tell(&load, started_ms, &moves, end_ms, &mut report)?;
    report.conclude()
}

/// Returns the bytes a second that fio writes, and reads back, as fast as it can.
fn carried(cluster: &Cluster) -> io::Result<f64> {
    step("measuring what the host carries");
    let load = GuestDisk::load(None);
    let mut fio = load.start(&cluster.node("a").nbd(DISK), cluster.dir())?;
    fio.stay(WARM_UP)?;
    let from_ms = now_ms();
    fio.stay(QUIET)?;
    let to_ms = now_ms();
    let load = fio.stop()?;
    load.succeeded()?;
    Ok(load.window(from_ms, to_ms).write_iops * BLOCK)
}

/// Moves the disk to node b and back, under one promise.
fn there_and_back(stage: &mut Stage, report: &mut Report) -> io::Result<Vec<Moved>> {
    let there = stage.migrate("there", &PROMISE)?;
    stage.fio.stay(QUIET)?;
    stage.expect_states("departed", "serving", report);
    step("comparing the file system at node b with the original");
    let b = stage.cluster.node("b").nbd(DISK);
    let different = stage.guest.compare_file_system(&b)?;
    report.fact("verified", there.verified() && different.is_none());
    report
        .problems
        .extend(different.map(|words| format!("at node b: {words}")));

    let back = stage.migrate("back", &PROMISE)?;
    stage.fio.stay(QUIET)?;
    stage.expect_states("serving", "departed", report);
    Ok(vec![there, back])
}

/// Moves the disk there and back at each of [`RATES`], without a promise.
fn fixed_rates(stage: &mut Stage) -> io::Result<Vec<Moved>> {
    let mut moves = Vec::new();
    for mebibytes in RATES {
        let bandwidth = mebibytes.map(|rate| format!("{rate}MiB"));
        let mut options = vec!["--sla", "off", "--policy", "double-write"];
        if let Some(bandwidth) = &bandwidth {
            options.extend(["--max-bandwidth", bandwidth]);
        }
        // The copy left by the way back would be compared, and hardly anything sent.
        stage
            .cluster
            .node("b")
            .godwit(&["disk", "rm", DISK])
            .json()?;
        for way in ["there", "back"] {
            moves.push(stage.migrate(way, &options)?);
            stage.fio.stay(QUIET)?;
        }
    }
    Ok(moves)
}

impl Stage {
    fn migrate(&self, way: &'static str, options: &[&str]) -> io::Result<Moved> {
        let (from, to) = if way == "there" {
            ("a", "b")
        } else {
            ("b", "a")
        };
        let command = [&["migrate", DISK, "--to", to, "--verify"], options].concat();
        step(&format!("godwit {}", command.join(" ")));
        let nodes = [self.cluster.node(from), self.cluster.node(to)];
        let cpu = || nodes.map(|node| node.cpu_seconds());
        let (before, from_ms, started) = (cpu(), now_ms(), Instant::now());
        let answer = nodes[0].godwit(&command).json()?;
        let (command_seconds, to_ms, after) = (started.elapsed().as_secs_f64(), now_ms(), cpu());
        if answer["phase"] != "completed" {
            return Err(io::Error::other(format!(
                "the migration did not complete: {answer}"
            )));
        }
        Ok(Moved {
            way,
            held: options.join(" "),
            answer,
            from_ms,
            to_ms,
            command_seconds,
            cpu: [after[0] - before[0], after[1] - before[1]],
        })
    }

    fn expect_states(&self, a: &str, b: &str, report: &mut Report) {
        for (name, expected) in [("a", a), ("b", b)] {
            let state = self.cluster.node(name).disk_state(DISK);
            let problem = format!("node {name} says '{state}' where '{expected}' is right");
            report.check(state == expected, problem);
        }
    }
}

/// Ends the load, checks everything at node a, and stops the nodes.
fn finish(mut stage: Stage, moves: &[Moved], report: &mut Report) -> io::Result<FioReport> {
    let load = stage.fio.stop()?;
    report
        .problems
        .extend(load.succeeded().err().map(|error| error.to_string()));
    step("checking every block of fio and every file after the round trip");
    let problems = check_disk(&stage.cluster, &stage.guest)?;
    report.fact(
        "round_trip_verified",
        moves[1].verified() && problems.is_empty(),
    );
    report.problems.extend(problems);
    for moved in moves {
        let problem = format!(
            "the migration {} was not verified: {}",
            moved.way, moved.answer
        );
        report.check(moved.verified(), problem);
    }
    step("stopping both nodes");
    for name in ["a", "b"] {
        let ended = stage
            .cluster
            .node_mut(name)
            .terminate(Duration::from_secs(20));
        report
            .problems
            .extend(ended.err().map(|error| error.to_string()));
    }
    Ok(load)
}

fn check_disk(cluster: &Cluster, guest: &GuestDisk) -> io::Result<Vec<String>> {
    let node = cluster.node("a");
    let mut problems = Vec::new();
    if let Err(error) = FioLoad::check(&GuestDisk::load(None), &node.nbd(DISK), cluster.dir()) {
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

/// Adds the guest's figures in each part of the demo, and the cost of each move.
fn tell(
    load: &FioReport,
    started_ms: u64,
    moves: &[Moved],
    end_ms: u64,
    report: &mut Report,
) -> io::Result<()> {
    report.fact("guest_requests", load.samples.len());
    report.table("guest", "when", GUEST, "");
    let before = load.window(started_ms, moves[0].from_ms);
    let kept = |from_ms, to_ms| load.window(from_ms, to_ms).iops / before.iops;
    let mut spans = vec![("before".to_owned(), started_ms, moves[0].from_ms)];
    for (number, moved) in moves.iter().take(2).enumerate() {
        let next = moves.get(number + 1).map_or(end_ms, |next| next.from_ms);
        spans.push((format!("during, {}", moved.way), moved.from_ms, moved.to_ms));
        spans.push((format!("after, {}", moved.way), moved.to_ms, next));
    }
    for (when, from_ms, to_ms) in spans {
        let mut run = json!({"when": when, "share_of_before": kept(from_ms, to_ms)});
        add_fields(&mut run, &load.window(from_ms, to_ms), "");
        report.add("guest", run)?;
    }
    report.table("moves", "way, options", MOVES, "");
    for moved in moves {
        let bytes = |field: &str| moved.answer["progress"][field].as_u64().unwrap_or(0);
        let share = kept(moved.from_ms, moved.to_ms);
        let run = json!({
            "way": moved.way, "options": moved.held, "lm_seconds": moved.lm_seconds(),
            "command_seconds": moved.command_seconds, "bytes_copied": bytes("bytes_copied"),
            "bytes_sent": bytes("bytes_sent") + bytes("double_write_bytes"),
            "cpu_seconds_source": moved.cpu[0], "cpu_seconds_destination": moved.cpu[1],
            "cost_seconds": moved.cost(share), "guest_share": share, "promise": moved.answer["promise"],
        });
        report.add("moves", run)?;
    }
    for (number, way) in ["there", "back"].into_iter().enumerate() {
        let share = kept(moves[number].from_ms, moves[number].to_ms);
        let name = format!("throughput of the guest during the move {way}, as a share of before");
        report
            .targets
            .push(Target::at_least(name, KEPT, Some(share)));
        let fixed = report.runs("moves").only("way", way);
        let fixed = fixed.filter(|run| {
            run["options"]
                .as_str()
                .is_some_and(|it| it.starts_with("--sla off"))
        });
        if let Some(least) = fixed.least("cost_seconds") {
            report.fact(
                &format!("cost_by_best_rate_{way}"),
                moves[number].cost(share) / least,
            );
        }
    }
    Ok(())
}
