//! The targets of the scene `vm`: the promises for a moving disk hold with a machine, too.

use crate::report::Vm;
use crate::report::targets::Target;
use crate::scenes::vm::cell::load;

const GODWIT: &str = "godwit";
const NOT_CONVERGED: &str = "godwit did not converge";
/// Fraction of its throughput that a guest keeps.
const KEPT: f64 = 0.98;

/// Judges Godwit's cells against the peers' cells.
pub(crate) fn of(cells: &[Vm]) -> Vec<Target> {
    let ours = cells.iter().filter(|cell| cell.mover == GODWIT);
    ours.flat_map(|ours| of_load(ours, cells)).collect()
}

fn of_load(ours: &Vm, cells: &[Vm]) -> Vec<Target> {
    let name = |what: &str| format!("vm {}: {what}", load(ours.rate_mbps));
    let peers: Vec<&Vm> = cells
        .iter()
        .filter(|cell| cell.mover != GODWIT && cell.rate_mbps == ours.rate_mbps)
        .collect();
    let converged = f64::from(u8::from(ours.converged));
    let kept = |cell: &Vm| cell.guest.during.mbps / cell.guest.before.mbps;
    let mut targets = vec![
        Target::at_least(name("converged"), 1.0, converged),
        Target::at_least(name("throughput during / before"), KEPT, kept(ours)),
    ];
    for peer in peers.into_iter().filter(|peer| peer.converged) {
        let against = |what: &str| name(&format!("{what} / {}", peer.mover));
        let not_more = |what: &str, pick: fn(&Vm) -> Option<f64>| match pick(ours).zip(pick(peer)) {
            Some((ours, theirs)) => Target::at_most(against(what), 1.0, ours / theirs),
            None => Target::unknown(against(what) + ", at most", 1.0, NOT_CONVERGED),
        };
        targets.push(not_more("LM time", |cell| cell.lm_seconds));
        targets.push(not_more("blackout", |cell| cell.blackout_ms));
        // A guest cannot keep more than the whole rate, so the kept fractions may differ by the loss allowed to a
        // guest.
        targets.push(Target::at_least(
            against("throughput kept"),
            KEPT,
            kept(ours) / kept(peer),
        ));
    }
    targets
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenes::vm::cell::tests::{cell, moved};

    fn met(cells: &[Vm]) -> Vec<(String, bool)> {
        let short = |target: Target| {
            let name = target.name.trim_start_matches("vm 4.0 MB/s: ").to_owned();
            (name, target.met)
        };
        of(cells).into_iter().map(short).collect()
    }

    fn expect(cells: &[Vm], expected: &[(&str, bool)]) {
        let expected: Vec<_> = expected
            .iter()
            .map(|(name, met)| ((*name).to_owned(), *met))
            .collect();
        assert_eq!(met(cells), expected);
    }

    #[test]
    fn every_peer_that_converges_is_compared() {
        let mut slow = moved(90.0, 4.0, 4.0);
        slow.converged = false;
        let mut blocking = moved(3.0, 4.0, 2.0);
        blocking.blackout_ms = Some(99.0);
        let cells = [
            cell("godwit", vec![moved(2.0, 4.0, 3.9)]),
            cell("qemu-background", vec![slow]),
            cell("qemu-write-blocking", vec![blocking]),
        ];
        expect(
            &cells,
            &[
                ("converged, at least", true),
                ("throughput during / before, at least", false),
                ("LM time / qemu-write-blocking, at most", true),
                ("blackout / qemu-write-blocking, at most", false),
                ("throughput kept / qemu-write-blocking, at least", true),
            ],
        );
    }

    #[test]
    fn what_does_not_converge_meets_nothing_about_time() {
        let mut ours = moved(60.0, 4.0, 4.0);
        ours.converged = false;
        let cells = [
            cell("godwit", vec![ours]),
            cell("qemu-background", vec![moved(3.0, 4.0, 4.0)]),
        ];
        expect(
            &cells,
            &[
                ("converged, at least", false),
                ("throughput during / before, at least", true),
                ("LM time / qemu-background, at most", false),
                ("blackout / qemu-background, at most", false),
                ("throughput kept / qemu-background, at least", true),
            ],
        );
    }
}
