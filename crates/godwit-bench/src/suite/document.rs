//! `docs/benchmarks.md`: the reports as a document, with every table and plot from one run. A long benchmark can be
//! measured in parts. Each part counts, or does not, alone.

use std::io;
use std::path::{Path, PathBuf};

use godwit_testkit::report::{Report, Runs, markdown, number};
use serde_json::Value;

use crate::common::chart::{Chart, Line};

/// Workload of the plots over rates.
const WORKLOAD: &str = "randwrite";
/// Rate of the plots over time, beside full speed.
const PACED: f64 = 40.0;

/// Writes the document and its plots.
pub(crate) fn write(paths: &[PathBuf], out: &Path) -> io::Result<()> {
    let runs = read(paths)?;
    let pictures = out.join("benchmarks");
    std::fs::create_dir_all(&pictures)?;
    let charts = charts(&runs);
    for (file, chart) in &charts {
        chart.write(&pictures.join(file))?;
    }
    let path = out.join("benchmarks.md");
    std::fs::write(&path, text(&runs, &charts))?;
    println!("{}", path.display());
    Ok(())
}

/// Reads runs that count, from one machine with the same programs, without overlapping measurements.
fn read(paths: &[PathBuf]) -> io::Result<Vec<Report>> {
    let reports = paths.iter().map(|path| Report::read(path));
    let reports = reports.collect::<io::Result<Vec<_>>>()?;
    let mut taken: Vec<(String, &Path)> = Vec::new();
    for (path, report) in paths.iter().zip(&reports) {
        let first = &reports[0];
        if report.header.environment != first.header.environment
            || report.known("extent") != first.known("extent")
        {
            return Err(io::Error::other(format!(
                "{} and {} are not of one machine with the same programs, or one is of a quick run and the other of a \
                 full one: their numbers do not belong together",
                paths[0].display(),
                path.display()
            )));
        }
        for measured in measured(report) {
            if let Some((_, first)) = taken.iter().find(|(name, _)| *name == measured) {
                return Err(io::Error::other(format!(
                    "{} and {} both measured {measured}: leave one of them out",
                    first.display(),
                    path.display()
                )));
            }
            taken.push((measured, path));
        }
    }
    match reports.is_empty() {
        true => Err(io::Error::other("no report")),
        false => Ok(reports),
    }
}

/// Returns the names of a report's measurements, which must be unique across reports.
fn measured(report: &Report) -> Vec<String> {
    let cases = report.runs("migrate").groups(&["case"]);
    let cases = cases.iter().map(|case| text_of(case, "case"));
    let others = report
        .tables
        .iter()
        .filter(|table| table.name != "migrate" && !table.runs.is_empty());
    cases
        .chain(others.map(|table| format!("scene {}", table.name)))
        .collect()
}

fn text_of(runs: &Runs<'_>, field: &str) -> String {
    runs.first(field).as_str().unwrap_or_default().to_owned()
}

/// Returns all measurements as one report, without the noise of the later runs.
fn joined(runs: &[Report]) -> Report {
    let mut joined = runs[0].clone();
    for report in &runs[1..] {
        for table in &report.tables {
            match joined.tables.iter_mut().find(|one| one.name == table.name) {
                Some(one) => {
                    one.runs.extend(table.runs.iter().cloned());
                    one.medians.extend(table.medians.iter().cloned());
                }
                None => joined.tables.push(table.clone()),
            }
        }
        joined.targets.extend(report.targets.iter().cloned());
        if let Some(left_out) = joined
            .facts
            .get_mut("left_out")
            .and_then(Value::as_array_mut)
        {
            let others = report.known("left_out");
            left_out.retain(|scene| others.as_array().is_some_and(|all| all.contains(scene)));
        }
    }
    joined
}

fn text(runs: &[Report], charts: &[(String, Chart)]) -> String {
    let report = joined(runs);
    let mut text = introduction(&report, runs);
    for table in report.tables.iter().filter(|table| !table.runs.is_empty()) {
        text += &format!(
            "\n## {}\n\n{}\n\n{}",
            table.name,
            table.about,
            table.markdown()
        );
        if table.name == "migrate" {
            for (file, chart) in charts {
                text += &format!("\n![{}](benchmarks/{file})\n", chart.title);
            }
        }
    }
    let held = report.targets.iter().filter(|target| target.holds).count();
    let rows = report.targets.iter().map(|target| {
        let measured = match (target.measured, &target.reason) {
            (Some(measured), _) => number(measured),
            (None, reason) => format!(
                "not measured: {}",
                reason.as_deref().unwrap_or("no reason given")
            ),
        };
        let word = if target.holds { "yes" } else { "**no**" };
        vec![
            target.name.clone(),
            number(target.goal),
            measured,
            word.to_owned(),
        ]
    });
    let headings = ["", "goal", "measured", "holds"].map(str::to_owned);
    text + &format!(
        "\n## Targets\n\n{held} of {} hold.\n\n{}",
        report.targets.len(),
        markdown(&headings, &rows.collect::<Vec<_>>(), 1)
    )
}

fn introduction(report: &Report, runs: &[Report]) -> String {
    let environment = &report.header.environment;
    let extent = report.known("extent").as_str().unwrap_or_default();
    let command = match extent {
        "full" => "make bench SCENE=full",
        _ => "make bench",
    };
    let made = match runs.len() {
        1 => format!(
            "one {extent} run (`{command}`): every number below is from that run, in which all took turns on the same \
             machine. Compare them with each other, not with those of other runs."
        ),
        count => format!(
            "{count} {extent} runs, each of a part of the suite (`{command}`), one after the other on the same machine. \
             Every case is from one run, in which all that it compares took turns: compare numbers of one case."
        ),
    };
    let programs = environment
        .programs
        .iter()
        .map(|program| format!("- {}\n", program.version));
    let left_out: Vec<&str> = report
        .known("left_out")
        .as_array()
        .map_or_else(Vec::new, |scenes| {
            scenes.iter().filter_map(|scene| scene.as_str()).collect()
        });
    let left_out = match left_out.as_slice() {
        [] => String::new(),
        scenes => format!("Not measured: {}.\n\n", scenes.join(", ")),
    };
    // The suffix of the version is a distribution's or a cloud's own.
    let kernel = environment.kernel.split('-').next().unwrap_or_default();
    format!(
        "# Benchmarks\n\nMade by `godwit-bench document` from {made} What they mean and when a run counts: \
         [bench/README.md](../bench/README.md). A figure before and during a move is written before → during.\n\n\
         {} cores ({}), {:.0} GiB of memory, Linux {kernel}, images on {}, everything on one machine: source, destination \
         and guest share its cores and its disk.\n\n{}\n{left_out}Noise, run by run:\n\n{}",
        environment.cores,
        environment.cpu,
        environment.memory_bytes as f64 / f64::from(1 << 30),
        environment.file_system,
        programs.collect::<String>(),
        runs.iter().map(noise).collect::<String>(),
    )
}

/// Describes the noise of a run.
fn noise(report: &Report) -> String {
    let restless = report.tables.iter().flat_map(|table| &table.runs);
    let restless = restless.filter(|run| run["disk_at_rest"] == false).count();
    let rest = match report.known("settle_seconds").as_u64() {
        None | Some(0) => String::new(),
        Some(seconds) => format!(
            " Before each move the suite waited up to {seconds} s for the disk to be at rest; {restless} moves began \
             although it was not."
        ),
    };
    let noise = report.known("noise");
    format!(
        "- {} ({}, commit {}): a hypervisor took {:.1} % of the CPU time; {} of {} cells are noisy.{rest}\n",
        measured(report).join("; "),
        report.header.date,
        report.header.commit,
        noise["stolen"].as_f64().unwrap_or_default() * 100.0,
        noise["noisy_cells"],
        noise["cells"],
    )
}

/// Returns every plot with enough numbers, each from one run, under its file name.
fn charts(runs: &[Report]) -> Vec<(String, Chart)> {
    let over_time = runs
        .iter()
        .flat_map(|run| latency_over_time(&run.runs("migrate")));
    let mut charts: Vec<(String, Chart)> = over_time.collect();
    let usual = runs.iter().map(|run| comparable(&run.runs("migrate")));
    let Some(most) = usual.max_by_key(|runs| runs.0.len()) else {
        return charts;
    };
    let figures = [
        ("lm-time.svg", "Time of a move", "seconds", "lm_seconds"),
        (
            "cpu-per-gb.svg",
            "CPU time of a move",
            "CPU seconds per GB of the image",
            "cpu_seconds_per_gb",
        ),
    ];
    for (file, title, unit, figure) in figures {
        let converged = most.filter(|run| run["converged"] == true);
        let lines = Line::over(&converged, "mover", "rate_mbps", figure);
        // A single rate is no axis.
        if lines.iter().any(|line| line.points.len() > 1) {
            let title = format!("{title}, where it converged: random writes, uncapped link");
            let chart = Chart::new(&title, "MB/s that the guest writes", unit, lines);
            charts.push((file.to_owned(), chart));
        }
    }
    charts
}

/// Returns one plot for each paced or unpaced case, one line for each mover.
fn latency_over_time(runs: &Runs<'_>) -> Vec<(String, Chart)> {
    let drawn = runs.filter(|run| run["rate_mbps"] == PACED || run["rate_mbps"].is_null());
    let picture = |case: &Runs<'_>| {
        let movers = case.groups(&["mover"]);
        let lines = movers.iter().map(|runs| Line {
            name: text_of(runs, "mover"),
            points: runs.middle("seconds").map_or_else(Vec::new, points),
        });
        let name = text_of(case, "case");
        let title = format!("Guest latency while the disk moves: {name}");
        let y = "longest latency in each quarter of a second, ms";
        let chart = Chart::new(&title, "seconds since the command", y, lines.collect());
        (
            format!("latency-{}.svg", file_name(&name)),
            chart.logarithmic(),
        )
    };
    drawn.groups(&["case"]).iter().map(picture).collect()
}

/// Returns the points of a line. A quarter of a second without an answer has no latency.
fn points(run: &Value) -> Vec<(f64, f64)> {
    let series = run["series"].as_array().into_iter().flatten();
    let answered = series.filter(|point| point["mbps"].as_f64() > Some(0.0));
    answered
        .filter_map(|point| {
            Some((
                point["seconds"].as_f64()?,
                point["max_us"].as_f64()? / 1000.0,
            ))
        })
        .collect()
}

/// Returns the runs that differ only in rate and mover.
fn comparable<'a>(runs: &Runs<'a>) -> Runs<'a> {
    runs.filter(|run| {
        run["workload"] == WORKLOAD
            && run["link_gbps"].is_null()
            && run["destination_in_memory"] == false
            && run["files"] == false
    })
}

fn file_name(case: &str) -> String {
    let words = case.split(|letter: char| !letter.is_alphanumeric());
    let words = words.filter(|word| !word.is_empty());
    words.collect::<Vec<_>>().join("-").to_lowercase()
}

#[cfg(test)]
mod tests {
    use godwit_testkit::report::{Header, Table};
    use serde_json::json;

    use super::*;

    /// Returns a report that counts, of randwrite at a rate.
    fn report(rate: f64) -> Report {
        let mut report = Report::of(Header::default(), Path::new("report.json"));
        report.complete = true;
        report.fact("extent", "quick");
        report.fact("settle_seconds", 0);
        report.fact("left_out", vec!["steady", "vm"]);
        let mut table = Table::new("migrate", "case, mover", "lm_seconds s", "");
        table.runs.push(json!({
            "case": format!("randwrite {rate} MB/s, uncapped"), "mover": "godwit", "workload": "randwrite",
            "rate_mbps": rate, "link_gbps": null, "destination_in_memory": false, "files": false, "converged": true,
            "lm_seconds": 2.0, "seconds": 2.0, "series": [{"seconds": 0.0, "mbps": 40.0, "max_us": 900}],
        }));
        report.tables.push(table);
        report
    }

    /// Writes the reports to files and reads them back.
    fn runs(reports: &[Report]) -> io::Result<Vec<Report>> {
        let dir = tempfile::tempdir()?;
        let write = |(index, report): (usize, &Report)| {
            let path = dir.path().join(format!("{index}.json"));
            std::fs::write(&path, serde_json::to_vec(report)?)?;
            Ok(path)
        };
        let paths = reports.iter().enumerate().map(write);
        read(&paths.collect::<io::Result<Vec<_>>>()?)
    }

    #[test]
    fn parts_of_one_machine_become_one_document() {
        let mut vm_too = report(80.0);
        vm_too.fact("left_out", vec!["steady"]);
        let runs = runs(&[report(40.0), vm_too]).unwrap();
        assert_eq!(joined(&runs).runs("migrate").0.len(), 2);
        let charts = charts(&runs);
        let text = text(&runs, &charts);
        assert!(
            text.contains("Not measured: steady.\n") && text.contains("## migrate"),
            "{text}"
        );
        assert!(
            text.contains("](benchmarks/latency-randwrite-40-mb-s-uncapped.svg)"),
            "{text}"
        );
    }

    #[test]
    fn reports_that_do_not_belong_together_are_refused() {
        let refused = |reports: &[Report]| runs(reports).unwrap_err().to_string();
        assert!(refused(&[]).contains("no report"));
        let same = refused(&[report(40.0), report(80.0), report(40.0)]);
        assert!(same.contains("both measured randwrite 40 MB/s") && same.contains("0.json"));
        let mut other = report(80.0);
        other.header.environment.cores += 1;
        assert!(refused(&[report(40.0), other]).contains("not of one machine"));
        let mut full = report(80.0);
        full.fact("extent", "full");
        assert!(refused(&[report(40.0), full]).contains("quick"));
        let mut noisy = report(80.0);
        noisy.refused = Some("too noisy".to_owned());
        assert!(refused(&[report(40.0), noisy]).contains("1.json: does not count: too noisy"));
    }

    #[test]
    fn a_picture_over_rates_has_one_link_workload_and_destination() {
        let usual = &report(40.0).tables[0].runs[0];
        for (field, value) in [
            ("destination_in_memory", json!(true)),
            ("link_gbps", json!(1.0)),
            ("workload", json!("zipf")),
        ] {
            let mut other = usual.clone();
            other[field] = value;
            assert!(comparable(&Runs(vec![&other])).0.is_empty(), "{field}");
        }
        assert_eq!(comparable(&Runs(vec![usual])).0.len(), 1);
        assert_eq!(file_name("zipf 40 MB/s, 1 Gb/s"), "zipf-40-mb-s-1-gb-s");
    }
}
