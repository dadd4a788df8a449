//! The command `godwit process`.

use godwit_api::Process;

use crate::arguments::ProcessCommand;
use crate::client::Client;
use crate::failure::Failure;
use crate::routes;
use crate::show::output::{Output, facts, table};

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

#[cfg(test)]
mod tests {
    use super::*;

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
