//! The scene in which a disk is served and does not move.
//!
//! Each server takes its turn alone, on the same image, under the same client; the order rotates from round to round.
//! The client is the testkit's own, the same for both front ends. Every read is checked against the last write, and the
//! whole image after each turn.

mod goals;

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::Duration;

use godwit_bench::interrupt;
use godwit_bench::steady::{FrontEnd, Kind, Measured, Server, Stamps, Workload};
use godwit_testkit::process::scratch_dir;
use godwit_testkit::report::median;

pub(crate) use self::goals::targets;
use crate::noise::{AGREE, await_quiet, disagree};
use crate::options::{Extent, Options};
use crate::report::Steady;
use crate::suite::Suite;

/// The extent of the scene.
struct Plan {
    rounds: usize,
    image_bytes: u64,
    depths: &'static [usize],
    seconds: Duration,
}

impl Plan {
    const fn new(extent: Extent) -> Self {
        match extent {
            Extent::Quick => Self {
                rounds: 3,
                image_bytes: 512 << 20,
                depths: &[1, 32],
                seconds: Duration::from_millis(400),
            },
            Extent::Full => Self {
                rounds: 5,
                image_bytes: 1 << 30,
                depths: &[1, 32, 128],
                seconds: Duration::from_secs(2),
            },
        }
    }
}

/// All measurements by server and load.
type Cells = BTreeMap<(FrontEnd, Workload, Kind), Vec<Measured>>;

/// Measures all servers of both front ends.
pub(crate) fn run(options: &Options, suite: &mut Suite) -> io::Result<()> {
    let plan = Plan::new(suite.report.extent);
    let rounds = options.rounds.unwrap_or(plan.rounds);
    let dir = scratch_dir()?;
    let image = dir.path().join("disk.img");
    let mut stamps = Stamps::create(&image, plan.image_bytes)?;
    let mut cells = Cells::new();
    for round in 0..rounds {
        for front_end in FrontEnd::ALL {
            let servers = front_end.servers();
            for turn in 0..servers.len() {
                let kind = servers[(round + turn) % servers.len()];
                println!(
                    "steady: round {} of {rounds}, {}, {}",
                    round + 1,
                    front_end.name(),
                    kind.name()
                );
                let turn = Turn {
                    kind,
                    front_end,
                    image: &image,
                    dir: dir.path(),
                    seed: round as u64,
                };
                // Flushes the last turn's pages, so that they do not disturb this turn.
                rustix::fs::sync();
                await_quiet()?;
                turn.take(&plan, &mut stamps, &mut cells)?;
                suite.report.steady = cells.iter().map(summary).collect();
                suite.save()?;
            }
        }
    }
    print(&suite.report.steady);
    Ok(())
}

struct Turn<'a> {
    kind: Kind,
    front_end: FrontEnd,
    image: &'a Path,
    dir: &'a Path,
    seed: u64,
}

impl Turn<'_> {
    fn take(&self, plan: &Plan, stamps: &mut Stamps, cells: &mut Cells) -> io::Result<()> {
        let failed = |error: io::Error| match error.kind() {
            io::ErrorKind::Interrupted => error,
            _ => io::Error::other(format!("{} failed: {error}", self.kind.name())),
        };
        self.measure(plan, stamps, cells).map_err(failed)?;
        rustix::fs::sync();
        let wrong = |error| {
            let name = self.kind.name();
            io::Error::other(format!("what {name} wrote does not read back: {error}"))
        };
        stamps.check_image().map_err(wrong)
    }

    fn measure(&self, plan: &Plan, stamps: &mut Stamps, cells: &mut Cells) -> io::Result<()> {
        let server = Server::start(self.kind, self.front_end, self.image, self.dir)?;
        for workload in Workload::all(plan.depths) {
            interrupt::check()?;
            let measured = workload.run(&server, stamps, plan.seconds, self.seed)?;
            let key = (self.front_end, workload, self.kind);
            cells.entry(key).or_default().push(measured);
        }
        server.stop()
    }
}

fn summary(
    (&(front_end, workload, kind), rounds): (&(FrontEnd, Workload, Kind), &Vec<Measured>),
) -> Steady {
    let each = |pick: fn(&Measured) -> f64| rounds.iter().map(pick).collect::<Vec<_>>();
    let of = |pick| median(&each(pick));
    Steady {
        front_end: front_end.name().to_owned(),
        server: kind.name().to_owned(),
        bs: workload.bytes as u64,
        depth: workload.depth as u32,
        rw: workload.access.name().to_owned(),
        iops: of(|run| run.iops),
        p50_us: of(|run| run.p50_us),
        cpu_seconds_per_mio: of(Measured::cpu_seconds_per_mio),
        direct: kind.is_direct(),
        disk_options: kind.disk_options().to_owned(),
        noisy: disagree(&each(Measured::cpu_seconds_per_mio), AGREE),
        rounds: rounds.clone(),
    }
}

fn print(rows: &[Steady]) {
    println!(
        "{:<15} {:<10} {:>5} {:<29} {:>9} {:>10} {:>10} {:>10}",
        "front end", "rw", "depth", "server", "IOPS", "p50 µs", "CPU s/Mio", "client CPU"
    );
    for row in rows {
        let client: Vec<f64> = row.rounds.iter().map(|run| run.client_cpu).collect();
        println!(
            "{:<15} {:<10} {:>5} {:<29} {:>9.0} {:>10.1} {:>10.2} {:>10.2}{}",
            row.front_end,
            row.rw,
            row.depth,
            row.server,
            row.iops,
            row.p50_us,
            row.cpu_seconds_per_mio,
            median(&client),
            if row.noisy { "  rounds disagree" } else { "" }
        );
    }
}
