//! Cost of the controller to a disk that does not move: this build and another one, in turns.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use godwit_testkit::Cluster;
use godwit_testkit::cluster::{ClusterOptions, release_binary};
use godwit_testkit::fio::{FioLoad, Requests, Window, now_ms};
use godwit_testkit::image::write_random;
use godwit_testkit::report::{Runs, add_fields};
use serde_json::json;

use crate::common::in_turns;

const DISK: &str = "steady";
const SIZE: u64 = 512 << 20;
/// Start-up time of the guest's load.
const WARM_UP: Duration = Duration::from_millis(500);
/// Depth 1 shows the latency, depth 16 the throughput.
const DEPTHS: [u32; 2] = [1, 16];
const BUILDS: [&str; 2] = ["baseline", "current"];

/// Alternates both builds under each load and reports medians.
pub(super) fn run(baseline: &Path, rounds: usize, seconds: u64) -> io::Result<()> {
    let mut report = super::report("steady.json")?;
    report.fact("baseline", baseline.display().to_string());
    report.table(
        "runs",
        "depth, build",
        "iops, p50_us µs, p99_us µs, p9999_us µs",
        "",
    );
    report.table(
        "ratios",
        "depth, within_spread",
        "iops_ratio, p50_ratio",
        "",
    );
    let builds = [start(baseline.into())?, start(release_binary()?)?];
    // Both builds share an image: the place of a file on the disk matters more than the build.
    let image = builds[0].dir().join("steady.img");
    write_random(&image, SIZE, 7)?;
    for depth in DEPTHS {
        let load = FioLoad {
            requests: Requests::Mixed(50),
            region: 0..SIZE,
            depth,
            ..FioLoad::default()
        };
        in_turns(rounds, builds.len(), |_, turn| {
            let window = measure(&builds[turn], &image, &load, seconds)?;
            let mut run = json!({"depth": depth, "build": BUILDS[turn]});
            add_fields(&mut run, &window, "");
            report.add("runs", run)
        })?;
        let runs = report.runs("runs").only("depth", depth);
        let [baseline, current] = BUILDS.map(|build| runs.only("build", build));
        // Above 1 is faster, of the latency below 1.
        let ratio = |figure: &str| {
            let of = |runs: &Runs<'_>| runs.median(figure).unwrap_or_default();
            of(&current) / of(&baseline).max(1.0)
        };
        let (iops, p50) = (ratio("iops"), ratio("p50_us"));
        // True if the medians differ by less than the spread of either build's runs.
        let within = (iops - 1.0).abs() <= spread(&baseline).max(spread(&current));
        report.add(
            "ratios",
            json!({
                "depth": depth, "within_spread": within, "iops_ratio": iops, "p50_ratio": p50,
            }),
        )?;
    }
    report.conclude()
}

/// Returns (third quartile - first) / median of the runs' IOPS.
fn spread(runs: &Runs<'_>) -> f64 {
    let mut sorted = runs.values("iops");
    sorted.sort_by(f64::total_cmp);
    let quartile = |part: usize| sorted[(sorted.len() - 1) * part / 4];
    (quartile(3) - quartile(1)) / runs.median("iops").unwrap_or_default().max(1.0)
}

fn start(godwit: PathBuf) -> io::Result<Cluster> {
    Cluster::start_with(&["a"], ClusterOptions { godwit, tls: true })
}

/// Serves the image with one build for the duration of a measurement.
fn measure(cluster: &Cluster, image: &Path, load: &FioLoad, seconds: u64) -> io::Result<Window> {
    let node = cluster.node("a");
    let path = image.to_string_lossy();
    node.godwit(&["disk", "create", DISK, "--path", &path])
        .json()?;
    let mut fio = load.start(&node.nbd(DISK), cluster.dir())?;
    fio.stay(WARM_UP)?;
    let from = now_ms();
    fio.stay(Duration::from_secs(seconds))?;
    let to = now_ms();
    let guest = fio.stop()?;
    guest.succeeded()?;
    node.godwit(&["disk", "rm", DISK]).json()?;
    Ok(guest.window(from, to))
}
