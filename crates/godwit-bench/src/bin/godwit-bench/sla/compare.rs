//! The three ways to throttle a migration, side by side.

use std::io;

use godwit_bench::chart::{Chart, Line};
use godwit_testkit::fio::Window;
use godwit_testkit::report::{median, write_report};
use serde::Serialize;
use serde_json::Value;

use crate::sla::scene::SceneOptions;
use crate::sla::stage::{Run, Stage};

const NAME: &str = "bench-sla";
/// Unit of the series, in ms.
const STEP: u64 = 1000;
/// Noise threshold: a quiet p99.99 above this fraction of the window-only p99.99 makes the ratios meaningless.
const NOISY: f64 = 0.5;

#[derive(Debug, Serialize)]
struct Report {
    scene: SceneOptions,
    variants: Variants<Variant>,
    ratios: Ratios,
    noise: Noise,
}

#[derive(Debug, Default, Serialize)]
struct Variants<T> {
    /// Alg. 1: only the locking window.
    window_only: T,
    /// Alg. 1 and 2: copies pause.
    backpressure: T,
    /// Alg. 1, 2 and 3: double writes pause too.
    full: T,
}

/// Medians of a variant's rounds, over the time of the move.
#[derive(Debug, Serialize)]
struct Variant {
    p9999_us: f64,
    lm_seconds: f64,
    pauses: f64,
    guest_iops: f64,
    p50_us: f64,
    p99_us: f64,
    max_us: f64,
    /// Series of the round with the median p99.99; of two, the lower.
    series: Vec<Point>,
    rounds: Vec<Round>,
}

#[derive(Clone, Debug, Serialize)]
struct Round {
    lm_seconds: f64,
    pauses: u64,
    promise: Value,
    /// MB/s of the other traffic while the link was crowded.
    crowded_traffic: Option<f64>,
    before: Window,
    during: Window,
    crowded: Window,
    after: Window,
    series: Vec<Point>,
}

/// One second of a series.
#[derive(Clone, Copy, Debug, Serialize)]
struct Point {
    /// Seconds since the link became crowded; since the start of the migration without crowding.
    seconds: f64,
    p9999_us: u64,
    iops: f64,
}

#[derive(Debug, Serialize)]
struct Ratios {
    /// Tail latency with the window alone, relative to the full design.
    p9999_window_over_full: f64,
    /// Migration time of the full design, relative to the window alone.
    lm_time_full_over_window: f64,
}

#[derive(Debug, Serialize)]
struct Noise {
    /// Worst p99.99 of any run's quiet time before the migration.
    worst_quiet_p9999_us: u64,
    /// True if the worst quiet p99.99 is more than half of the window-only p99.99 during the migration.
    noisy: bool,
}

/// Runs every variant `rounds` times, in turns, and writes the report.
pub(crate) fn run(scene: &SceneOptions, rounds: usize) -> io::Result<()> {
    let stage = Stage::crowded(scene)?;
    let keep = ["--sla", &scene.sla];
    let variants = [
        ("window only", vec!["--sla", "off"]),
        (
            "backpressure",
            [&keep[..], &["--delayed-writes", "off"]].concat(),
        ),
        ("full", keep.to_vec()),
    ];
    let mut results: [Vec<Round>; 3] = Default::default();
    print_header();
    for number in 0..rounds {
        for turn in 0..variants.len() {
            let index = (number + turn) % variants.len();
            let (name, options) = &variants[index];
            let disk = format!("round-{number}-{}", name.replace(' ', "-"));
            let round = Round::new(&stage.run(&disk, options)?);
            round.print(name);
            results[index].push(round);
        }
    }
    let [window_only, backpressure, full] = results.map(Variant::new);
    let variants = Variants {
        window_only,
        backpressure,
        full,
    };
    let report = Report {
        ratios: Ratios::new(&variants),
        noise: Noise::new(&variants),
        scene: scene.clone(),
        variants,
    };
    report.print();
    let path = write_report(NAME, &report)?;
    let picture = path.with_file_name("latency.svg");
    report.chart().write(&picture)?;
    println!("{}\n{}", path.display(), picture.display());
    Ok(())
}

impl Round {
    fn new(run: &Run) -> Self {
        let crowding = run.crowding.as_ref();
        let zero = crowding.map_or(run.lm.start, |crowding| crowding.span.start);
        // Steps back in whole seconds, so that no point is half crowded.
        let first = zero - (zero - run.quiet.start) / STEP * STEP;
        let series = run.guest.windows(first, run.end, STEP);
        let series = series.iter().zip((first..).step_by(STEP as usize));
        Self {
            lm_seconds: run.lm_seconds(),
            pauses: run.pauses(),
            promise: run.promise().clone(),
            crowded_traffic: crowding.and_then(|crowding| crowding.rate).map(mega),
            before: run.before(),
            during: run.during(),
            crowded: crowding.map_or_else(Window::default, |crowding| {
                let end = crowding.span.end.min(run.lm.end);
                run.guest.window(crowding.span.start, end)
            }),
            after: run.guest.window(run.lm.end, run.end),
            series: series
                .map(|(window, at)| Point {
                    seconds: (at as f64 - zero as f64) / 1000.0,
                    p9999_us: window.p9999_us,
                    iops: window.iops,
                })
                .collect(),
        }
    }

    fn print(&self, name: &str) {
        println!(
            "{name:<14} {:>8.1} {:>7} {:>9.0} {:>9} {:>9} {:>10} {:>9} {:>12} {:>12}",
            self.lm_seconds,
            self.pauses,
            self.during.iops,
            self.during.p50_us,
            self.during.p99_us,
            self.during.p9999_us,
            self.during.max_us,
            self.before.p9999_us,
            self.crowded.p9999_us,
        );
    }
}

impl Variant {
    fn new(rounds: Vec<Round>) -> Self {
        let of = |pick: fn(&Round) -> f64| median(&rounds.iter().map(pick).collect::<Vec<_>>());
        let mut sorted: Vec<&Round> = rounds.iter().collect();
        sorted.sort_by_key(|round| round.during.p9999_us);
        let middle = sorted.get(sorted.len().saturating_sub(1) / 2);
        Self {
            p9999_us: of(|round| round.during.p9999_us as f64),
            lm_seconds: of(|round| round.lm_seconds),
            pauses: of(|round| round.pauses as f64),
            guest_iops: of(|round| round.during.iops),
            p50_us: of(|round| round.during.p50_us as f64),
            p99_us: of(|round| round.during.p99_us as f64),
            max_us: of(|round| round.during.max_us as f64),
            series: middle.map_or_else(Vec::new, |round| round.series.clone()),
            rounds,
        }
    }
}

impl<T> Variants<T> {
    fn named(&self) -> [(&'static str, &T); 3] {
        [
            ("window only", &self.window_only),
            ("backpressure", &self.backpressure),
            ("full", &self.full),
        ]
    }
}

impl Ratios {
    fn new(variants: &Variants<Variant>) -> Self {
        let (window, full) = (&variants.window_only, &variants.full);
        Self {
            p9999_window_over_full: window.p9999_us / full.p9999_us.max(1.0),
            lm_time_full_over_window: full.lm_seconds / window.lm_seconds.max(1e-3),
        }
    }
}

impl Noise {
    fn new(variants: &Variants<Variant>) -> Self {
        let rounds = variants.named().map(|(_, variant)| &variant.rounds);
        let quiet = rounds.iter().flat_map(|rounds| rounds.iter());
        let worst = quiet.map(|round| round.before.p9999_us).max().unwrap_or(0);
        Self {
            worst_quiet_p9999_us: worst,
            noisy: worst as f64 > variants.window_only.p9999_us * NOISY,
        }
    }
}

impl Report {
    fn print(&self) {
        println!("medians:");
        for (name, variant) in self.variants.named() {
            println!(
                "{name:<14} {:>8.1} {:>7.0} {:>9.0} {:>9.0} {:>9.0} {:>10.0} {:>9.0}",
                variant.lm_seconds,
                variant.pauses,
                variant.guest_iops,
                variant.p50_us,
                variant.p99_us,
                variant.p9999_us,
                variant.max_us
            );
        }
        println!(
            "p99.99, window only / full: {:.2}\nLM time, full / window only: {:.2}",
            self.ratios.p9999_window_over_full, self.ratios.lm_time_full_over_window
        );
        if self.noise.noisy {
            println!(
                "NOISY: with no migration the guest's p99.99 reached {} µs, more than half of what \
                 the window alone made of it. The ratios say little; repeat on a quieter machine.",
                self.noise.worst_quiet_p9999_us
            );
        }
    }

    fn chart(&self) -> Chart {
        let line = |(name, variant): (&str, &Variant)| Line {
            name: name.to_owned(),
            points: points(&variant.series),
        };
        let full = self.variants.full.rounds.first();
        let limit = full.and_then(|round| round.promise["limit_us"].as_f64());
        Chart {
            title: format!(
                "Guest latency while the disk moves; other traffic takes {} % of the link, {} % \
                 where shaded",
                self.scene.usual_percent, self.scene.crowded_percent
            ),
            x_label: "seconds since the link became crowded".to_owned(),
            y_label: "p99.99 of each second, ms".to_owned(),
            logarithmic: true,
            lines: self.variants.named().into_iter().map(line).collect(),
            shaded: vec![0.0..self.scene.crowded_seconds as f64],
            level: limit.map(|limit| (limit / 1000.0, "the promise".to_owned())),
        }
    }
}

/// Returns the points of a line. Seconds without an answer have no percentile.
fn points(series: &[Point]) -> Vec<(f64, f64)> {
    let answered = series.iter().filter(|point| point.iops > 0.0);
    answered
        .map(|point| (point.seconds, point.p9999_us as f64 / 1000.0))
        .collect()
}

fn mega(bytes: f64) -> f64 {
    bytes / 1e6
}

fn print_header() {
    println!(
        "{:<14} {:>8} {:>7} {:>9} {:>9} {:>9} {:>10} {:>9} {:>12} {:>12}",
        "",
        "LM s",
        "pauses",
        "IOPS",
        "p50 µs",
        "p99 µs",
        "p99.99 µs",
        "max µs",
        "quiet p99.99",
        "crowd p99.99"
    );
}
