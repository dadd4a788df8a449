//! Cost of the controller to a disk that does not move: this build and another one, in turns.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use godwit_testkit::Cluster;
use godwit_testkit::cluster::{ClusterOptions, release_binary};
use godwit_testkit::fio::{FioLoad, Requests, Window, now_ms};
use godwit_testkit::image::write_random;
use godwit_testkit::report::{median, write_report_as};
use serde::Serialize;

const DISK: &str = "steady";
const SIZE: u64 = 512 << 20;
/// Start-up time of the guest's load.
const WARM_UP: Duration = Duration::from_millis(500);
/// Depth 1 shows the latency, depth 16 the throughput.
const DEPTHS: [u32; 2] = [1, 16];

#[derive(Debug, Serialize)]
struct Report {
    baseline: PathBuf,
    loads: Vec<Load>,
}

#[derive(Debug, Serialize)]
struct Load {
    depth: u32,
    baseline: Build,
    current: Build,
    /// Medians, current / baseline: above 1 is faster.
    iops_ratio: f64,
    /// Medians, current / baseline: below 1 is faster.
    p50_ratio: f64,
    /// True if the medians differ by less than the spread of either build's runs.
    within_spread: bool,
}

#[derive(Debug, Serialize)]
struct Build {
    iops: f64,
    p50_us: f64,
    p99_us: f64,
    p9999_us: f64,
    /// (Third quartile - first) / median of the runs' IOPS.
    iops_spread: f64,
    runs: Vec<Window>,
}

/// Alternates both builds under each load and reports medians.
pub(crate) fn run(baseline: &Path, rounds: usize, seconds: u64) -> io::Result<()> {
    let builds = [start(baseline.into())?, start(release_binary()?)?];
    // Both builds share an image: the place of a file on the disk matters more than the build.
    let image = builds[0].dir().join("steady.img");
    write_random(&image, SIZE, 7)?;
    println!(
        "{:<6} {:>14} {:>14} {:>8} {:>12} {:>12} {:>8}",
        "depth", "IOPS baseline", "IOPS current", "ratio", "p50 baseline", "p50 current", "ratio"
    );
    let mut loads = Vec::new();
    for depth in DEPTHS {
        let load = FioLoad {
            requests: Requests::Mixed(50),
            region: 0..SIZE,
            rate: None,
            depth,
            runtime: Duration::from_secs(seconds * 2 + 60),
            compressible: false,
        };
        let mut windows = [Vec::new(), Vec::new()];
        for round in 0..rounds {
            for turn in 0..2 {
                // The first build of a round alternates, too.
                let which = (round + turn) % 2;
                windows[which].push(measure(&builds[which], &image, &load, seconds)?);
            }
        }
        let [baseline, current] = windows.map(Build::new);
        let load = Load::new(depth, baseline, current);
        load.print();
        loads.push(load);
    }
    let report = Report {
        baseline: baseline.into(),
        loads,
    };
    println!(
        "{}",
        write_report_as("bench-sla", "steady.json", &report)?.display()
    );
    Ok(())
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
    let window = measure_load(cluster, load, seconds)?;
    node.godwit(&["disk", "rm", DISK]).json()?;
    Ok(window)
}

fn measure_load(cluster: &Cluster, load: &FioLoad, seconds: u64) -> io::Result<Window> {
    let fio = load.start(&cluster.node("a").nbd(DISK), cluster.dir())?;
    std::thread::sleep(WARM_UP);
    let from = now_ms();
    std::thread::sleep(Duration::from_secs(seconds));
    let to = now_ms();
    let guest = fio.stop()?;
    if guest.error == 0 {
        return Ok(guest.window(from, to));
    }
    Err(io::Error::other(format!(
        "the guest saw error {}: {}",
        guest.error, guest.messages
    )))
}

impl Build {
    fn new(runs: Vec<Window>) -> Self {
        let of = |pick: fn(&Window) -> f64| median(&runs.iter().map(pick).collect::<Vec<_>>());
        let iops = of(|window| window.iops);
        let mut sorted: Vec<f64> = runs.iter().map(|window| window.iops).collect();
        sorted.sort_by(f64::total_cmp);
        let quartile = |part: usize| sorted[(sorted.len() - 1) * part / 4];
        Self {
            iops,
            p50_us: of(|window| window.p50_us as f64),
            p99_us: of(|window| window.p99_us as f64),
            p9999_us: of(|window| window.p9999_us as f64),
            iops_spread: (quartile(3) - quartile(1)) / iops.max(1.0),
            runs,
        }
    }
}

impl Load {
    fn new(depth: u32, baseline: Build, current: Build) -> Self {
        let iops_ratio = current.iops / baseline.iops.max(1.0);
        let spread = baseline.iops_spread.max(current.iops_spread);
        Self {
            depth,
            iops_ratio,
            p50_ratio: current.p50_us / baseline.p50_us.max(1.0),
            within_spread: (iops_ratio - 1.0).abs() <= spread,
            baseline,
            current,
        }
    }

    fn print(&self) {
        println!(
            "{:<6} {:>14.0} {:>14.0} {:>8.3} {:>12.0} {:>12.0} {:>8.3}{}",
            self.depth,
            self.baseline.iops,
            self.current.iops,
            self.iops_ratio,
            self.baseline.p50_us,
            self.current.p50_us,
            self.p50_ratio,
            if self.within_spread {
                "  (within the runs' spread)"
            } else {
                ""
            }
        );
    }
}
