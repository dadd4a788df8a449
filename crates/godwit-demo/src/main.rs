//! Shows each of Godwit's jobs, checked by programs that are not Godwit: `make demo`, or `make demo SCENE=vm` for
//! another scene.

mod disk;
mod leave;
mod memory;
mod net;
mod protect;
mod rdma;
mod vm;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use godwit_testkit::report::exit_code;

/// Shows what Godwit does, and checks it
#[derive(Debug, Parser)]
struct Arguments {
    #[command(subcommand)]
    scene: Scene,
}

#[derive(Debug, Subcommand)]
enum Scene {
    Disk(disk::Arguments),
    /// Hands a busy disk over at once, and pulls it while both nodes are killed
    Leave,
    Vm(vm::Arguments),
    Net(net::Arguments),
    Memory(memory::Arguments),
    Protect(protect::Arguments),
    Rdma(rdma::Arguments),
}

fn main() -> ExitCode {
    exit_code(match Arguments::parse().scene {
        Scene::Disk(arguments) => disk::play(&arguments),
        Scene::Leave => leave::play(),
        Scene::Vm(arguments) => vm::play(&arguments),
        Scene::Net(arguments) => net::play(&arguments),
        Scene::Memory(arguments) => memory::play(&arguments),
        Scene::Protect(arguments) => protect::play(&arguments),
        Scene::Rdma(arguments) => rdma::play(&arguments),
    })
}
