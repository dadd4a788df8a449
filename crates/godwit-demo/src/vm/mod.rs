//! A move of a whole machine: QEMU, as the distribution builds it, runs a Linux guest on disks of a node, and the
//! machine moves from node to node while the guest works and checks.

mod report;
mod scene;

use std::process::ExitCode;

use clap::Args;
use godwit_testkit::report::conclude;

use report::Report;
use scene::Scene;

/// Moves a running virtual machine between two nodes
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Number of moves
    #[arg(long, default_value_t = 3)]
    moves: usize,
    /// Only with this many disks, instead of one and two
    #[arg(long)]
    disks: Option<usize>,
    /// Only this way of moving memory: pre-copy, post-copy or hybrid
    #[arg(long)]
    memory: Option<String>,
    /// MiB of each disk
    #[arg(long, default_value_t = 256)]
    disk_mib: u64,
}

/// Modes of memory moves.
const MEMORY_MODES: [&str; 3] = ["pre-copy", "post-copy", "hybrid"];

pub(crate) fn play(arguments: &Arguments) -> ExitCode {
    let mut report = Report::default();
    for scene in scenes(arguments) {
        match scene.play() {
            Ok(played) => report.add(played),
            Err(error) => {
                eprintln!("\n{scene}: the demo could not finish: {error}");
                return ExitCode::FAILURE;
            }
        }
    }
    report.judge();
    conclude("demo-vm", &report, report.is_good())
}

/// Returns the scenes: one disk with the default memory mode, then two disks with each mode.
fn scenes(arguments: &Arguments) -> Vec<Scene> {
    let modes: Vec<String> = match &arguments.memory {
        Some(mode) => vec![mode.clone()],
        None => MEMORY_MODES.map(str::to_owned).to_vec(),
    };
    let scene = |disks: usize, memory: &String| Scene {
        moves: arguments.moves,
        disks,
        disk_mib: arguments.disk_mib,
        memory: memory.clone(),
    };
    match arguments.disks {
        Some(disks) => modes.iter().map(|mode| scene(disks, mode)).collect(),
        None => {
            let mut all = vec![scene(1, &modes[0])];
            all.extend(modes.iter().map(|mode| scene(2, mode)));
            all
        }
    }
}
