//! A machine and its moves.

use std::fmt;
use std::io;

use godwit_testkit::Cluster;
use godwit_testkit::cluster::{ClusterOptions, release_binary};
use godwit_testkit::vm::{GuestLoad, NodeGuest};

use crate::vm::report::{Moved, Played};

/// The parameters of one machine's moves.
#[derive(Clone, Debug)]
pub(crate) struct Scene {
    pub(crate) moves: usize,
    pub(crate) disks: usize,
    pub(crate) disk_mib: u64,
    pub(crate) memory: String,
}

impl fmt::Display for Scene {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.disks == 1 { "" } else { "s" };
        write!(f, "{} disk{plural}, {} memory", self.disks, self.memory)
    }
}

impl Scene {
    /// Starts the machine, moves it there and back, and lets the guest check everything.
    pub(crate) fn play(&self) -> io::Result<Played> {
        println!("\n{self}");
        let options = ClusterOptions {
            godwit: release_binary()?,
            tls: true,
        };
        let cluster = Cluster::start_with(&["a", "b"], options)?;
        let guest = NodeGuest::start(
            &cluster,
            "a",
            self.disks,
            self.disk_mib,
            &GuestLoad::default(),
        )?;
        println!(
            "{:<8} {:>9} {:>13} {:>13} {:>15} {:>10} {:>10}",
            "move",
            "seconds",
            "gap host ms",
            "stopped ms",
            "switchover ms",
            "disks MB",
            "memory MB"
        );
        let mut migrations = Vec::new();
        let (mut from, mut to) = ("a", "b");
        for _ in 0..self.moves {
            let moved = self.move_once(&cluster, &guest, from, to)?;
            println!("{from} -> {to}   {moved}");
            migrations.push(moved);
            (from, to) = (to, from);
        }
        let finished = guest.finish(cluster.node(from))?;
        println!(
            "the guest made {} writes and compared everything: {} errors, {} mismatches; \
             the file systems are clean",
            finished.writes, finished.errors, finished.mismatches
        );
        Ok(Played {
            disks: self.disks,
            memory: self.memory.clone(),
            verified: migrations.iter().all(|moved| moved.verified),
            migrations,
            guest_errors: finished.errors + finished.mismatches,
            guest_writes: finished.writes,
            // `finish` fails if the file systems are not clean.
            fsck_clean: true,
        })
    }

    fn move_once(
        &self,
        cluster: &Cluster,
        guest: &NodeGuest,
        from: &str,
        to: &str,
    ) -> io::Result<Moved> {
        let options = ["--memory", &self.memory, "--verify"];
        let (shown, gaps) = guest.migrate(cluster.node(from), to, &options)?;
        Moved::new(from, to, &shown, gaps)
    }
}
