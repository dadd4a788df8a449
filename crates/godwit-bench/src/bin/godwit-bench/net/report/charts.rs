//! Charts like the paper's Fig. 10 to 17: throughput of the clients and CPU use of the hosts during a move.

use std::io;
use std::path::{Path, PathBuf};

use godwit_bench::chart::{Chart, Line};

use super::PeerRuns;
use crate::net::loads::Load;
use crate::net::measure::{Moved, Sample};

/// Draws two charts for each load, from each peer's move with the median gap. Returns their files.
///
/// # Errors
/// I/O errors of the files.
pub(crate) fn draw(peers: &[PeerRuns], directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for load in Load::ALL {
        let moves: Vec<(&str, &Moved)> = peers
            .iter()
            .filter_map(|runs| Some((runs.peer.name(), usual(runs.of_load(load))?)))
            .collect();
        if moves.is_empty() {
            continue;
        }
        let mut add = |what: &str, title: &str, unit: &str, pick: fn(&Sample) -> f64| {
            let lines = moves.iter().map(|(name, moved)| Line {
                name: (*name).to_owned(),
                points: moved
                    .timeline
                    .iter()
                    .map(|sample| (sample.seconds, pick(sample)))
                    .collect(),
            });
            let path = directory.join(format!("{}-{what}.svg", load.name()));
            let chart = Chart {
                title: format!("{title}, {}", load.name()),
                x_label: "seconds since the move began".to_owned(),
                y_label: unit.to_owned(),
                logarithmic: false,
                lines: lines.collect(),
                shaded: Vec::new(),
                level: None,
            };
            chart.write(&path).map(|()| files.push(path))
        };
        add(
            "throughput",
            "What clients sent and got",
            "Mbit/s",
            |sample| sample.mbps,
        )?;
        add(
            "cpu",
            "QEMU, nodes and back ends at both hosts",
            "% of one processor",
            |sample| sample.cpu_percent,
        )?;
    }
    Ok(files)
}

/// Returns the move with the median gap, the longer one of two.
fn usual(mut moves: Vec<&Moved>) -> Option<&Moved> {
    moves.sort_by(|one, other| one.gap_ms.total_cmp(&other.gap_ms));
    moves.get(moves.len() / 2).copied()
}
