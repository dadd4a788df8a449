//! The goals of the figures.

use serde::Serialize;

use crate::rdma::breakdown::Summary;
use crate::rdma::{library, throughput};

/// A figure and its goal.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct Target {
    pub(crate) name: String,
    pub(crate) goal: &'static str,
    /// `None` if the figure was not measured.
    pub(crate) measured: Option<f64>,
    pub(crate) holds: bool,
}

fn target(name: String, goal: &'static str, measured: Option<f64>, limit: f64) -> Target {
    Target {
        name,
        goal,
        measured,
        holds: measured.is_some_and(|measured| measured <= limit),
    }
}

/// Returns all targets.
pub(crate) fn of(
    summaries: &[Summary],
    throughput: &[throughput::Run],
    library: &[library::Summary],
) -> Vec<Target> {
    let mut found = Vec::new();
    for side in ["sender", "receiver"] {
        let most = summaries
            .iter()
            .filter(|one| one.side == side)
            .map(|one| one.qps)
            .max();
        let Some(most) = most else {
            // Receivers do not move with --quick.
            continue;
        };
        let part = |pre_setup: bool| {
            let same =
                |one: &&Summary| one.side == side && one.qps == most && one.pre_setup == pre_setup;
            summaries.iter().find(same)?.part("restore_rdma")
        };
        let share = part(true)
            .zip(part(false))
            .map(|(with, without)| with / without);
        let name =
            format!("{side}, {most} queue pairs: restore_rdma with pre-setup by that without");
        found.push(target(name, "at most 0.1", share, 0.1));
    }
    let shares = throughput
        .iter()
        .filter_map(|run| Some(1.0 - run.after? / run.before?));
    found.push(target(
        "throughput that is missing after a move, by that before, at most of all moves".to_owned(),
        "at most 0.05",
        shares.max_by(f64::total_cmp),
        0.05,
    ));
    found.push(target(
        "throughput that is missing with the library, by that without, at most of all programs"
            .to_owned(),
        "at most 0.02",
        library
            .iter()
            .map(library::Summary::missing)
            .max_by(f64::total_cmp),
        0.02,
    ));
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rdma::breakdown::Run;
    use godwit_testkit::rdma::{Breakdown, Moved};

    #[test]
    fn the_largest_number_of_queue_pairs_is_judged() {
        let run = |qps, pre_setup, restore_rdma| Run {
            side: "sender",
            qps,
            pre_setup,
            round: 0,
            moved: Some(Moved {
                breakdown_ms: Breakdown {
                    restore_rdma,
                    ..Breakdown::default()
                },
                ..Moved::default()
            }),
            error: None,
        };
        let runs = [
            run(1, false, 10.0),
            run(1, true, 10.0),
            run(64, false, 100.0),
            run(64, true, 9.0),
        ];
        let targets = of(&Summary::all(&runs), &[], &[]);
        assert_eq!(targets[0].measured, Some(0.09));
        assert!(targets[0].holds && targets[0].name.contains("64 queue pairs"));
        // A figure that was not measured does not hold.
        assert_eq!(targets.len(), 3);
        for missing in &targets[1..] {
            assert!(missing.measured.is_none() && !missing.holds);
        }
    }
}
