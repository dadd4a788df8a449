//! The line that shows how far a migration or copy is.

use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use godwit_node::api::{Direction, GuestLatency, Job, JobKind, Migration, MigrationPhase};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::promise::{counted, obstacle, reason_text};
use crate::units::{format_bytes, format_micros, format_rate, format_seconds};

/// Lines per second where no terminal can redraw one.
const PLAIN_INTERVAL: Duration = Duration::from_secs(1);

/// How far something is: a line, and the part done in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Status {
    /// What to show.
    pub line: String,
    /// Bytes done and bytes in all, while that means something.
    pub done: Option<(u64, u64)>,
    /// What somebody should look at, in a line of its own.
    pub note: Option<String>,
}

/// Shows a status on standard error: redrawn in place on a terminal, else as a line a second and
/// whenever the step changes.
#[derive(Debug)]
pub(crate) struct ProgressLine {
    bar: Option<ProgressBar>,
    printed: Option<Instant>,
    step: String,
    note: Option<String>,
}

impl ProgressLine {
    /// A line on standard error.
    pub(crate) fn new() -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
            bar.set_style(spinner_style());
            bar
        });
        Self {
            bar,
            printed: None,
            step: String::new(),
            note: None,
        }
    }

    /// Shows the status. `step` names what is being done: a new one is shown at once.
    /// So is a new note, once.
    pub(crate) fn show(&mut self, step: &str, status: &Status) {
        if status.note != self.note {
            if let Some(note) = &status.note {
                self.say(note);
            }
            self.note.clone_from(&status.note);
        }
        let Some(bar) = &self.bar else {
            let due = self.printed.is_none_or(|at| at.elapsed() >= PLAIN_INTERVAL);
            if due || step != self.step {
                eprintln!("{}", status.line);
                self.printed = Some(Instant::now());
                step.clone_into(&mut self.step);
            }
            return;
        };
        match status.done {
            Some((done, total)) if total > 0 => {
                bar.set_style(bar_style());
                bar.set_length(total);
                bar.set_position(done.min(total));
            }
            _ => bar.set_style(spinner_style()),
        }
        bar.set_message(status.line.clone());
        bar.tick();
    }

    /// Says something beside the line.
    pub(crate) fn say(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| eprintln!("{text}")),
            None => eprintln!("{text}"),
        }
    }

    /// Takes the line away.
    pub(crate) fn clear(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

// The templates are constants; one that did not parse would show the library's default bar.
fn bar_style() -> ProgressStyle {
    ProgressStyle::with_template("[{bar:20}] {percent:>3}% {wide_msg}")
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("=> ")
}

fn spinner_style() -> ProgressStyle {
    ProgressStyle::with_template("{spinner} {wide_msg}")
        .unwrap_or_else(|_| ProgressStyle::default_spinner())
}

/// How far a migration is: phase, bytes left, rate, time left, and what the guest feels.
pub(crate) fn migration_status(migration: &Migration) -> Status {
    let passes = matches!(
        migration.phase,
        MigrationPhase::Copying | MigrationPhase::Verifying
    );
    let progress = &migration.progress;
    let mut parts = vec![format!("{}: {}", migration.disk, phase_text(migration))];
    let promise = migration.promise.as_ref();
    if let Some(reason) = promise.and_then(|promise| promise.paused) {
        parts.push(format!("paused ({})", reason_text(reason)));
    }
    if passes && progress.bytes_total > 0 {
        let left = progress.bytes_total.saturating_sub(progress.bytes_done);
        let total = format_bytes(progress.bytes_total);
        parts.push(format!("{} of {total} left", format_bytes(left)));
        if let Some(rate) = migration.rate_bytes_per_second {
            parts.push(format_rate(rate));
        }
        let eta = migration
            .eta_seconds
            .map_or("unknown".to_owned(), format_seconds);
        parts.push(format!("ETA {eta}"));
        let pauses = promise.map_or(0, |promise| promise.pauses.total());
        if pauses > 0 {
            parts.push(counted(pauses, "pause"));
        }
    }
    if let Some(guest) = migration.guest.as_ref().filter(|guest| guest.iops > 0.0) {
        parts.push(guest_text(guest));
    }
    if promise.is_some_and(|promise| promise.obstacle.is_some()) {
        parts.push("no end in sight".to_owned());
    }
    let done = passes.then_some((progress.bytes_done, progress.bytes_total));
    Status {
        line: parts.join(", "),
        done,
        note: obstacle(migration).map(|text| format!("{}: {text}", migration.disk)),
    }
}

/// What the guest feels: `guest p99 180 µs, p99.99 1.2 ms`.
fn guest_text(guest: &GuestLatency) -> String {
    format!(
        "guest p99 {}, p99.99 {}",
        format_micros(guest.p99_us),
        format_micros(guest.p9999_us)
    )
}

fn phase_text(migration: &Migration) -> String {
    match (migration.phase, migration.direction) {
        (MigrationPhase::Offering, _) => format!("asking {} to take it", migration.to),
        (MigrationPhase::Receiving, _) => format!("receiving from {}", migration.from),
        (MigrationPhase::Verifying, _) => format!("comparing with {}", migration.to),
        (MigrationPhase::Converged, Direction::Outgoing) => {
            format!("{} has everything and waits for the machine", migration.to)
        }
        (phase, Direction::Outgoing) => format!("{} to {}", phase.name(), migration.to),
        (phase, Direction::Incoming) => format!("{} from {}", phase.name(), migration.from),
    }
}

/// How far an import or export is.
pub(crate) fn job_status(job: &Job, elapsed: Duration) -> Status {
    let action = match job.kind {
        JobKind::Import => "importing",
        JobKind::Export => "exporting",
    };
    let left = job.bytes_total.saturating_sub(job.bytes_done);
    let rate = job.bytes_done as f64 / elapsed.as_secs_f64().max(0.001);
    let line = format!(
        "{}: {action}, {} of {} left, {}",
        job.disk,
        format_bytes(left),
        format_bytes(job.bytes_total),
        format_rate(rate)
    );
    Status {
        line,
        done: Some((job.bytes_done, job.bytes_total)),
        note: None,
    }
}

#[cfg(test)]
mod tests {
    use godwit_node::api::{
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
            status.line,
            "d: copying to b, 1.50 GiB of 2.00 GiB left, 512 MiB/s, ETA 3.0 s, \
             guest p99 180 µs, p99.99 1.2 ms"
        );
        assert_eq!(status.done, Some((1 << 29, 2 << 30)));
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
            status.line,
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
        assert!(
            status.line.ends_with("ETA unknown, no end in sight"),
            "{}",
            status.line
        );
        let note = status.note.unwrap();
        assert!(note.starts_with("d: ") && note.contains("--sla"), "{note}");
    }

    #[test]
    fn what_is_not_known_is_not_made_up() {
        let mut migration = copying();
        migration.rate_bytes_per_second = None;
        migration.eta_seconds = None;
        migration.guest = Some(GuestLatency::default());
        let line = migration_status(&migration).line;
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
        let expected = Status {
            line: "d: committing to b".to_owned(),
            done: None,
            note: None,
        };
        assert_eq!(migration_status(&migration), expected);
        migration.phase = MigrationPhase::Offering;
        assert_eq!(migration_status(&migration).line, "d: asking b to take it");
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
            status.line,
            "d: importing, 3.00 MiB of 4.00 MiB left, 1.00 MiB/s"
        );
    }
}
