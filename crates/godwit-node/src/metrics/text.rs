//! Prometheus' own text format, made from the OpenMetrics text.
//!
//! The formats differ in little here: OpenMetrics describes a counter under its name without `_total`, and has a line
//! for the end.

use std::collections::HashSet;

/// Returns the same metrics in the text format 0.0.4.
pub(super) fn from_openmetrics(metrics: &str) -> String {
    let counters: HashSet<&str> = metrics
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" counter"))
        .collect();
    let mut text = String::with_capacity(metrics.len() + 1024);
    for line in metrics.lines() {
        match described(line) {
            Some(("EOF" | "UNIT", ..)) => continue,
            Some((what, name, rest)) if counters.contains(name) => {
                text.extend(["# ", what, " ", name, "_total ", rest]);
            }
            _ => text.push_str(line),
        }
        text.push('\n');
    }
    text
}

/// Returns the parts of a line of metadata: its kind, its metric, and its text.
fn described(line: &str) -> Option<(&str, &str, &str)> {
    let rest = line.strip_prefix("# ")?;
    let (what, rest) = rest.split_once(' ').unwrap_or((rest, ""));
    let (name, rest) = rest.split_once(' ').unwrap_or((rest, ""));
    Some((what, name, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_described_by_the_name_that_they_have() {
        let metrics = "\
# HELP reads Reads that # were answered.
# TYPE reads counter
reads_total{disk=\"a b\"} 7
# HELP size The size.
# TYPE size gauge
# UNIT size bytes
size{disk=\"# TYPE x counter\"} 1.5
# EOF
";
        let expected = "\
# HELP reads_total Reads that # were answered.
# TYPE reads_total counter
reads_total{disk=\"a b\"} 7
# HELP size The size.
# TYPE size gauge
size{disk=\"# TYPE x counter\"} 1.5
";
        assert_eq!(from_openmetrics(metrics), expected);
    }
}
