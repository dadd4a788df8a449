//! A command for operators and movers to talk to processes that use the library.

use std::process::ExitCode;

use anyhow::Context;
use clap::{Parser, Subcommand};
use godwit_verbs::control::{Answer, Request, ask, processes};

/// RDMA applications under libgodwit_verbs.so on this host
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Lists the processes that use the library and have opened a device
    List,
    /// Shows a process's queue pairs and what keeps it from moving
    Status {
        /// The process
        pid: u32,
    },
    /// Shows what this host offers to processes that move here, as JSON
    Offer {
        /// Numbers of processes that would come
        pids: Vec<u32>,
    },
    /// Sends a request as JSON and prints the answer as JSON
    Ask {
        /// The process
        pid: u32,
        /// For example {"do":"suspend","only":null}
        request: String,
    },
    /// Makes objects of the device for a process that will come, until that process takes them or standard input ends
    Hold,
}

fn main() -> ExitCode {
    match run(Arguments::parse().command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("godwit-verbs: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> anyhow::Result<ExitCode> {
    let (pid, request) = match command {
        Command::List => {
            for pid in processes().context("cannot list sockets")? {
                println!("{pid}");
            }
            return Ok(ExitCode::SUCCESS);
        }
        Command::Offer { pids } => {
            let offer = godwit_verbs::offer::offer(&pids).context("cannot list devices")?;
            println!("{}", serde_json::to_string(&offer)?);
            return Ok(ExitCode::SUCCESS);
        }
        Command::Hold => {
            godwit_verbs::shim::serve_as_holder();
            // The starter holds the other end of standard input, so the holder ends with its starter.
            std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
            return Ok(ExitCode::SUCCESS);
        }
        Command::Status { pid } => (pid, Request::Status),
        Command::Ask { pid, request } => (
            pid,
            serde_json::from_str(&request).context("the request cannot be read")?,
        ),
    };
    let answer = ask(pid, &request)?;
    println!("{}", serde_json::to_string(&answer)?);
    Ok(if matches!(answer, Answer::Error(_)) {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}
