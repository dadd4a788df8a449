//! Moves of processes and containers.

use godwit_api::text::format_bytes;
use godwit_api::{ProcessMigration, ProcessMigrationPhase, ProcessPartner};

use super::Moving;
use crate::failure::{EXIT_INTERRUPTED, EXIT_NOT_MOVED, Failure};
use crate::show::line::Line;
use crate::show::output::facts;
use crate::show::progress::Status;

/// Returns the name of the moving container or process.
fn name(seen: &ProcessMigration) -> String {
    match &seen.container {
        Some(container) => format!("container {container}"),
        None => format!("process {}", seen.pid),
    }
}

/// Returns a note about the move that this one waits for.
fn waits(seen: &ProcessMigration) -> Option<String> {
    let who = seen.waits_for.as_ref();
    who.map(|who| format!("waiting for {who}"))
}

impl Moving for ProcessMigration {
    fn status(&self) -> Status {
        let Self { to, .. } = self;
        let what = match self.phase {
            ProcessMigrationPhase::Waiting => waits(self)
                .unwrap_or_else(|| "looking whether another move is under way".to_owned()),
            ProcessMigrationPhase::PreCopy => format!(
                "copying its memory to {to} while it works, {} sent",
                format_bytes(self.image_bytes)
            ),
            ProcessMigrationPhase::PreSetup => format!("making what it needs ready at {to}"),
            ProcessMigrationPhase::Stopping => "waiting for requests in flight".to_owned(),
            ProcessMigrationPhase::Dumping => "making an image".to_owned(),
            ProcessMigrationPhase::Sending => {
                format!(
                    "sending the image to {to}, {} sent",
                    format_bytes(self.image_bytes)
                )
            }
            ProcessMigrationPhase::Restoring => format!("being restored at {to}"),
            ProcessMigrationPhase::InDoubt => {
                format!("in doubt: asking {to} whether it runs there")
            }
            ProcessMigrationPhase::Connecting => format!("connecting at {to}"),
            ProcessMigrationPhase::GoingBack => "going on where it is".to_owned(),
            ended => ended.name().to_owned(),
        };
        Status {
            line: Line::plain(format!("{}: {what}", name(self))),
            done: None,
            note: None,
        }
    }

    fn failure(&self, cancelled: bool) -> Option<Failure> {
        if self.phase == ProcessMigrationPhase::Completed {
            return None;
        }
        let failure = match &self.error {
            Some(error) => Failure::from(error.clone()),
            None => Failure::new(format!("{} was not moved", name(self))),
        };
        let exit = if cancelled {
            EXIT_INTERRUPTED
        } else {
            EXIT_NOT_MOVED
        };
        Some(failure.exit(exit))
    }

    fn summary(&self) -> String {
        let Self { from, to, .. } = self;
        let mut told = format!("{} moved from '{from}' to '{to}'", name(self));
        if let Some(blackout) = self.blackout_ms {
            told.push_str(&format!(
                "\nits {} queue pairs stood still for {blackout:.0} ms",
                self.queue_pairs
            ));
        }
        format!("{told}, {} sent", format_bytes(self.image_bytes))
    }

    fn note(&self) -> Option<String> {
        waits(self)
    }

    fn show(&self) -> String {
        let milliseconds = |time: f64| format!("{time:.1} ms");
        let partners = self.partners.iter().map(|partner| {
            let ProcessPartner {
                node,
                pid,
                connections,
            } = partner;
            format!("process {pid} of node '{node}' ({connections})")
        });
        let partners: Vec<String> = partners.collect();
        facts([
            ("id", Some(self.id.clone())),
            ("container", self.container.clone()),
            ("pid", Some(self.pid.to_string())),
            ("program", Some(self.command.clone())),
            ("from", Some(self.from.clone())),
            ("to", Some(self.to.clone())),
            ("phase", Some(self.phase.name().to_owned())),
            (
                "progress",
                (!self.phase.ended()).then(|| self.status().line.to_string()),
            ),
            ("queue pairs", Some(self.queue_pairs.to_string())),
            (
                "partners",
                (!partners.is_empty()).then(|| partners.join(", ")),
            ),
            ("sent", Some(format_bytes(self.image_bytes))),
            ("stood still", self.blackout_ms.map(milliseconds)),
            ("started", Some(self.started_at.clone())),
            ("ended", self.ended_at.clone()),
            (
                "warning",
                (!self.warnings.is_empty()).then(|| self.warnings.join("; ")),
            ),
            (
                "error",
                self.error.as_ref().map(|error| error.message.clone()),
            ),
        ])
    }
}

#[cfg(test)]
mod tests {
    use godwit_api::{ErrorBody, ErrorCode};

    use super::*;
    use crate::fixture;

    fn moved(phase: ProcessMigrationPhase) -> ProcessMigration {
        ProcessMigration {
            phase,
            ..fixture::process_migration()
        }
    }

    #[test]
    fn a_move_says_what_it_does_and_how_it_ended() {
        let sending = moved(ProcessMigrationPhase::Sending).status();
        assert_eq!(
            sending.line.to_string(),
            "process 7: sending the image to b, 4.00 MiB sent"
        );
        let mut waiting = moved(ProcessMigrationPhase::Waiting);
        waiting.waits_for = Some("the move of process 9 of node 'b'".to_owned());
        assert_eq!(
            waiting.status().line.to_string(),
            "process 7: waiting for the move of process 9 of node 'b'"
        );
        assert!(
            waiting
                .show()
                .contains("waiting for the move of process 9 of node 'b'")
        );
        let done = moved(ProcessMigrationPhase::Completed);
        assert!(done.failure(false).is_none());
        assert_eq!(
            done.summary(),
            "process 7 moved from 'a' to 'b'\nits 4 queue pairs stood still for 812 ms, 4.00 MiB sent"
        );
        let mut aborted = moved(ProcessMigrationPhase::Aborted);
        aborted.error = Some(ErrorBody::new(ErrorCode::Conflict, "process 7 is lost: no"));
        let told = aborted.failure(false).unwrap();
        assert_eq!(
            (told.message.as_str(), told.exit),
            ("process 7 is lost: no", EXIT_NOT_MOVED)
        );
        assert!(aborted.show().contains("is lost"));
        let mut with_container = moved(ProcessMigrationPhase::Dumping);
        with_container.container = Some("job".to_owned());
        let line = with_container.status().line.to_string();
        assert_eq!(line, "container job: making an image");
    }
}
