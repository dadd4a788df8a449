//! Speaks with processes that use the library: for operators, and for what moves them.

use std::process::ExitCode;
use std::time::Instant;

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
        /// For example {"do":"suspend","only":null}; - reads it from standard input
        request: String,
        /// Prints a second line: how long the process took to answer
        #[arg(long)]
        time: bool,
    },
    /// Makes objects of the device for a process that will come, until that process takes them
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
    let mut timed = false;
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
            println!("{}", std::process::id());
            loop {
                std::thread::park();
            }
        }
        Command::Status { pid } => (pid, Request::Status),
        Command::Ask { pid, request, time } => {
            timed = time;
            let request = if request == "-" {
                std::io::read_to_string(std::io::stdin()).context("standard input")?
            } else {
                request
            };
            (
                pid,
                serde_json::from_str(&request).context("the request cannot be read")?,
            )
        }
    };
    let began = Instant::now();
    let answer = ask(pid, &request)?;
    let took = began.elapsed();
    println!("{}", serde_json::to_string(&answer)?);
    if timed {
        println!("took {} microseconds", took.as_micros());
    }
    Ok(if matches!(answer, Answer::Error(_)) {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}
