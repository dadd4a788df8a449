//! `docs/benchmarks.md`: the reports as a document, with every table and plot from one run.

use std::io;
use std::path::{Path, PathBuf};

use crate::options::Extent;
use crate::report::join::{self, Runs};
use crate::report::plots::{self, Plot};
use crate::report::{DiskLimit, Guest, Migrate, Report, Seen, Vm, VmSeen};
use crate::scenes::migrate::targets::case;

/// Writes the document and its plots.
///
/// # Errors
/// I/O errors of the files; a report that does not count or does not match the others.
pub(crate) fn write(reports: &[PathBuf], out: &Path) -> io::Result<()> {
    let runs = Runs::read(reports)?;
    let pictures = out.join("benchmarks");
    std::fs::create_dir_all(&pictures)?;
    let plots = plots::draw(runs.each(), &pictures)?;
    let path = out.join("benchmarks.md");
    std::fs::write(&path, text(&runs, &plots))?;
    println!("{}", path.display());
    Ok(())
}

fn text(runs: &Runs, plots: &[Plot]) -> String {
    let report = &runs.joined();
    let mut text = introduction(report, runs.each());
    if !report.migrate.is_empty() {
        text += &migrate(&report.migrate);
    }
    for plot in plots {
        text += &format!("\n![{}](benchmarks/{})\n", plot.title, plot.file);
    }
    if !report.disk_limit.is_empty() {
        text += &disk_limit(&report.disk_limit);
    }
    if !report.steady.is_empty() {
        text += &steady(report);
    }
    if !report.vm.is_empty() {
        text += &vm(&report.vm);
    }
    if let Some(copy) = &report.idle_copy {
        text += &format!(
            "\n## An idle disk\n\n{}{}",
            header(&["", "seconds"]),
            rows([
                vec!["godwit".to_owned(), number(copy.godwit_seconds, 2)],
                vec!["nbdcopy".to_owned(), number(copy.nbdcopy_seconds, 2)],
                vec![
                    "the slower of disk and loopback".to_owned(),
                    number(copy.limit_seconds, 2)
                ],
            ])
        );
    }
    text + &targets(report)
}

fn introduction(report: &Report, runs: &[Report]) -> String {
    let environment = &report.environment;
    let (extent, part, command) = match report.extent {
        Extent::Quick => ("quick", ", of a selection", "make bench"),
        Extent::Full => ("full", "", "make bench SCENE=full"),
    };
    let made = match runs.len() {
        1 => format!(
            "one {extent} run{part} (`{command}`): every number below is from that run, in \
             which all took turns on the same machine. Compare them with each other, not with those \
             of other runs."
        ),
        count => format!(
            "{count} {extent} runs, each of a part of the suite (`{command}`), one after the other on the same \
             machine. Every table is from one run, in which all that it compares took turns: compare \
             numbers of one table."
        ),
    };
    let programs: Vec<String> = environment
        .programs
        .iter()
        .map(|program| format!("- {}\n", program.version))
        .collect();
    let left_out = match report.left_out.as_slice() {
        [] => String::new(),
        scenes => format!("Not measured: {}.\n\n", scenes.join(", ")),
    };
    // The suffix of the version is a distribution's or a cloud's own.
    let kernel = environment.kernel.split('-').next().unwrap_or_default();
    format!(
        "# Benchmarks\n\n\
         Made by `godwit-bench document` from {made} What they mean and when a run counts: \
         [bench/README.md](../bench/README.md).\n\n\
         {} cores ({}), {:.0} GiB of memory, Linux {kernel}, images on {}, everything on one \
         machine: source, destination and guest share its cores and its disk.\n\n\
         {}\n\
         {left_out}\
         {}",
        environment.cores,
        environment.cpu,
        environment.memory_bytes as f64 / f64::from(1 << 30),
        environment.file_system,
        programs.concat(),
        noise(runs),
    )
}

/// Describes the noise of each run.
fn noise(runs: &[Report]) -> String {
    let of_run = |report: &Report| {
        let rest = match report.settle_seconds {
            0 => String::new(),
            seconds => format!(
                " Before each move the suite waited up to {seconds} s for the disk to be at rest; {} \
                 moves began although it was not.",
                report.restless()
            ),
        };
        format!(
            "a hypervisor took {:.1} % of the CPU time; {} of {} cells are noisy.{rest}\n",
            report.noise.stolen * 100.0,
            report.noise.noisy_cells,
            report.noise.cells,
        )
    };
    match runs {
        [one] => format!("Noise: {}", of_run(one)),
        runs => {
            let lines = runs.iter().map(|run| {
                let what = join::measured(run).join("; ");
                format!("- {what}: {}", of_run(run))
            });
            format!("Noise, run by run:\n\n{}", lines.collect::<String>())
        }
    }
}

fn migrate(cells: &[Migrate]) -> String {
    let mut text = "\n## A disk that moves while its guest works\n\n\
        Throughput in MB/s, latencies in milliseconds, before → during. A time in parentheses is \
        when a move was given up that had not converged, and was not repeated.\n"
        .to_owned();
    if cells.iter().any(|cell| cell.destination_in_memory) {
        text += "\nWhere it says so, the destination's disk is one in memory: what one machine has in \
            place of a second disk.\n";
    }
    if cells.iter().any(|cell| cell.files) {
        text += "\nWhere it says files, the disk is full of the files below /usr of the machine, and what the \
            guest writes compresses to half; everywhere else nothing makes the data shorter.\n";
    }
    let before_guest = ["", "rounds", "time, s", "wire, MB", "CPU s per GB"];
    let titles = [&before_guest[..], &GUEST, &["blackout, ms"]].concat();
    let heading = |cell: &Migrate| heading(&case(cell), cell.image_bytes);
    text += &tables(cells, heading, &titles, row);
    text
}

fn disk_limit(cells: &[DiskLimit]) -> String {
    let rate = cells.first().map_or(0.0, |cell| cell.rate_mbps);
    let size = cells.first().map_or(0, |cell| cell.image_bytes >> 20);
    let cells = cells.iter().map(|cell| {
        let mut columns = vec![
            cell.in_flight.to_string(),
            cell.rounds.len().to_string(),
            time(
                (Some(cell.copy_seconds), Some(cell.copy_seconds_spread)),
                cell.rounds.len(),
                0.0,
            ),
        ];
        columns.extend(guest(&cell.guest));
        columns
    });
    format!(
        "\n## What the disk allows without a mover\n\n\
         {size} MiB are copied from one image to another by nobody who computes, encrypts or sends \
         anything, so many pieces of 256 KiB at a time, beside random writes at {} MB/s to the one and \
         half of that to the other. Source and destination share the disk in every other scene, too, unless it says otherwise.\n\n{}{}",
        number(rate, 0),
        header(&[&["in flight", "rounds", "time, s"][..], &GUEST].concat()),
        rows(cells)
    )
}

fn heading(name: &str, image_bytes: u64) -> String {
    let mebibytes = image_bytes >> 20;
    format!("### {name}\n\n{mebibytes} MiB image")
}

/// Renders one table for each run of cells under the same heading.
fn tables<T>(
    cells: &[T],
    heading: impl Fn(&T) -> String,
    titles: &[&str],
    row: fn(&T) -> Vec<String>,
) -> String {
    let one = |cells: &[T]| {
        let heading = cells.first().map(&heading).unwrap_or_default();
        let rows = rows(cells.iter().map(row));
        format!("\n{heading}\n\n{}{rows}", header(titles))
    };
    cells
        .chunk_by(|one, two| heading(one) == heading(two))
        .map(one)
        .collect()
}

fn row(cell: &Migrate) -> Vec<String> {
    let gigabytes = cell.image_bytes as f64 / 1e9;
    let mut columns = vec![
        who(&cell.mover, cell.noisy),
        cell.rounds.len().to_string(),
        time(
            (cell.lm_seconds, cell.lm_seconds_spread),
            cell.rounds.len(),
            cell.limit_seconds,
        ),
        number(cell.wire_bytes / 1e6, 0),
        number(cell.cpu_seconds / gigabytes, 2),
    ];
    columns.extend(guest(&cell.guest));
    columns.push(
        cell.blackout_ms
            .map_or_else(|| "-".to_owned(), |ms| number(ms, 0)),
    );
    columns
}

/// Columns of [`guest`].
const GUEST: [&str; 6] = ["throughput", "p50", "p99", "p99.9", "p99.99", "longest"];

/// Returns throughput and latencies, before → during.
fn guest(guest: &Guest) -> [String; GUEST.len()] {
    let both = |pick: fn(&Seen) -> f64, digits| match (guest.before, guest.during) {
        (Some(before), Some(during)) => format!(
            "{} → {}",
            number(pick(&before), digits),
            number(pick(&during), digits)
        ),
        _ => "-".to_owned(),
    };
    [
        both(|seen| seen.mbps, 1),
        both(|seen| seen.p50_us / 1000.0, 2),
        both(|seen| seen.p99_us / 1000.0, 1),
        both(|seen| seen.p999_us / 1000.0, 1),
        both(|seen| seen.p9999_us / 1000.0, 1),
        both(|seen| seen.max_us / 1000.0, 0),
    ]
}

fn steady(report: &Report) -> String {
    let cells = report.steady.iter().map(|cell| {
        vec![
            cell.front_end.clone(),
            format!("{} of {} KiB", cell.rw, cell.bs >> 10),
            cell.depth.to_string(),
            cell.server.clone(),
            number(cell.iops, 0),
            number(cell.p50_us, 1),
            number(cell.cpu_seconds_per_mio, 2),
        ]
    });
    format!(
        "\n## A disk that does not move\n\n{}{}",
        header(&[
            "front end",
            "requests",
            "depth",
            "server",
            "IOPS",
            "p50, µs",
            "CPU s per million",
        ]),
        rows(cells)
    )
}

fn vm(cells: &[Vm]) -> String {
    let mut text = "\n## A machine that moves while its guest works\n\n\
        The guest runs on an emulated processor, so its own work is part of the CPU time. Throughput \
        in MB/s, latencies in milliseconds of the guest's clock, before → during. A time in \
        parentheses is when a move was given up that had not converged.\n"
        .to_owned();
    let titles = [
        "",
        "rounds",
        "time, s",
        "blackout, ms",
        "of it stopped, ms",
        "wire, MB",
        "throughput",
        "p50",
        "p99",
        "p99.9",
        "longest",
        "CPU s",
        "CPU s per second before",
    ];
    let heading = |cell: &Vm| {
        let load = crate::scenes::vm::load(cell.rate_mbps);
        heading(&load, cell.image_bytes)
    };
    text += &tables(cells, heading, &titles, vm_row);
    text
}

fn vm_row(cell: &Vm) -> Vec<String> {
    let both = |pick: fn(&VmSeen) -> f64, digits| {
        let guest = &cell.guest;
        format!(
            "{} → {}",
            number(pick(&guest.before), digits),
            number(pick(&guest.during), digits)
        )
    };
    let ms = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |ms| number(ms, 0));
    vec![
        who(&cell.mover, cell.noisy),
        cell.rounds.len().to_string(),
        time(
            (cell.lm_seconds, cell.lm_seconds_spread),
            cell.rounds.len(),
            cell.limit_seconds,
        ),
        ms(cell.blackout_ms),
        ms(cell.stopped_ms),
        number(cell.wire_bytes / 1e6, 0),
        both(|seen| seen.mbps, 2),
        both(|seen| seen.p50_us / 1000.0, 2),
        both(|seen| seen.p99_us / 1000.0, 1),
        both(|seen| seen.p999_us / 1000.0, 1),
        both(|seen| seen.max_us / 1000.0, 0),
        number(cell.cpu_seconds, 2),
        number(cell.cpu_before, 2),
    ]
}

fn who(mover: &str, noisy: bool) -> String {
    let word = if noisy { " (noisy)" } else { "" };
    format!("{mover}{word}")
}

/// Formats the time of a move, with its spread after more than one round. A move without a time shows its limit.
fn time((seconds, spread): (Option<f64>, Option<[f64; 2]>), rounds: usize, limit: f64) -> String {
    match (seconds, spread.filter(|_| rounds > 1)) {
        (Some(seconds), Some([least, most])) => format!(
            "{} ({}–{})",
            number(seconds, 2),
            number(least, 2),
            number(most, 2)
        ),
        (Some(seconds), None) => number(seconds, 2),
        (None, _) => format!("({limit:.0})"),
    }
}

fn targets(report: &Report) -> String {
    let met = report.targets.iter().filter(|target| target.met).count();
    let cells = report.targets.iter().map(|target| {
        let value = match (target.value, &target.reason) {
            (Some(value), _) => number(value, 3),
            (None, reason) => format!(
                "not measured: {}",
                reason.as_deref().unwrap_or("no reason given")
            ),
        };
        let word = if target.met { "yes" } else { "**no**" };
        vec![
            target.name.clone(),
            number(target.goal, 2),
            value,
            word.to_owned(),
        ]
    });
    format!(
        "\n## Targets\n\n{met} of {} met.\n\n{}{}",
        report.targets.len(),
        header(&["", "goal", "value", "met"]),
        rows(cells)
    )
}

fn header(names: &[&str]) -> String {
    let rule: Vec<&str> = names
        .iter()
        .enumerate()
        .map(|(index, _)| if index == 0 { "---" } else { "---:" })
        .collect();
    format!("| {} |\n| {} |\n", names.join(" | "), rule.join(" | "))
}

fn rows(rows: impl IntoIterator<Item = Vec<String>>) -> String {
    rows.into_iter()
        .map(|row| format!("| {} |\n", row.join(" | ")))
        .collect()
}

fn number(value: f64, digits: usize) -> String {
    format!("{value:.digits$}")
}
