//! A guest and its moves.

use std::io;

use godwit_testkit::Cluster;
use godwit_testkit::cluster::{ClusterOptions, MemoryPool, Node, release_binary};
use godwit_testkit::vm::{DirtyPages, GuestLoad, NodeGuest, NodeMachine, PointerChase, VM};
use serde_json::Value;

use crate::memory::report::{Mode, Moved, Played};

/// Milliseconds between two beats of the guest: the resolution of a blackout.
const BEAT_MS: u64 = 2;

/// The parameters of one guest's moves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scene {
    pub(crate) guest_mib: u64,
    pub(crate) rounds: usize,
    pub(crate) disk_mib: u64,
}

impl Scene {
    /// Starts the machine, moves it there and back in each mode, and lets the guest check everything.
    pub(crate) fn play(self) -> io::Result<Played> {
        println!("\nguest of {} MiB", self.guest_mib);
        let options = ClusterOptions {
            godwit: release_binary()?,
            tls: true,
        };
        let pool = MemoryPool::new()?;
        let cluster = pool.cluster(&["a", "b"], options)?;
        let guest = self.start(&cluster)?;
        println!("{}", Moved::HEADINGS);
        let mut moves = Vec::new();
        for mode in [Mode::StayInPool, Mode::ZeroCopy] {
            for _ in 0..self.rounds {
                for (from, to) in [("a", "b"), ("b", "a")] {
                    let moved =
                        self.move_once(&guest, cluster.node(from), cluster.node(to), mode)?;
                    println!("{from} -> {to}  {moved}");
                    moves.push(moved);
                }
            }
        }
        let a = cluster.node("a");
        let finished = guest.finish(a)?;
        println!(
            "the guest made {} writes and compared everything: {} errors, {} mismatches; \
             the file systems are clean",
            finished.writes, finished.errors, finished.mismatches
        );
        a.godwit(&["vm", "stop", VM, "--force"]).json()?;
        if !pool.is_empty()? {
            return Err(io::Error::other("the pool is not free again"));
        }
        Ok(Played {
            moves,
            guest_errors: finished.errors + finished.mismatches,
        })
    }

    /// Starts a guest that uses about half of its memory, and writes to a quarter of its memory again and again.
    fn start(self, cluster: &Cluster) -> io::Result<NodeGuest> {
        let load = GuestLoad {
            pointer_chase: PointerChase {
                mib: self.guest_mib / 4,
                percent: 25,
            },
            dirty_pages: DirtyPages {
                mib: self.guest_mib / 4,
                rate_mib: 64,
            },
            beat_ms: BEAT_MS,
            ..GuestLoad::default()
        };
        let machine = NodeMachine {
            memory_mib: self.guest_mib,
            memory_pool: Some(MemoryPool::NAME.to_owned()),
            ..NodeMachine::default()
        };
        let guest = NodeGuest::start_machine(cluster, "a", (2, self.disk_mib), &load, &machine)?;
        guest.loads_on_memory_work()?;
        Ok(guest)
    }

    fn move_once(self, guest: &NodeGuest, from: &Node, to: &Node, mode: Mode) -> io::Result<Moved> {
        let mut options = vec!["--memory", "zero-copy", "--verify"];
        if mode == Mode::StayInPool {
            options.push("--stay-in-pool");
        }
        let (shown, gaps) = guest.migrate(from, to.name(), &options)?;
        let mut by_mover = 0;
        if mode == Mode::ZeroCopy {
            let memory = guest.memory_moved(to)?;
            by_mover = local(&memory)?;
            guest.alive()?;
            // The way back is the same, with the memory visible to both nodes.
            to.godwit(&["vm", "memory", VM, "--to", "pool"]).json()?;
            guest.alive()?;
        }
        Moved::new(self.guest_mib, mode, &shown, gaps, by_mover)
    }
}

/// Returns the bytes moved to the node; fails unless all have moved.
fn local(memory: &Value) -> io::Result<u64> {
    let moved = memory["moving"]["bytes_moved"].as_u64().unwrap_or(0);
    let all = memory["bytes"].as_u64();
    if memory["bytes_in_pool"] == 0 && Some(moved) == all {
        return Ok(moved);
    }
    Err(io::Error::other(format!(
        "not all of the memory followed: {memory}"
    )))
}
