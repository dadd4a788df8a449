//! The command `godwit migrate`.

use godwit_api::{
    ErrorCode, MigrateContainer, MigrateProcess, MigrateRequest, MigrateVm, Migration,
    ProcessMigration, Vm, VmMigration,
};
use tokio::signal::unix::Signal;

use super::cgroup::first_process;
use super::follow::{Begun, begin, interrupts, see_off, see_off_and_wait};
use crate::arguments::{MigrateArguments, Subject};
use crate::client::Client;
use crate::failure::Failure;
use crate::routes;
use crate::show::output::Output;

pub(crate) async fn run(
    arguments: MigrateArguments,
    client: &mut Client,
    output: Output,
) -> Result<(), Failure> {
    let subject = match (arguments.subject, arguments.cgroup) {
        (Some(subject), _) => subject,
        (None, Some(path)) => Subject::Process(first_process(&path)?),
        (None, None) => return Err(Failure::usage("nothing is named that could move")),
    };
    // Before the request, so that Ctrl-C while the node connects to its peer cancels the move.
    let mut interrupts = interrupts()?;
    let MigrateArguments {
        to,
        pool,
        options,
        of_process,
        ..
    } = arguments;
    let begun = match subject {
        Subject::Disk(disk) => {
            let request = MigrateRequest {
                disk,
                to,
                pool,
                into: arguments.into,
                with_guest: arguments.with_guest,
                options,
            };
            begin_disk(client, &request, &mut interrupts, output).await?
        }
        Subject::Machine(vm) => {
            let request = MigrateVm {
                to,
                pool,
                uplinks: arguments.uplinks.into_iter().collect(),
                memory: arguments.memory.unwrap_or_default(),
                stay_in_pool: arguments.stay_in_pool,
                options,
            };
            let path = routes::vm_migrate(&vm);
            begin::<VmMigration>(client, &path, &request, &mut interrupts, output).await?
        }
        Subject::Process(pid) => {
            let request = MigrateProcess {
                to,
                pre_setup: arguments.pre_setup,
                options: of_process,
            };
            let path = routes::process_migrate(pid);
            begin::<ProcessMigration>(client, &path, &request, &mut interrupts, output).await?
        }
        Subject::Container(id) => {
            let options = of_process;
            let request = MigrateContainer { to, options };
            let path = routes::container_migrate(&id);
            begin::<ProcessMigration>(client, &path, &request, &mut interrupts, output).await?
        }
    };
    match arguments.wait {
        true => see_off_and_wait(client, begun, interrupts, output).await,
        false => see_off(client, begun, interrupts, arguments.detach, output).await,
    }
}

async fn begin_disk(
    client: &mut Client,
    request: &MigrateRequest,
    interrupts: &mut Signal,
    output: Output,
) -> Result<Begun, Failure> {
    match begin::<Migration>(client, routes::MIGRATIONS, request, interrupts, output).await {
        Err(failure) if failure.code == Some(ErrorCode::NotFound) => {
            Err(is_a_machine(client, &request.disk, failure).await)
        }
        begun => begun,
    }
}

/// Adds a hint to the error for a missing disk if the name is a VM's.
async fn is_a_machine(client: &mut Client, name: &str, failure: Failure) -> Failure {
    match client.get::<Vm>(&routes::vm(name)).await {
        Ok(_) => failure.hint(format!(
            "it is a virtual machine, which moves with its disks: give vm/{name}"
        )),
        Err(_) => failure,
    }
}
