//! The command `godwit process`.

use godwit_api::{MigrateProcess, Process, ProcessMigration, ProcessMigrationPhase};

use super::cgroup::first_process;
use crate::arguments::ProcessCommand;
use crate::client::Client;
use crate::commands::moves::follow::{
    Followed, Moving, OnInterrupt, begin, follow, interrupts, see_off,
};
use crate::failure::{EXIT_INTERRUPTED, EXIT_NOT_MOVED, Failure};
use crate::routes;
use crate::show::line::Line;
use crate::show::output::{Output, facts, table};
use crate::show::progress::Status;
use godwit_api::text::format_bytes;

pub(crate) async fn run(
    command: ProcessCommand,
    client: &mut Client,
    output: Output,
) -> Result<(), Failure> {
    match command {
        ProcessCommand::List => {
            let processes: Vec<Process> = client.get(routes::PROCESSES).await?;
            output.print(&processes, |processes| list(processes))
        }
        ProcessCommand::Show { pid } => {
            let process: Process = client.get(&routes::process(pid)).await?;
            output.print(&process, show)
        }
        ProcessCommand::Migrate {
            pid,
            cgroup,
            to,
            options,
            pre_setup,
            detach,
        } => {
            let pid = match (pid, cgroup) {
                (_, Some(path)) => first_process(&path)?,
                (Some(pid), None) => pid,
                (None, None) => {
                    return Err(Failure::usage("a process or --cgroup has to be named"));
                }
            };
            // Before the request, so that Ctrl-C while the nodes check cancels the move.
            let mut interrupts = interrupts()?;
            let request = MigrateProcess {
                to,
                pre_setup,
                options,
            };
            let path = routes::process_migrate(pid);
            let begun =
                begin::<ProcessMigration>(client, &path, &request, &mut interrupts, output).await?;
            see_off(client, begun, interrupts, detach, output).await
        }
        ProcessCommand::Moves => {
            let moves: Vec<ProcessMigration> = client.get(routes::PROCESS_MIGRATIONS).await?;
            output.print(&moves, |moves| list_moves(moves))
        }
        ProcessCommand::Watch { id } => {
            let seen = find(client, &id).await?;
            let interrupts = interrupts()?;
            let Followed { migration, .. } = follow(
                client,
                seen,
                interrupts,
                OnInterrupt::Detach,
                output,
                output.json,
            )
            .await?;
            match migration.failure(false) {
                Some(failure) => Err(failure),
                // In JSON, the last line has been printed already.
                None if output.json => Ok(()),
                None => output.print(&migration, ProcessMigration::summary),
            }
        }
        ProcessCommand::Cancel { id } => {
            let seen = find(client, &id).await?;
            let nothing = serde_json::json!({});
            let seen: ProcessMigration = client.post(&seen.cancel_path(), &nothing).await?;
            output.print(&seen, cancelled)
        }
    }
}

/// Returns the outcome of a request to cancel a move.
fn cancelled(seen: &ProcessMigration) -> String {
    match (&seen.error, seen.phase) {
        (Some(error), ProcessMigrationPhase::Aborted) => error.message.clone(),
        _ => format!(
            "the move of process {} is being cancelled; see 'godwit process watch {}'",
            seen.pid, seen.id
        ),
    }
}

/// Finds the move whose id begins with these digits.
async fn find(client: &mut Client, id: &str) -> Result<ProcessMigration, Failure> {
    let moves: Vec<ProcessMigration> = client.get(routes::PROCESS_MIGRATIONS).await?;
    let mut found = moves.into_iter().filter(|one| one.id.starts_with(id));
    match (found.next(), found.next()) {
        (Some(one), None) => Ok(one),
        (None, _) => Err(
            Failure::not_found(format!("the node knows no move {id} of a process"))
                .hint("see 'godwit process moves'"),
        ),
        (Some(_), Some(_)) => Err(Failure::new(format!("several moves' ids begin with {id}"))
            .hint("give more digits; see 'godwit process moves'")),
    }
}

fn list(processes: &[Process]) -> String {
    let row = |process: &Process| {
        [
            process.pid.to_string(),
            process.command.clone(),
            process.devices.join(", "),
            format!("{} of {}", process.connected, process.queue_pairs),
            match process.obstacles.len() {
                0 => String::from("yes"),
                count => format!("no, {count} in the way"),
            },
        ]
    };
    let empty = "no process uses the RDMA library: start one with LD_PRELOAD=libgodwit_verbs.so";
    table(
        ["PID", "PROGRAM", "DEVICES", "CONNECTED", "CAN MOVE"],
        processes.iter().map(row),
        empty,
    )
}

fn show(process: &Process) -> String {
    let head = facts([
        ("pid", Some(process.pid.to_string())),
        ("program", Some(process.command.clone())),
        ("devices", Some(process.devices.join(", "))),
        (
            "queue pairs",
            Some(format!(
                "{}, {} connected",
                process.queue_pairs, process.connected
            )),
        ),
    ]);
    if process.obstacles.is_empty() {
        return head;
    }
    format!(
        "{head}\n\nIt cannot move:\n  {}",
        process.obstacles.join("\n  ")
    )
}

/// Returns the name of the moving container or process.
fn name(seen: &ProcessMigration) -> String {
    match &seen.container {
        Some(container) => format!("container {container}"),
        None => format!("process {}", seen.pid),
    }
}

fn list_moves(moves: &[ProcessMigration]) -> String {
    let row = |seen: &ProcessMigration| {
        [
            seen.id.chars().take(8).collect(),
            seen.pid.to_string(),
            seen.command.clone(),
            seen.to.clone(),
            seen.phase.name().replace('_', " "),
            seen.error
                .as_ref()
                .map(|error| error.message.clone())
                .or_else(|| waits(seen))
                .unwrap_or_default(),
        ]
    };
    table(
        ["ID", "PID", "PROGRAM", "TO", "PHASE", "NOTE"],
        moves.iter().map(row),
        "no process was moved from this node since its start",
    )
}

/// Returns a note about the move that this one waits for.
fn waits(seen: &ProcessMigration) -> Option<String> {
    let who = seen.waits_for.as_ref();
    who.map(|who| format!("waiting for {who}"))
}

impl Moving for ProcessMigration {
    fn id(&self) -> &str {
        &self.id
    }

    fn path(&self) -> String {
        routes::process_migration(&self.id)
    }

    fn cancel_path(&self) -> String {
        routes::process_migration_cancel(&self.id)
    }

    fn phase(&self) -> &'static str {
        self.phase.name()
    }

    fn ended(&self) -> bool {
        self.phase.ended()
    }

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

    fn warnings(&self) -> &[String] {
        &self.warnings
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

    fn list_command() -> &'static str {
        "godwit process moves"
    }

    fn watch_command(&self) -> String {
        format!("godwit process watch {}", self.id)
    }
}

#[cfg(test)]
mod tests {
    use godwit_api::{ErrorBody, ErrorCode, ProcessBreakdown};

    use super::*;

    fn moved(phase: ProcessMigrationPhase) -> ProcessMigration {
        ProcessMigration {
            id: "aabbccddeeff00112233445566778899".to_owned(),
            pid: 7,
            container: None,
            command: "ib_write_bw".to_owned(),
            from: "a".to_owned(),
            to: "b".to_owned(),
            phase,
            waits_for: None,
            partners: Vec::new(),
            queue_pairs: 4,
            image_bytes: 4 << 20,
            started_at: "2026-01-01T00:00:00Z".to_owned(),
            ended_at: None,
            pre_copy_ms: None,
            pre_copied_bytes: 0,
            pre_copy_rounds: 0,
            pre_setup_ms: None,
            blackout_ms: Some(812.4),
            wait_ms: Some(3.0),
            breakdown_ms: ProcessBreakdown::default(),
            error: None,
            warnings: Vec::new(),
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
        assert!(list_moves(&[waiting]).contains("waiting for the move of process 9 of node 'b'"));
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
        assert!(list_moves(&[aborted]).contains("is lost"));
        let mut with_container = moved(ProcessMigrationPhase::Dumping);
        with_container.container = Some("job".to_owned());
        let line = with_container.status().line.to_string();
        assert_eq!(line, "container job: making an image");
    }

    #[test]
    fn a_cancelled_move_says_what_became_of_it() {
        let mut seen = moved(ProcessMigrationPhase::GoingBack);
        assert!(cancelled(&seen).contains("is being cancelled"));
        seen.phase = ProcessMigrationPhase::Aborted;
        seen.error = Some(ErrorBody::new(ErrorCode::Conflict, "process 7 is lost: no"));
        assert_eq!(cancelled(&seen), "process 7 is lost: no");
    }

    #[test]
    fn a_process_shows_what_is_in_its_way() {
        let process = Process {
            pid: 7,
            command: "ib_write_bw".to_owned(),
            queue_pairs: 2,
            connected: 1,
            devices: vec!["rxe0".to_owned()],
            obstacles: vec!["queue pair 17 is not connected".to_owned()],
        };
        assert!(show(&process).ends_with("It cannot move:\n  queue pair 17 is not connected"));
        let text = list(&[process]);
        assert!(
            text.contains("1 of 2") && text.contains("no, 1 in the way"),
            "{text}"
        );
    }
}
