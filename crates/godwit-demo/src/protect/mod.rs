//! A machine whose services survive the death of their host. nginx, Redis and PostgreSQL run in a guest, a second node
//! protects the machine, a third one is the witness, and clients outside use the services while node and QEMU of the
//! machine are killed again and again: first with checkpoints of the memory, then with a new boot at the other node.

mod site;

use std::io;
use std::time::{Duration, Instant};

use clap::Args;
use godwit_testkit::report::{Report, Target};
use serde_json::{Value, json};

use self::site::Site;

/// Longest median outage beyond the heartbeat's timeout, in milliseconds.
const BEYOND_GOAL: f64 = 500.0;
/// Longest median pause of the guest for a checkpoint, in milliseconds.
const PAUSE_GOAL: f64 = 5.0;
/// Longest time from the death of the host to the start of a new boot at the other node, in milliseconds.
const RESTART_GOAL: f64 = 10_000.0;
/// Time for which clients work before each death.
const WORK: Duration = Duration::from_secs(4);
/// Time before the death and after the first answers that counts as part of the failover.
const AROUND: Duration = Duration::from_secs(1);
/// Options of a protection with checkpoints of the memory, and of one of the disks alone.
const CHECKPOINTS: [&str; 2] = ["--frequency", "20"];
const RESTART: [&str; 1] = ["--restart"];

/// Figures of a failover with checkpoints. The outage is the longest time in which none of the web server's clients got
/// an answer; a single connection waits longer, for the next of TCP's retries, whose distance doubles. A lost record was
/// acknowledged before the death, and is not there after it; a wrong one has another value or was never sent. Pauses and
/// checkpoints are those that the node showed just before the death.
const FIGURES: &str = "outage_ms ms, beyond_heartbeat_ms ms, redis_gap_ms ms, postgres_gap_ms ms, answered records, \
    lost records, wrong records, broken connections, pause_p50_ms ms, pause_p99_ms ms, checkpoint_hz Hz, lag_p50_ms ms";
/// Figures of a failover with a new boot: from the death to the start of QEMU at the other node, and from there to the
/// guest's report that its services answer.
const RESTART_FIGURES: &str =
    "outage_ms ms, boot_ms ms, answered records, lost records, wrong records";

/// Kills the host of protected services, again and again
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Number of deaths with checkpoints of the memory
    #[arg(long, default_value_t = 4)]
    failovers: usize,
    /// Number of deaths with a new boot at the other node
    #[arg(long, default_value_t = 2)]
    restarts: usize,
}

pub(crate) fn play(arguments: &Arguments) -> io::Result<()> {
    let mut report = Report::new("demo-protect", &["qemu-system-x86_64"])?;
    report.table("failovers", "from, to", FIGURES, "");
    report.table("restarts", "from, to", RESTART_FIGURES, "");
    deaths(arguments.failovers, &CHECKPOINTS, failover, &mut report)?;
    deaths(arguments.restarts, &RESTART, restart, &mut report)?;
    judge(&mut report, arguments);
    report.conclude()
}

/// Protects a machine in this way, and kills its hosts.
fn deaths(
    count: usize,
    how: &[&str],
    death: fn(&mut Site, &mut Report) -> io::Result<()>,
    report: &mut Report,
) -> io::Result<()> {
    if count == 0 {
        return Ok(());
    }
    let mut site = Site::start()?;
    site.protect(how)?;
    for _ in 0..count {
        site.is_protected()?;
        std::thread::sleep(WORK);
        death(&mut site, report)?;
        site.host_returns()?;
    }
    site.is_protected()?;
    site.end()
}

/// Kills the host. The machine goes on at the other node where its last checkpoint was, and no client notices more than
/// a pause.
fn failover(site: &mut Site, report: &mut Report) -> io::Result<()> {
    let protection = site.protection();
    let died = site.kill_host();
    site.answers_after(died)?;
    std::thread::sleep(AROUND);
    let [web, redis, postgres] = site.clients.between(died - AROUND, Instant::now());
    let [outage, redis, postgres] = [web, redis, postgres].map(|seen| milliseconds(seen.gap));
    let heartbeat = protection["heartbeat_timeout_ms"].as_f64();
    let checkpoints = &protection["checkpoints"];
    let in_ms = |figure: &str| checkpoints[figure].as_f64().map(|us| us / 1e3);
    let mut run = json!({
        "from": site.from, "to": site.to, "outage_ms": outage, "redis_gap_ms": redis, "postgres_gap_ms": postgres,
        "beyond_heartbeat_ms": heartbeat.map(|heartbeat| outage - heartbeat),
        "pause_p50_ms": in_ms("pause_p50_us"), "pause_p99_ms": in_ms("pause_p99_us"),
        "checkpoint_hz": checkpoints["per_second"], "lag_p50_ms": in_ms("lag_p50_us"),
    });
    let broken = site.clients.broken();
    run["broken"] = broken.into();
    run["connection_survived"] = (broken == 0).into();
    add(site, run, "failovers", report)
}

/// Kills the host. The machine boots anew at the other node with everything that its services have promised.
fn restart(site: &mut Site, report: &mut Report) -> io::Result<()> {
    let died = site.kill_host();
    let runs = site.runs_elsewhere()?;
    let booted = site.booted_again()?;
    site.answers_after(booted)?;
    let run = json!({
        "from": site.from, "to": site.to, "outage_ms": milliseconds(runs - died),
        "boot_ms": milliseconds(booted - runs),
    });
    add(site, run, "restarts", report)
}

/// Adds a failover after the clients have read back all that they were promised.
fn add(site: &Site, mut run: Value, table: &str, report: &mut Report) -> io::Result<()> {
    let stored = site.clients.check()?;
    run["answered"] = stored.answered.into();
    run["lost"] = stored.lost.into();
    run["wrong"] = stored.wrong.into();
    report.add(table, run)
}

fn judge(report: &mut Report, arguments: &Arguments) {
    let (failovers, restarts) = (report.runs("failovers"), report.runs("restarts"));
    let pause = ["p50", "p99"].map(|part| failovers.median(&format!("pause_{part}_ms")));
    let rate = failovers.median("checkpoint_hz");
    let beyond = failovers.median("beyond_heartbeat_ms");
    let survived = failovers.all("connection_survived");
    let sum = |figure: &str| -> u64 {
        let all = failovers.0.iter().chain(&restarts.0);
        all.filter_map(|run| run[figure].as_u64()).sum()
    };
    let (lost, wrong) = (sum("lost"), sum("wrong"));
    let restarted = restarts.median("outage_ms");
    if arguments.failovers > 0 {
        report.targets.extend([
            Target::at_most(
                "median outage beyond the heartbeat's timeout, ms",
                BEYOND_GOAL,
                beyond,
            ),
            Target::at_most("median pause for a checkpoint, ms", PAUSE_GOAL, pause[0]),
        ]);
    }
    if arguments.restarts > 0 {
        report.targets.push(Target::at_most(
            "median time until the machine boots at the other node, ms",
            RESTART_GOAL,
            restarted,
        ));
    }
    report.fact("pause_ms", json!({"p50": pause[0], "p99": pause[1]}));
    report.fact("checkpoint_hz", rate);
    report.fact("lost", lost);
    report.fact("wrong", wrong);
    report.check(lost == 0, "an acknowledged record is lost");
    report.check(wrong == 0, "a record is wrong");
    report.check(survived, "a connection broke");
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
