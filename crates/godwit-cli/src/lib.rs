//! The `godwit` command, which runs a node and sends requests to nodes. A library, because cargo compiles a library
//! beside the crates below, and a program after them.

mod arguments;
mod client;
mod commands;
#[cfg(test)]
mod documented;
mod failure;
#[cfg(test)]
mod fixture;
mod routes;
mod show;

use std::pin::Pin;
use std::process::ExitCode;

use crate::arguments::{Arguments, Command, Connection};
use crate::client::{Client, Endpoint};
use crate::failure::Failure;
use crate::show::output::Output;

/// Carries out the command line of this process.
pub fn main() -> ExitCode {
    let arguments = match Arguments::read(std::env::args_os().collect()) {
        Ok(arguments) => arguments,
        Err(error) if error.use_stderr() && asks_for_json() => {
            return tell(&Failure::usage(reason(&error)), true);
        }
        // `exit` prints help, versions and usage errors itself, with exit code 2 for the latter.
        Err(error) => error.exit(),
    };
    let json = arguments.json;
    match run(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => tell(&failure, json),
    }
}

fn tell(failure: &Failure, json: bool) -> ExitCode {
    match serde_json::to_string_pretty(&failure.to_body()) {
        Ok(body) if json => eprintln!("{body}"),
        _ => eprintln!("{failure}"),
    }
    ExitCode::from(failure.exit)
}

/// Returns true if an invalid command line asks for JSON. Words after `--` do not count.
fn asks_for_json() -> bool {
    let own = std::env::args_os().take_while(|word| word != "--");
    own.into_iter().any(|word| word == "--json")
}

/// Returns the reason of a usage error, without the usage text.
fn reason(error: &clap::Error) -> String {
    let text = error.to_string();
    let reason = text.strip_prefix("error: ").unwrap_or(&text);
    let reason = reason.split("\n\n").next().unwrap_or(reason);
    reason.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn run(arguments: Arguments) -> Result<(), Failure> {
    let Arguments {
        connection,
        json,
        command,
    } = arguments;
    let output = Output { json };
    match command {
        Command::Node(node) => commands::node::run(*node, connection),
        Command::Certs(command) => commands::certs::run(command, output),
        Command::Image(arguments) => commands::image::run(arguments, output),
        Command::Completions { shell } => commands::shell::completions::run(shell),
        Command::Manual { directory } => commands::shell::manual::run(&directory),
        Command::KeepStream => godwit_node::keep_stream()
            .map_err(|error| Failure::caused("cannot keep the connection", &error)),
        Command::Migrate(arguments) => with_client(&connection, async |client| {
            commands::moves::migrate::run(*arguments, client, output).await
        }),
        Command::Migration(command) => with_client(&connection, async |client| {
            commands::moves::migration::run(command, client, output).await
        }),
        Command::Disk(command) => with_client(&connection, async |client| {
            commands::disk::run(command, client, output).await
        }),
        Command::Vm(command) => with_client(&connection, async |client| {
            commands::vms::vm::run(command, client, output).await
        }),
        Command::Nic(command) => with_client(&connection, async |client| {
            commands::vms::nic::run(command, client, output).await
        }),
        Command::Process(command) => with_client(&connection, async |client| {
            commands::processes::process::run(command, client, output).await
        }),
        Command::Container(command) => with_client(&connection, async |client| {
            commands::processes::container::run(command, client, output).await
        }),
        Command::MemoryPool(command) => with_client(&connection, async |client| {
            commands::vms::memory_pool::run(command, client, output).await
        }),
        Command::Peer(command) => with_client(&connection, async |client| {
            commands::peer::run(command, client, output).await
        }),
    }
}

fn with_client(
    connection: &Connection,
    call: impl AsyncFnOnce(&mut Client) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut client = Client::new(Endpoint::from_arguments(connection)?);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::caused("cannot start", &error))?;
    // Boxed: each loop of the runtime would otherwise have its own copy of every command's code.
    let call: Pin<Box<dyn Future<Output = _>>> = Box::pin(call(&mut client));
    runtime.block_on(call)
}
