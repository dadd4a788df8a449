//! Every policy under either load, on a thin disk with a base image.

use std::io;
use std::time::Duration;

use crate::policies::measure::{Case, Measured, measure};
use crate::policies::policy::{ALL, REMOTE};
use crate::policies::report::{Cell, Report};
use crate::policies::site::Site;
use crate::policies::sizes::Sizes;

/// Time to watch the load of a disk at the other node.
const WATCHED: Duration = Duration::from_secs(10);

/// Measures the policies, in turns.
///
/// # Errors
/// As [`measure`].
pub(crate) fn run(site: &Site, sizes: &Sizes, report: &mut Report) -> io::Result<()> {
    site.push_image(sizes.disk(), sizes.base())?;
    let mut hopeless = Vec::new();
    for round in 0..sizes.rounds() {
        for plan in [sizes.ior(), sizes.async_wr()] {
            for turn in 0..ALL.len() {
                let policy = ALL[(turn + round) % ALL.len()];
                // A policy that was given up once would be given up again.
                if hopeless.contains(&(policy.name, plan.kind)) {
                    continue;
                }
                let case = Case {
                    policy,
                    plan: plan.clone(),
                    disk: sizes.disk(),
                    base: sizes.base(),
                    machines: 1,
                    limit: sizes.limit(),
                    watched: if sizes.quick { WATCHED / 3 } else { WATCHED },
                };
                let measured = measure(site, &case)?;
                if policy != REMOTE && !measured.converged {
                    hopeless.push((policy.name, plan.kind));
                }
                report.add(Cell::Table, round, measured)?;
            }
        }
    }
    Ok(())
}

/// Returns the measurements of a policy under a load.
pub(crate) fn of<'a>(
    report: &'a Report,
    policy: &'static str,
    load: crate::policies::load::Kind,
) -> impl Iterator<Item = &'a Measured> {
    let all = report.measured(Cell::Table);
    all.filter(move |it| it.policy == policy && it.load == load)
}
