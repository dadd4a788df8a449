//! Many machines that leave at once, over one link.

use std::io;
use std::time::Duration;

use crate::policies::load::{Kind, Plan};
use crate::policies::measure::{Case, measure};
use crate::policies::policy::OF_MANY;
use crate::policies::report::{Cell, Report};
use crate::policies::site::Site;
use crate::policies::sizes::Sizes;

/// Total write rate of all machines: less than a third of a link of 1 Gbit/s.
const TOGETHER: u64 = 30_000_000;

/// Measures each number of machines by each policy, in turns.
///
/// # Errors
/// As [`measure`].
pub(crate) fn run(site: &Site, sizes: &Sizes, report: &mut Report) -> io::Result<()> {
    let machines = sizes.machines();
    let most = machines.last().copied().unwrap_or(1) as u64;
    for round in 0..sizes.rounds() {
        for &machines in &machines {
            for turn in 0..OF_MANY.len() {
                let bytes = sizes.machine();
                let case = Case {
                    policy: OF_MANY[(turn + round) % OF_MANY.len()],
                    plan: Plan {
                        kind: Kind::AsyncWr,
                        region: 0..bytes,
                        rate: Some(TOGETHER / most),
                        seed: 1,
                    },
                    disk: 2 * bytes,
                    base: 0,
                    machines,
                    limit: sizes.limit(),
                    watched: Duration::ZERO,
                };
                let measured = measure(site, &case)?;
                report.add(Cell::Many, round, measured)?;
            }
        }
    }
    Ok(())
}
