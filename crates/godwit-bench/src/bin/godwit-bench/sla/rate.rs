//! The fastest flush rate of delayed writes that the guest does not notice.

use std::io;

use godwit_bench::chart::{Chart, Line};
use godwit_testkit::fio::Window;
use godwit_testkit::report::write_report_as;
use serde::Serialize;
use serde_json::Value;

use crate::sla::scene::SceneOptions;
use crate::sla::stage::Stage;

#[derive(Debug, Serialize)]
struct Report {
    scene: SceneOptions,
    rates: Vec<Rate>,
}

#[derive(Debug, Serialize)]
struct Rate {
    /// `--delayed-write-rate` in MB/s.
    delayed_write_rate: u64,
    p9999_us: u64,
    /// Bytes of the disk per second of migration, in MB/s.
    lm_throughput: f64,
    lm_seconds: f64,
    pauses: u64,
    promise: Value,
    during: Window,
}

/// Runs the full design once for each rate.
pub(crate) fn run(scene: &SceneOptions, rates: &[u64]) -> io::Result<()> {
    let stage = Stage::crowded(scene)?;
    println!(
        "{:<10} {:>10} {:>12} {:>8} {:>7}",
        "rate MB/s", "p99.99 µs", "LM MB/s", "LM s", "pauses"
    );
    let mut measured = Vec::new();
    for rate in rates {
        let bytes = (rate * 1_000_000).to_string();
        let options = ["--sla", &scene.sla, "--delayed-write-rate", &bytes];
        let run = stage.run(&format!("rate-{rate}"), &options)?;
        let (during, lm_seconds) = (run.during(), run.lm_seconds());
        let row = Rate {
            delayed_write_rate: *rate,
            p9999_us: during.p9999_us,
            lm_throughput: scene.image_bytes() as f64 / 1e6 / lm_seconds.max(1e-3),
            lm_seconds,
            pauses: run.pauses(),
            promise: run.promise().clone(),
            during,
        };
        println!(
            "{rate:<10} {:>10} {:>12.1} {:>8.1} {:>7}",
            row.p9999_us, row.lm_throughput, row.lm_seconds, row.pauses
        );
        measured.push(row);
    }
    let report = Report {
        scene: scene.clone(),
        rates: measured,
    };
    let path = write_report_as("bench-sla", "rate.json", &report)?;
    let picture = path.with_file_name("rate.svg");
    report.chart().write(&picture)?;
    println!("{}\n{}", path.display(), picture.display());
    Ok(())
}

impl Report {
    fn chart(&self) -> Chart {
        let line = |name: &str, value: fn(&Rate) -> f64| Line {
            name: name.to_owned(),
            points: self
                .rates
                .iter()
                .map(|rate| (rate.delayed_write_rate as f64, value(rate)))
                .collect(),
        };
        Chart {
            title: "What the rate of delayed writes costs".to_owned(),
            x_label: "delayed writes at most, MB/s".to_owned(),
            y_label: "ms; MB/s".to_owned(),
            logarithmic: false,
            lines: vec![
                line("guest p99.99, ms", |rate| rate.p9999_us as f64 / 1000.0),
                line("migration, MB/s", |rate| rate.lm_throughput),
            ],
            shaded: Vec::new(),
            level: None,
        }
    }
}
