//! An RDMA application that checks what it is told: work-request ids come in sequence, every message comes
//! once, in order and whole, and what was written at the peer can be read back.
//!
//! Two of them talk, a server and a client, over reliable connections, or a server and several clients. All send all the time, and every
//! sixteenth operation reads back what the one before it wrote: by the key of the peer's memory, or by those of memory windows that the
//! peer binds anew all the time, of which old ones have to be refused in the end. Or they send each other numbered datagrams, of which
//! none may come twice or damaged, and none may be lost unless the file that `--losses-while` names is there when that is found. They
//! end when one of them finds the file that `--until` names; the exit status and the last line say whether everything was as it has to be.
//!
//! It knows nothing of Godwit: it calls libibverbs, or what stands in front of it.

mod datagrams;
mod device;
mod exchange;
mod handover;
mod ledger;
mod memory;
mod old_keys;
mod receives;
mod rounds;
mod traffic;
mod verbs;
mod windows;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

/// Sends and receives over RDMA, and checks everything
#[derive(Parser)]
struct Arguments {
    /// The server's address; without it, this is the server
    server: Option<String>,
    /// The RDMA device
    #[arg(long, default_value = "rxe0")]
    device: String,
    /// Its GID
    #[arg(long, default_value_t = 1)]
    gid_index: u8,
    /// How many clients the server talks with
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
    /// Wait for them with epoll(7), for each once (edge-triggered)
    #[arg(long, requires = "events")]
    epoll: bool,
    /// Write and read through memory windows of this type
    #[arg(long, value_parser = clap::value_parser!(u8).range(1..=2), conflicts_with = "datagrams")]
    windows: Option<u8>,
    /// Send datagrams in place of messages of reliable connections
    #[arg(long)]
    datagrams: bool,
    /// Have so many MiB of memory beside what RDMA needs, write some of it all the time and check all in the end. What RDMA
    /// needs is shared memory then, of which the kernel does not note what devices change
    #[arg(long, default_value_t = 0, conflicts_with = "datagrams", value_parser = clap::value_parser!(u16).range(..=4096))]
    memory: u16,
    /// Datagrams may be lost while this file is there
    #[arg(long, default_value = "/run/verbs-client-loses")]
    losses_while: PathBuf,
    /// End when this file is there
    #[arg(long, default_value = "/run/verbs-client-ends")]
    until: PathBuf,
}

impl Arguments {
    /// How many others this process talks with: a client with the server only.
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
