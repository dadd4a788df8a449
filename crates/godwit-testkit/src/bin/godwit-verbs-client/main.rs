//! An RDMA application that checks all of its traffic: work-request ids come in sequence, every message comes once, in
//! order and whole, and data written at the peer can be read back.
//!
//! A server and one or several clients talk over reliable connections. All send all the time, and every sixteenth
//! operation reads back the write before. Access is by the key of the peer's memory, or by the keys of memory windows,
//! which the peer binds anew all the time; old keys have to be refused in the end. Alternatively, the sides send each
//! other numbered datagrams. None may come twice or damaged, and none may be lost unless the file named by
//! `--losses-while` exists when the loss is found. A side ends when one of them finds the file named by `--until`. The
//! exit status and the last line give the outcome.
//!
//! The application knows nothing of Godwit: all calls go to libibverbs, or to a library in front.

mod content;
mod datagrams;
mod device;
mod exchange;
mod handover;
mod receives;
mod rounds;
mod traffic;
mod verbs;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

/// Sends and receives over RDMA, and checks everything
#[derive(Parser)]
struct Arguments {
    /// The server's address; without one, this is the server
    server: Option<String>,
    /// The RDMA device
    #[arg(long, default_value = "rxe0")]
    device: String,
    /// The device's GID index
    #[arg(long, default_value_t = 1)]
    gid_index: u8,
    /// Number of clients of the server
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16))]
    clients: u8,
    /// Queue pairs of each connection of a client to the server
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=64))]
    pairs: u8,
    /// All queue pairs receive from one shared receive queue
    #[arg(long)]
    shared_receives: bool,
    /// Wait for events of a completion channel
    #[arg(long)]
    events: bool,
    /// Wait for the events with epoll(7), for each once (edge-triggered)
    #[arg(long, requires = "events")]
    epoll: bool,
    /// Write and read through memory windows of this type
    #[arg(long, value_parser = clap::value_parser!(u8).range(1..=2), conflicts_with = "datagrams")]
    windows: Option<u8>,
    /// Send datagrams in place of messages of reliable connections
    #[arg(long)]
    datagrams: bool,
    /// MiB of memory beside the RDMA buffers, of which some is written all the time and all checked in the end. The
    /// RDMA buffers are then shared memory, in which the kernel does not note changes by devices
    #[arg(long, default_value_t = 0, conflicts_with = "datagrams", value_parser = clap::value_parser!(u16).range(..=4096))]
    memory: u16,
    /// Datagrams may be lost while this file exists
    #[arg(long, default_value = "/run/verbs-client-loses")]
    losses_while: PathBuf,
    /// End once this file exists
    #[arg(long, default_value = "/run/verbs-client-ends")]
    until: PathBuf,
}

impl Arguments {
    /// Returns the number of peers of this process: a client talks with the server only.
    fn peers(&self) -> usize {
        if self.server.is_some() {
            1
        } else {
            usize::from(self.clients)
        }
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let run = if arguments.datagrams {
        datagrams::run
    } else {
        traffic::run
    };
    match run(&arguments) {
        Ok(checked) => {
            println!("checked: {checked}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("broken: {error}");
            ExitCode::FAILURE
        }
    }
}
