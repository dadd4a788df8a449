//! The command `godwit vm`.

use std::time::Duration;

use godwit_api::{
    Accelerator, AdoptVm, MemoryMove, MemoryPlace, MoveMemory, RunVm, StopVm, Vm, VmMemory, VmState,
};
use serde_json::json;

use super::{console, protection};
use crate::arguments::{AcceleratorArgument, MemoryPlaceArgument, VmCommand, VmRunArguments};
use crate::client::Client;
use crate::commands::disk::node_path;
use crate::failure::Failure;
use crate::routes;
use crate::show::output::{Output, facts, table};
use godwit_api::text::format_bytes;

/// Interval of requests for the progress of a VM's memory.
const MEMORY_POLL: Duration = Duration::from_millis(50);
/// Time before a command tells the reason of its wait.
const NOTE_AFTER: Duration = Duration::from_millis(500);

pub(crate) async fn run(
    command: VmCommand,
    client: &mut Client,
    output: Output,
) -> Result<(), Failure> {
    match command {
        VmCommand::Run(arguments) => start(client, &request(*arguments), output).await,
        VmCommand::Adopt { name, qmp } => {
            let qmp = node_path(&qmp, client)?;
            let request = AdoptVm { name, qmp };
            let vm: Vm = client.post(routes::VM_ADOPTIONS, &request).await?;
            output.print(&vm, adopted)
        }
        VmCommand::List => {
            let vms: Vec<Vm> = client.get(routes::VMS).await?;
            output.print(&vms, |vms| list(vms))
        }
        VmCommand::Show { name } => {
            let vm: Vm = client.get(&routes::vm(&name)).await?;
            output.print(&vm, show)
        }
        VmCommand::Stop {
            name,
            force,
            timeout,
        } => {
            let request = StopVm {
                force,
                timeout_seconds: timeout,
            };
            stop(client, &name, &request, output).await?;
            output.print(&json!({ "name": name }), |_| format!("stopped VM '{name}'"))
        }
        VmCommand::Memory {
            name,
            to,
            memory_hold,
            max_bandwidth,
            cancel,
        } => {
            let request = (!cancel).then_some(MoveMemory {
                to: match to {
                    Some(MemoryPlaceArgument::Local) | None => MemoryPlace::Local,
                    Some(MemoryPlaceArgument::Pool) => MemoryPlace::Pool,
                },
                hold_us: memory_hold,
                max_bandwidth,
            });
            move_memory(client, &name, request, output).await
        }
        VmCommand::Resume { name, force } => {
            let path = routes::vm_resume(&name, force);
            client.order(&path, &json!({})).await?;
            output.print(&json!({ "name": name }), |_| format!("VM '{name}' goes on"))
        }
        VmCommand::Protect(arguments) => protection::protect(client, arguments, output).await,
        VmCommand::Unprotect { name, force } => {
            protection::unprotect(client, &name, force, output).await
        }
        VmCommand::Failover { name } => protection::fail_over(client, &name, output).await,
        VmCommand::Forget { name, force } => {
            client.delete(&routes::vm_forget(&name, force)).await?;
            output.print(&json!({ "name": name }), |_| format!("forgot VM '{name}'"))
        }
        VmCommand::Console { name } => open_console(client, &name).await,
    }
}

async fn open_console(client: &mut Client, name: &str) -> Result<(), Failure> {
    let vm: Vm = client.get(&routes::vm(name)).await?;
    let socket = console_socket(&vm, client.is_local())?;
    console::run(name, &socket).await
}

async fn start(client: &mut Client, request: &RunVm, output: Output) -> Result<(), Failure> {
    let vm: Vm = client.post(routes::VMS, request).await?;
    for warning in &vm.warnings {
        output.say(&format!("warning: {warning}"));
    }
    output.print(&vm, |vm| format!("VM '{}' is {}", vm.name, vm.state.name()))
}

fn adopted(vm: &Vm) -> String {
    let disks = match vm.disks.as_slice() {
        [] => "no disks of this node".to_owned(),
        disks => format!("disks {}", disks.join(", ")),
    };
    format!("adopted VM '{}' with {disks}", vm.name)
}

/// Moves a VM's memory; without a request, ends the move under way.
async fn move_memory(
    client: &mut Client,
    name: &str,
    request: Option<MoveMemory>,
    output: Output,
) -> Result<(), Failure> {
    let Some(request) = request else {
        let path = routes::vm_memory_cancel(name);
        client.order(&path, &json!({})).await?;
        return output.print(&json!({ "name": name }), |_| {
            format!("the memory of VM '{name}' stays where it is now")
        });
    };
    client.order(&routes::vm_memory(name), &request).await?;
    let vm = memory_moved(client, name).await?;
    output.print(&vm, show)
}

/// Waits until a VM's memory has moved.
async fn memory_moved(client: &mut Client, name: &str) -> Result<Vm, Failure> {
    loop {
        let vm: Vm = client.get(&routes::vm(name)).await?;
        let moving = vm.memory.as_ref().and_then(|memory| memory.moving.as_ref());
        match moving {
            Some(moving) if !moving.ended => tokio::time::sleep(MEMORY_POLL).await,
            Some(moving) => {
                return match &moving.problem {
                    None => Ok(vm),
                    Some(problem) => Err(Failure::new(format!(
                        "the memory of VM '{name}' has not moved: {problem}"
                    ))
                    .hint(format!("see how much has: godwit vm show {name}"))),
                };
            }
            None => {
                let text =
                    format!("the node was started again while the memory of VM '{name}' moved");
                return Err(Failure::new(text).hint(format!(
                    "see how much has: godwit vm show {name}; the same command goes on from there"
                )));
            }
        }
    }
}

/// Asks the node to end a VM, with a note if the guest takes a while.
async fn stop(
    client: &mut Client,
    name: &str,
    request: &StopVm,
    output: Output,
) -> Result<(), Failure> {
    let path = routes::vm_stop(name);
    let mut stopped = std::pin::pin!(client.order(&path, request));
    tokio::select! {
        stopped = &mut stopped => return Ok(stopped?),
        () = tokio::time::sleep(NOTE_AFTER) => {}
    }
    let note = format!("waiting for the guest of VM '{name}' to shut down; --force does not wait");
    output.say(&note);
    Ok(stopped.await?)
}

fn request(arguments: VmRunArguments) -> RunVm {
    RunVm {
        name: arguments.name,
        disks: arguments.disks,
        nics: arguments.nics,
        memory_bytes: Some(arguments.memory),
        memory_pool: arguments.memory_pool,
        cpus: Some(arguments.cpus),
        machine: arguments.machine,
        accelerator: match arguments.accel {
            AcceleratorArgument::Auto => Accelerator::Auto,
            AcceleratorArgument::Kvm => Accelerator::Kvm,
            AcceleratorArgument::Tcg => Accelerator::Tcg,
        },
        qemu: arguments.qemu,
        arguments: arguments.arguments,
    }
}

fn console_socket(vm: &Vm, local: bool) -> Result<String, Failure> {
    let name = &vm.name;
    match (&vm.console, &vm.moved_to) {
        (_, Some(node)) => Err(Failure::new(format!("VM '{name}' is on node '{node}' now"))
            .hint(format!("ask there: godwit vm console {name}"))),
        (None, None) => Err(
            Failure::new(format!("VM '{name}' has no console of the node's"))
                .hint(format!("see why: godwit vm show {name}")),
        ),
        (Some(_), None) if !local => Err(Failure::new(format!(
            "the console of VM '{name}' is a socket on the node's host"
        ))
        .hint("run the command there, with --socket")),
        (Some(socket), None) => Ok(socket.clone()),
    }
}

fn list(vms: &[Vm]) -> String {
    let row = |vm: &Vm| {
        let note = match (vm.state, &vm.moved_to) {
            (VmState::Departed, Some(node)) => format!("on {node}"),
            (VmState::Stopped, _) if vm.problem.is_none() => vm.status.clone(),
            (VmState::Backup, _) => vm.status.clone(),
            _ => vm.problem.clone().unwrap_or_default(),
        };
        let note = match &vm.protection {
            Some(protection) if note.is_empty() => {
                format!("{} by {}", protection.state.name(), protection.peer)
            }
            _ => note,
        };
        [
            vm.name.clone(),
            vm.state.name().to_owned(),
            vm.disks.join(","),
            vm.pid.map(|pid| pid.to_string()).unwrap_or_default(),
            note,
        ]
    };
    let empty = "no VMs: start one with godwit vm run NAME --disk DISK";
    table(
        ["NAME", "STATE", "DISKS", "PID", "NOTE"],
        vms.iter().map(row),
        empty,
    )
}

fn show(vm: &Vm) -> String {
    facts([
        ("name", Some(vm.name.clone())),
        ("state", Some(format!("{}: {}", vm.state.name(), vm.status))),
        ("problem", vm.problem.clone()),
        ("disks", (!vm.disks.is_empty()).then(|| vm.disks.join(", "))),
        (
            "protection",
            vm.protection.as_ref().map(protection::sentence),
        ),
        ("memory", vm.memory.as_ref().map(memory)),
        (
            "memory move",
            vm.memory
                .as_ref()
                .and_then(|memory| memory.moving.as_ref())
                .map(memory_move),
        ),
        ("from", Some(vm.origin.clone())),
        ("on", vm.moved_to.clone()),
        ("migration", vm.migration.clone()),
        ("process", vm.pid.map(|pid| pid.to_string())),
        ("QEMU", vm.qemu_version.clone()),
        ("accelerator", vm.accelerator.clone()),
        ("monitor", Some(vm.qmp.clone())),
        ("console", vm.console.clone()),
        ("log", vm.log.clone()),
        (
            "started as",
            (vm.state == VmState::Stopped).then(|| quoted(&vm.command)),
        ),
    ])
}

/// Quotes words for a shell.
fn quoted(words: &[String]) -> String {
    let plain = |word: &String| {
        let safe = |c: char| c.is_ascii_alphanumeric() || "-_=,.:/+@%".contains(c);
        match !word.is_empty() && word.chars().all(safe) {
            true => word.clone(),
            false => format!("'{}'", word.replace('\'', "'\\''")),
        }
    };
    words.iter().map(plain).collect::<Vec<_>>().join(" ")
}

fn memory(memory: &VmMemory) -> String {
    let VmMemory {
        pool,
        bytes,
        bytes_in_pool,
        ..
    } = memory;
    let total = format_bytes(*bytes);
    match bytes_in_pool {
        0 => format!("{total}, local"),
        in_pool => format!(
            "{} of {total} in memory pool {pool}, on which the guest depends",
            format_bytes(*in_pool)
        ),
    }
}

/// Returns the progress or the outcome of a memory move.
fn memory_move(moving: &MemoryMove) -> String {
    let MemoryMove {
        to,
        ended,
        bytes_total,
        bytes_moved,
        seconds,
        seconds_left,
        longest_hold_us,
        problem,
        ..
    } = moving;
    let (moved, to) = (format_bytes(*bytes_moved), to.name());
    let all = format_bytes(*bytes_total);
    let end = match (ended, problem, seconds_left) {
        (true, Some(problem), _) => format!("ended: {problem}"),
        (true, None, _) => String::from("done"),
        (false, _, Some(left)) => format!("{left:.1} s left"),
        (false, _, None) => String::from("begins"),
    };
    format!(
        "{moved} of {all} to {to} in {seconds:.1} s, no page held for more than {longest_hold_us} us: {end}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_move_of_memory_tells_how_far_it_is_and_how_it_ended() {
        let mut moving = MemoryMove {
            to: MemoryPlace::Local,
            ended: false,
            bytes_total: 1 << 30,
            bytes_moved: 256 << 20,
            seconds: 0.5,
            seconds_left: Some(1.5),
            longest_hold_us: 300,
            longest_still_us: 9000,
            problem: None,
        };
        let far = memory_move(&moving);
        assert!(
            far.starts_with("256 MiB of 1.00 GiB to local in 0.5 s") && far.ends_with("1.5 s left"),
            "{far}"
        );
        moving.ended = true;
        assert!(memory_move(&moving).ends_with(": done"));
        moving.problem = Some(String::from("it was cancelled"));
        assert!(memory_move(&moving).ends_with("ended: it was cancelled"));
    }

    fn vm() -> Vm {
        Vm {
            name: "v".to_owned(),
            state: VmState::Running,
            status: "runs here".to_owned(),
            disks: vec!["root".to_owned(), "data".to_owned()],
            origin: "run".to_owned(),
            moved_to: None,
            migration: None,
            pid: Some(7),
            qemu_version: Some("10.0.2".to_owned()),
            qmp: "/n/qmp.sock".to_owned(),
            console: Some("/n/console.sock".to_owned()),
            log: None,
            memory: None,
            command: vec!["qemu".to_owned(), "-name".to_owned(), "it's v".to_owned()],
            accelerator: Some("tcg".to_owned()),
            protection: None,
            problem: None,
            warnings: Vec::new(),
        }
    }

    #[test]
    fn a_vm_is_listed_with_its_disks() {
        let text = list(&[vm()]);
        let row = text.lines().nth(1).unwrap();
        assert_eq!(
            row.split_whitespace().collect::<Vec<_>>(),
            ["v", "running", "root,data", "7"]
        );
        assert!(show(&vm()).contains("running: runs here"));
    }

    #[test]
    fn a_stopped_vm_tells_what_it_was() {
        let stopped = Vm {
            state: VmState::Stopped,
            status: "no QEMU runs it: its guest shut down".to_owned(),
            ..vm()
        };
        let shown = show(&stopped);
        assert!(shown.contains(r"qemu -name 'it'\''s v'"), "{shown}");
        assert!(list(&[stopped]).contains("its guest shut down"));
    }

    #[test]
    fn a_console_is_where_the_vm_is() {
        assert_eq!(console_socket(&vm(), true).unwrap(), "/n/console.sock");
        assert!(console_socket(&vm(), false).is_err());
        let moved = Vm {
            moved_to: Some("b".to_owned()),
            state: VmState::Departed,
            ..vm()
        };
        let told = console_socket(&moved, true).unwrap_err().to_string();
        assert!(told.contains("on node 'b'"), "{told}");
        let without = Vm {
            console: None,
            ..vm()
        };
        assert!(console_socket(&without, true).is_err());
    }
}
