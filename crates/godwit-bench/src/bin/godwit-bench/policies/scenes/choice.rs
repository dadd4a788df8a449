//! The node's choice beside every policy it could have chosen.

use std::io;
use std::time::Duration;

use crate::policies::load::{Kind, Plan};
use crate::policies::measure::{Case, measure};
use crate::policies::policy::OF_CHOICE;
use crate::policies::report::{Cell, Report};
use crate::policies::site::Site;
use crate::policies::sizes::Sizes;

/// The loads: idle, a log written at a pace, random blocks all over the disk at a third of the link, and writes at full
/// speed.
pub(crate) const LOADS: [Kind; 4] = [Kind::Idle, Kind::AsyncWr, Kind::Random, Kind::Ior];

/// Measures each load under each policy, in turns.
///
/// # Errors
/// As [`measure`].
pub(crate) fn run(site: &Site, sizes: &Sizes, report: &mut Report) -> io::Result<()> {
    let bytes = sizes.choice();
    for round in 0..sizes.rounds() {
        for kind in LOADS {
            for turn in 0..OF_CHOICE.len() {
                let case = Case {
                    policy: OF_CHOICE[(turn + round) % OF_CHOICE.len()],
                    plan: plan(kind, bytes, sizes),
                    disk: 2 * bytes,
                    base: 0,
                    machines: 1,
                    limit: sizes.limit(),
                    watched: Duration::ZERO,
                };
                let measured = measure(site, &case)?;
                report.add(Cell::Choice, round, measured)?;
            }
        }
    }
    Ok(())
}

fn plan(kind: Kind, bytes: u64, sizes: &Sizes) -> Plan {
    let rate = match kind {
        Kind::Idle | Kind::Ior => None,
        Kind::AsyncWr => Some(6_000_000),
        Kind::Random => Some((sizes.link_bytes() / 3.0) as u64),
    };
    Plan {
        kind,
        region: 0..2 * bytes,
        rate,
        seed: 1,
    }
}
