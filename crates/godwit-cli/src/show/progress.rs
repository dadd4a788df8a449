//! The progress line of a migration or copy.

use std::ffi::OsString;
use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use godwit_api::{Direction, GuestLatency, Job, JobKind, Migration, MigrationPhase};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::show::line::{Line, Matters};
use crate::show::output::Output;
use crate::show::promise::{counted, obstacle, reason_text};
use godwit_api::text::{format_bytes, format_micros, format_rate, format_seconds};

/// Interval of lines if the terminal cannot redraw a line.
const PLAIN_INTERVAL: Duration = Duration::from_secs(1);

/// Interval of identical lines.
const SAME_INTERVAL: Duration = Duration::from_secs(30);

/// Columns of a terminal of unknown width.
const USUAL_COLUMNS: usize = 80;
/// Columns of the percentage, such as `100% `.
const SHARE_COLUMNS: usize = 5;

/// The progress of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Status {
    /// Text to show.
    pub line: Line,
    /// Bytes done and total bytes, if meaningful.
    pub done: Option<(u64, u64)>,
    /// A note for the user's attention, in a line of its own.
    pub note: Option<String>,
}

/// A progress display on standard error: redrawn in place on a terminal, otherwise printed once a second and at every
/// new step.
#[derive(Debug)]
pub(crate) struct ProgressLine {
    bar: Option<ProgressBar>,
    output: Output,
    printed: Option<Instant>,
    /// Text of the last line.
    said: String,
    step: String,
    note: Option<String>,
}

impl ProgressLine {
    /// Creates a progress line on standard error, beside a result on standard output.
    pub(crate) fn new(output: Output) -> Self {
        let redraws = std::io::stderr().is_terminal() && can_redraw(std::env::var_os("TERM"));
        let bar = redraws.then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
            bar.set_style(spinner_style());
            bar
        });
        Self {
            bar,
            output,
            printed: None,
            said: String::new(),
            step: String::new(),
            note: None,
        }
    }

    /// Shows the status. A new `step` is shown at once. A new note is printed once.
    pub(crate) fn show(&mut self, step: &str, status: &Status) {
        if status.note != self.note {
            if let Some(note) = &status.note {
                self.say(note);
            }
            self.note.clone_from(&status.note);
        }
        let Some(bar) = &self.bar else {
            let line = status.line.to_string();
            let pause = match line == self.said {
                true => SAME_INTERVAL,
                false => PLAIN_INTERVAL,
            };
            let due = self.printed.is_none_or(|at| at.elapsed() >= pause);
            if due || step != self.step {
                self.output.say(&line);
                self.printed = Some(Instant::now());
                self.said = line;
                step.clone_into(&mut self.step);
            }
            return;
        };
        let columns = columns();
        let text = match status.done {
            Some((done, total)) if total > 0 => {
                let (length, text) = beside_bar(&status.line, columns);
                bar.set_style(bar_style(length));
                bar.set_length(total);
                bar.set_position(done.min(total));
                text
            }
            _ => {
                bar.set_style(spinner_style());
                status.line.within(columns.saturating_sub(2))
            }
        };
        bar.set_message(text);
        bar.tick();
    }

    /// Prints a message beside the line.
    pub(crate) fn say(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| eprintln!("{text}")),
            None => self.output.say(text),
        }
    }

    /// Removes the line.
    pub(crate) fn clear(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Returns true if a terminal of this name can move its cursor. A terminal without a name counts as able.
fn can_redraw(term: Option<OsString>) -> bool {
    term.is_none_or(|term| term != "dumb")
}

/// Returns the width of the terminal at standard error.
fn columns() -> usize {
    match rustix::termios::tcgetwinsize(std::io::stderr()) {
        Ok(size) if size.ws_col > 0 => size.ws_col.into(),
        _ => USUAL_COLUMNS,
    }
}

/// Returns the length of the bar, and the text beside the bar and the percentage. The bar shrinks in favour of text
/// shown at any width.
fn beside_bar(line: &Line, columns: usize) -> (usize, String) {
    let length = match columns {
        100.. => 20,
        60.. => 10,
        _ => 0,
    };
    let beside = |length: usize| {
        let bar = if length > 0 { length + 3 } else { 0 };
        columns.saturating_sub(SHARE_COLUMNS + bar)
    };
    let length = if line.least() > beside(length) {
        0
    } else {
        length
    };
    (length, line.within(beside(length)))
}

// The templates differ in a number only; an invalid template would show the library's default bar.
fn bar_style(length: usize) -> ProgressStyle {
    let bar = match length {
        0 => String::new(),
        length => format!("[{{bar:{length}}}] "),
    };
    ProgressStyle::with_template(&format!("{bar}{{percent:>3}}% {{wide_msg}}"))
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("=> ")
}

fn spinner_style() -> ProgressStyle {
    ProgressStyle::with_template("{spinner} {wide_msg}")
        .unwrap_or_else(|_| ProgressStyle::default_spinner())
}

/// Returns a migration's status: phase, bytes left, rate, time left, and the guest's latency.
pub(crate) fn migration_status(migration: &Migration) -> Status {
    status_of(&migration.disk, migration)
}

/// Returns a migration's status under another name than the disk's.
pub(crate) fn status_of(name: &str, migration: &Migration) -> Status {
    let passes = matches!(
        migration.phase,
        MigrationPhase::Copying | MigrationPhase::Verifying
    );
    let progress = &migration.progress;
    let (phase, peer) = phase_text(migration);
    let mut line = Line::default().then_or(&[
        (Matters::Step, phase.to_owned()),
        (Matters::Names, format!("{name}: {phase} {peer}")),
    ]);
    let promise = migration.promise.as_ref();
    if let Some(reason) = promise.and_then(|promise| promise.paused) {
        line = line.then_or(&[
            (Matters::Trouble, "paused".to_owned()),
            (Matters::Left, format!("paused ({})", reason_text(reason))),
        ]);
    }
    if passes && progress.bytes_total > 0 {
        let left = format_bytes(progress.bytes_total.saturating_sub(progress.bytes_done));
        let total = format_bytes(progress.bytes_total);
        line = line.then_or(&[
            (Matters::Left, format!("{left} left")),
            (Matters::Rest, format!("{left} of {total} left")),
        ]);
        if let Some(rate) = migration.rate_bytes_per_second {
            line = line.then(Matters::Always, format_rate(rate));
        }
        let eta = migration
            .eta_seconds
            .map_or("unknown".to_owned(), format_seconds);
        line = line.then(Matters::Always, format!("ETA {eta}"));
        let pauses = promise.map_or(0, |promise| promise.pauses.total());
        if pauses > 0 {
            line = line.then(Matters::Rest, counted(pauses, "pause"));
        }
    }
    if let Some(guest) = migration.guest.as_ref().filter(|guest| guest.iops > 0.0) {
        line = line.then_or(&guest_text(guest));
    }
    if promise.is_some_and(|promise| promise.obstacle.is_some()) {
        line = line.then(Matters::Trouble, "no end in sight");
    }
    let done = passes.then_some((progress.bytes_done, progress.bytes_total));
    Status {
        line,
        done,
        note: obstacle(migration).map(|text| format!("{}: {text}", migration.disk)),
    }
}

/// Returns the guest's latency: `guest p99 180 µs, p99.99 1.2 ms`.
fn guest_text(guest: &GuestLatency) -> [(Matters, String); 3] {
    let p99 = format!("p99 {}", format_micros(guest.p99_us));
    let p9999 = format!("p99.99 {}", format_micros(guest.p9999_us));
    [
        (Matters::Always, p99.clone()),
        (Matters::Names, format!("guest {p99}")),
        (Matters::Detail, format!("guest {p99}, {p9999}")),
    ]
}

/// Returns the current activity, and the other node.
fn phase_text(migration: &Migration) -> (&'static str, String) {
    let Migration { from, to, .. } = migration;
    match (migration.phase, migration.direction) {
        (MigrationPhase::Offering, _) => ("asking", format!("{to} to take it")),
        (MigrationPhase::Receiving, _) => ("receiving", format!("from {from}")),
        (MigrationPhase::Verifying, _) => ("comparing", format!("with {to}")),
        (MigrationPhase::Converged, Direction::Outgoing) => (
            "waiting for the machine",
            format!("to start at {to}, which has everything"),
        ),
        (MigrationPhase::Following, Direction::Outgoing) => {
            ("protected", format!("by {to}, which has every write"))
        }
        (MigrationPhase::Draining, _) => (
            "finishing the guest's requests",
            format!("before {to} goes on"),
        ),
        (
            MigrationPhase::Preparing
            | MigrationPhase::Accepted
            | MigrationPhase::Relinquishing
            | MigrationPhase::Committing,
            Direction::Outgoing,
        ) => ("handing over", format!("to {to}")),
        (phase, Direction::Outgoing) => (phase.name(), format!("to {to}")),
        (
            MigrationPhase::Preparing
            | MigrationPhase::Accepted
            | MigrationPhase::Relinquishing
            | MigrationPhase::Committing,
            Direction::Incoming,
        ) => ("taking over", format!("from {from}")),
        (phase, Direction::Incoming) => (phase.name(), format!("from {from}")),
    }
}

/// Returns the status of an import or export.
pub(crate) fn job_status(job: &Job, elapsed: Duration) -> Status {
    let action = match job.kind {
        JobKind::Import => "importing",
        JobKind::Export => "exporting",
    };
    let left = job.bytes_total.saturating_sub(job.bytes_done);
    let rate = job.bytes_done as f64 / elapsed.as_secs_f64().max(0.001);
    let (left, total) = (format_bytes(left), format_bytes(job.bytes_total));
    let line = Line::default()
        .then_or(&[
            (Matters::Step, action.to_owned()),
            (Matters::Names, format!("{}: {action}", job.disk)),
        ])
        .then_or(&[
            (Matters::Always, format!("{left} left")),
            (Matters::Rest, format!("{left} of {total} left")),
        ])
        .then(Matters::Always, format_rate(rate));
    Status {
        line,
        done: Some((job.bytes_done, job.bytes_total)),
        note: None,
    }
}

#[cfg(test)]
mod tests {
    use godwit_api::{
        JobState, MigrationProgress, MigrationPromise, Obstacle, PauseReason, Pauses,
    };

    use super::*;
    use crate::fixture;

    fn copying() -> Migration {
        Migration {
            progress: MigrationProgress {
                bytes_total: 2 << 30,
                bytes_done: 1 << 29,
                ..MigrationProgress::default()
            },
            rate_bytes_per_second: Some(512.0 * 1048576.0),
            eta_seconds: Some(3.0),
            guest: Some(GuestLatency {
                p50_us: 90,
                p99_us: 180,
                p9999_us: 1200,
                max_us: 2000,
                iops: 10_000.0,
            }),
            ..fixture::migration()
        }
    }

    #[test]
    fn a_copying_migration_shows_bytes_left_rate_eta_latency_and_phase() {
        let status = migration_status(&copying());
        assert_eq!(
            status.line.to_string(),
            "d: copying to b, 1.50 GiB of 2.00 GiB left, 512 MiB/s, ETA 3.0 s, \
             guest p99 180 µs, p99.99 1.2 ms"
        );
        assert_eq!(status.done, Some((1 << 29, 2 << 30)));
    }

    #[test]
    fn rate_time_left_and_p99_stay_on_a_narrow_terminal() {
        let mut migration = copying();
        migration.disk = "database-of-the-warehouse".to_owned();
        migration.rate_bytes_per_second = Some(1023.0 * 1048576.0);
        migration.eta_seconds = Some(23.0 * 3600.0 + 59.0 * 60.0);
        migration.promise = Some(MigrationPromise {
            paused: Some(PauseReason::InterfaceBudget),
            obstacle: Some(Obstacle::Promise),
            ..MigrationPromise::default()
        });
        let line = migration_status(&migration).line;
        for columns in [40, 60, 80, 120] {
            let (bar, text) = beside_bar(&line, columns);
            for promised in ["1023 MiB/s", "ETA 23h 59m", "p99 180 µs"] {
                assert!(text.contains(promised), "{columns}: {text}");
            }
            let around = if bar > 0 { bar + 3 } else { 0 };
            let taken = text.chars().count() + SHARE_COLUMNS + around;
            assert!(taken <= columns, "{taken} of {columns}: {text}");
        }
        let (bar, text) = beside_bar(&migration_status(&copying()).line, 80);
        let expected = "copying, 1.50 GiB left, 512 MiB/s, ETA 3.0 s, guest p99 180 µs";
        assert_eq!((bar, text.as_str()), (10, expected));
    }

    #[test]
    fn a_migration_that_pauses_says_why_and_how_often() {
        let mut migration = copying();
        migration.guest = None;
        migration.promise = Some(MigrationPromise {
            paused: Some(PauseReason::GuestLatency),
            pauses: Pauses {
                guest_latency: 10,
                link_queue: 2,
                interface_budget: 0,
            },
            ..MigrationPromise::default()
        });
        let status = migration_status(&migration);
        assert_eq!(
            status.line.to_string(),
            "d: copying to b, paused (guest latency), 1.50 GiB of 2.00 GiB left, 512 MiB/s, \
             ETA 3.0 s, 12 pauses"
        );
        assert_eq!(status.note, None);
    }

    #[test]
    fn a_migration_that_stands_still_says_what_to_change() {
        let mut migration = copying();
        migration.guest = None;
        migration.eta_seconds = None;
        migration.promise = Some(MigrationPromise {
            obstacle: Some(Obstacle::Promise),
            ..MigrationPromise::default()
        });
        let status = migration_status(&migration);
        let line = status.line.to_string();
        assert!(line.ends_with("ETA unknown, no end in sight"), "{line}");
        let note = status.note.unwrap();
        assert!(note.starts_with("d: ") && note.contains("--sla"), "{note}");
    }

    #[test]
    fn what_is_not_known_is_not_made_up() {
        let mut migration = copying();
        migration.rate_bytes_per_second = None;
        migration.eta_seconds = None;
        migration.guest = Some(GuestLatency::default());
        let line = migration_status(&migration).line.to_string();
        assert_eq!(
            line,
            "d: copying to b, 1.50 GiB of 2.00 GiB left, ETA unknown"
        );
    }

    #[test]
    fn a_switchover_shows_its_phase_without_bytes() {
        let mut migration = copying();
        migration.phase = MigrationPhase::Committing;
        migration.guest = None;
        let Status { line, done, note } = migration_status(&migration);
        assert_eq!(line.to_string(), "d: handing over to b");
        assert_eq!((done, note), (None, None));
        migration.phase = MigrationPhase::Offering;
        let line = migration_status(&migration).line.to_string();
        assert_eq!(line, "d: asking b to take it");
    }

    #[test]
    fn no_phase_is_shown_by_a_word_of_the_protocol() {
        for phase in [
            MigrationPhase::Draining,
            MigrationPhase::Preparing,
            MigrationPhase::Accepted,
            MigrationPhase::Relinquishing,
            MigrationPhase::Committing,
        ] {
            for direction in [Direction::Outgoing, Direction::Incoming] {
                let migration = Migration {
                    phase,
                    direction,
                    ..copying()
                };
                let line = migration_status(&migration).line.to_string();
                assert!(!line.contains(phase.name()), "{line}");
            }
        }
    }

    #[test]
    fn a_copy_shows_what_is_left() {
        let job = Job {
            id: "1".to_owned(),
            kind: JobKind::Import,
            disk: "d".to_owned(),
            path: "/x".to_owned(),
            state: JobState::Running,
            bytes_total: 4 << 20,
            bytes_done: 1 << 20,
            error: None,
        };
        let status = job_status(&job, Duration::from_secs(1));
        assert_eq!(
            status.line.to_string(),
            "d: importing, 3.00 MiB of 4.00 MiB left, 1.00 MiB/s"
        );
    }
}
