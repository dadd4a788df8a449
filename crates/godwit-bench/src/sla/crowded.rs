//! The three ways to throttle a migration, side by side, on a crowded link; and the fastest flush rate of delayed
//! writes that the guest does not notice.

use std::io;

use godwit_testkit::fio::Window;
use godwit_testkit::report::{Report, Runs, add_fields};
use serde_json::{Value, json};

use super::scene::SceneOptions;
use super::stage::{Run, Stage};
use crate::common::chart::{Chart, Line};
use crate::common::in_turns;

/// Unit of the series, in ms.
const STEP: u64 = 1000;
/// Noise threshold: a quiet p99.99 above this fraction of the window-only p99.99 makes the ratios meaningless.
const NOISY: f64 = 0.5;
const WINDOW_ONLY: &str = "window only";
const FULL: &str = "full";

/// Runs every variant `rounds` times, in turns.
pub(super) fn compare(scene: &SceneOptions, rounds: usize) -> io::Result<()> {
    let mut report = super::report("report.json")?;
    report.fact("scene", json!(scene));
    let stage = Stage::crowded(scene)?;
    let keep = ["--sla", &scene.sla];
    let variants = [
        (WINDOW_ONLY, vec!["--sla", "off"]),
        (
            "backpressure",
            [&keep[..], &["--delayed-writes", "off"]].concat(),
        ),
        (FULL, keep.to_vec()),
    ];
    report.table("variants", "variant", FIGURES, "");
    in_turns(rounds, variants.len(), |number, turn| {
        let (name, options) = &variants[turn];
        let disk = format!("round-{number}-{}", name.replace(' ', "-"));
        let mut run = row(&stage.run(&disk, options)?);
        run["variant"] = (*name).into();
        report.add("variants", run)
    })?;
    ratios(&mut report);
    chart(&report.runs("variants"), scene).add(&mut report, "latency.svg")?;
    report.conclude()
}

const FIGURES: &str = "p9999_us µs, lm_seconds s, pauses, iops, p50_us µs, p99_us µs, max_us µs, p9999_us_before µs, \
    p9999_us_crowded µs, crowded_traffic B/s";

/// Returns a run: the guest's figures while the disk moved, before, while the link was crowded, and after.
fn row(run: &Run) -> Value {
    let crowding = run.crowding.as_ref();
    let zero = crowding.map_or(run.lm.start, |crowding| crowding.span.start);
    // Steps back in whole seconds, so that no point is half crowded.
    let first = zero - (zero - run.quiet.start) / STEP * STEP;
    let series = run.guest.windows(first, run.end, STEP);
    let series = series.iter().zip((first..).step_by(STEP as usize));
    // Seconds since the link became crowded, or since the start of the migration. Seconds without an answer have no
    // percentile.
    let points = series
        .filter(|(window, _)| window.iops > 0.0)
        .map(|(window, at)| {
            json!([
                (at as f64 - zero as f64) / 1000.0,
                window.p9999_us as f64 / 1000.0
            ])
        });
    let mut row = json!({
        "lm_seconds": run.lm_seconds(), "pauses": run.pauses(), "promise": run.promise(),
        "crowded_traffic": crowding.and_then(|crowding| crowding.rate), "series_ms": points.collect::<Value>(),
    });
    let crowded = crowding.map_or_else(Window::default, |crowding| {
        run.guest
            .window(crowding.span.start, crowding.span.end.min(run.lm.end))
    });
    add_fields(&mut row, &run.during(), "");
    add_fields(&mut row, &run.before(), "_before");
    add_fields(&mut row, &crowded, "_crowded");
    add_fields(&mut row, &run.guest.window(run.lm.end, run.end), "_after");
    row
}

/// Adds the ratios of the variants, and a warning if the machine was too busy for them.
fn ratios(report: &mut Report) {
    let runs = report.runs("variants");
    let (window, full) = (
        runs.only("variant", WINDOW_ONLY),
        runs.only("variant", FULL),
    );
    let of = |runs: &Runs<'_>, figure: &str| runs.median(figure).unwrap_or_default();
    let window_tail = of(&window, "p9999_us");
    let tail = window_tail / of(&full, "p9999_us").max(1.0);
    let time = of(&full, "lm_seconds") / of(&window, "lm_seconds").max(1e-3);
    let worst = runs.most("p9999_us_before").unwrap_or_default();
    let noisy = worst > window_tail * NOISY;
    report.fact("p9999_window_over_full", tail);
    report.fact("lm_time_full_over_window", time);
    report.fact("worst_quiet_p9999_us", worst);
    report.fact("noisy", noisy);
    if noisy {
        report.notes.push(format!(
            "NOISY: with no migration the guest's p99.99 reached {worst} µs, more than half of what the window alone made \
             of it. The ratios say little; repeat on a quieter machine."
        ));
    }
}

/// Returns a chart with each variant's round with the median p99.99.
fn chart(runs: &Runs<'_>, scene: &SceneOptions) -> Chart {
    let line = |variant: &Runs<'_>| {
        let middle = variant.middle("p9999_us").unwrap_or(&Value::Null);
        Line::of_pairs(
            variant.first("variant").as_str().unwrap_or_default(),
            &middle["series_ms"],
        )
    };
    let lines = runs.groups(&["variant"]).iter().map(line).collect();
    let limit = runs.only("variant", FULL).first("promise")["limit_us"].as_f64();
    let title = format!(
        "Guest latency while the disk moves; other traffic takes {} % of the link, {} % where shaded",
        scene.usual_percent, scene.crowded_percent
    );
    let x = "seconds since the link became crowded";
    let mut chart = Chart::new(&title, x, "p99.99 of each second, ms", lines).logarithmic();
    chart.shaded = vec![0.0..scene.crowded_seconds as f64];
    chart.level = limit.map(|limit| (limit / 1000.0, "the promise".to_owned()));
    chart
}

/// Runs the full design once for each rate in MB/s.
pub(super) fn rate(scene: &SceneOptions, rates: &[u64]) -> io::Result<()> {
    let mut report = super::report("rate.json")?;
    report.fact("scene", json!(scene));
    let stage = Stage::crowded(scene)?;
    let figures = "p9999_ms ms, lm_throughput MB/s, lm_seconds s, pauses";
    report.table("rates", "delayed_write_rate", figures, "");
    for rate in rates {
        let bytes = (rate * 1_000_000).to_string();
        let options = ["--sla", &scene.sla, "--delayed-write-rate", &bytes];
        let run = stage.run(&format!("rate-{rate}"), &options)?;
        let (during, lm_seconds) = (run.during(), run.lm_seconds());
        let mut row = json!({
            "delayed_write_rate": rate, "p9999_ms": during.p9999_us as f64 / 1000.0, "lm_seconds": lm_seconds,
            "lm_throughput": scene.image_bytes() as f64 / 1e6 / lm_seconds.max(1e-3),
            "pauses": run.pauses(), "promise": run.promise(),
        });
        add_fields(&mut row, &during, "");
        report.add("rates", row)?;
    }
    let runs = report.runs("rates");
    let figures = [
        ("guest p99.99, ms", "p9999_ms"),
        ("migration, MB/s", "lm_throughput"),
    ];
    let lines = figures.into_iter().flat_map(|(name, figure)| {
        let mut lines = Line::over(&runs, "", "delayed_write_rate", figure);
        lines
            .iter_mut()
            .for_each(|line| line.name = name.to_owned());
        lines
    });
    let title = "What the rate of delayed writes costs";
    let chart = Chart::new(
        title,
        "delayed writes at most, MB/s",
        "ms; MB/s",
        lines.collect(),
    );
    chart.add(&mut report, "rate.svg")?;
    report.conclude()
}
