//! The scenes with guests: every policy beside the others, many machines at once, and the node's own choice.

use std::io;
use std::time::Duration;

use godwit_testkit::report::Report;
use serde_json::Value;

use super::load::{Kind, Plan};
use super::measure::{Case, measure};
use super::policy::{ALL, OF_CHOICE, OF_MANY, Policy, REMOTE};
use super::site::Site;
use super::sizes::Sizes;
use crate::common::in_turns;

/// Time to watch the load of a disk at the other node.
const WATCHED: Duration = Duration::from_secs(10);
/// Total write rate of all machines of `many`: less than a third of a link of 1 Gbit/s.
const TOGETHER: u64 = 30_000_000;
/// The loads of `choice`: idle, a log written at a pace, random blocks all over the disk at a third of the link, and
/// writes at full speed.
pub(super) const LOADS: [Kind; 4] = [Kind::Idle, Kind::AsyncWr, Kind::Random, Kind::Ior];

/// Measures every policy under either load, on a thin disk with a base image.
pub(super) fn table(site: &Site, sizes: &Sizes, report: &mut Report) -> io::Result<()> {
    site.push_image(sizes.disk(), sizes.base())?;
    for plan in [sizes.ior(), sizes.async_wr()] {
        let case = |policy: Policy| Case {
            policy,
            plan: plan.clone(),
            disk: sizes.disk(),
            base: sizes.base(),
            machines: 1,
            limit: sizes.limit(),
            watched: if sizes.quick { WATCHED / 3 } else { WATCHED },
        };
        turns("table", &ALL, sizes.rounds(), site, report, case)?;
    }
    Ok(())
}

/// Measures each number of machines that leave at once, over one link.
pub(super) fn many(site: &Site, sizes: &Sizes, report: &mut Report) -> io::Result<()> {
    let machines = sizes.machines();
    let most = machines.last().copied().unwrap_or(1) as u64;
    for machines in machines {
        let case = |policy: Policy| Case {
            policy,
            plan: Plan {
                kind: Kind::AsyncWr,
                region: 0..sizes.machine(),
                rate: Some(TOGETHER / most),
                seed: 1,
            },
            disk: 2 * sizes.machine(),
            base: 0,
            machines,
            limit: sizes.limit(),
            watched: Duration::ZERO,
        };
        turns("many", &OF_MANY, sizes.rounds(), site, report, case)?;
    }
    Ok(())
}

/// Measures the node's choice beside every policy that it could have chosen.
pub(super) fn choice(site: &Site, sizes: &Sizes, report: &mut Report) -> io::Result<()> {
    let bytes = 2 * sizes.choice();
    for kind in LOADS {
        let rate = match kind {
            Kind::Idle | Kind::Ior => None,
            Kind::AsyncWr => Some(6_000_000),
            Kind::Random => Some((sizes.link_bytes() / 3.0) as u64),
        };
        let case = |policy: Policy| Case {
            policy,
            plan: Plan {
                kind,
                region: 0..bytes,
                rate,
                seed: 1,
            },
            disk: bytes,
            base: 0,
            machines: 1,
            limit: sizes.limit(),
            watched: Duration::ZERO,
        };
        turns("choice", &OF_CHOICE, sizes.rounds(), site, report, case)?;
    }
    Ok(())
}

/// Measures these policies in turns. A policy that was given up once in `table` would be given up again.
fn turns(
    scene: &str,
    policies: &[Policy],
    rounds: usize,
    site: &Site,
    report: &mut Report,
    case: impl Fn(Policy) -> Case,
) -> io::Result<()> {
    in_turns(rounds, policies.len(), |_, turn| {
        let case = case(policies[turn]);
        let name = case.policy.name;
        let hopeless = |run: &Value| {
            run["policy"] == name
                && run["load"] == case.plan.kind.name()
                && run["converged"] == false
        };
        let before = report.runs("moves").only("scene", scene).filter(hopeless);
        if scene == "table" && case.policy != REMOTE && !before.0.is_empty() {
            return Ok(());
        }
        let mut run = measure(site, &case)?;
        run["scene"] = scene.into();
        report.add("moves", run)
    })
}
