//! Human-readable quantities, in addition to `godwit_core::units`.

use std::fmt::Write as _;

/// Formats a time span in its two largest units: `850 ms`, `6.3 s`, `2m 05s`, `3h 20m`.
pub fn format_seconds(seconds: f64) -> String {
    if !seconds.is_finite() || seconds < 0.0 {
        return "unknown".to_owned();
    }
    if seconds < 0.9995 {
        return format!("{:.0} ms", seconds * 1000.0);
    }
    if seconds < 9.95 {
        return format!("{seconds:.1} s");
    }
    let whole = seconds.round() as u64;
    let (days, hours, minutes) = (whole / 86_400, whole / 3600 % 24, whole / 60 % 60);
    let mut text = String::new();
    // Never fails: the writer is a `String`.
    let _ = match (days, hours, minutes) {
        (0, 0, 0) => write!(text, "{whole} s"),
        (0, 0, _) => write!(text, "{minutes}m {:02}s", whole % 60),
        (0, _, _) => write!(text, "{hours}h {minutes:02}m"),
        _ => write!(text, "{days}d {hours:02}h"),
    };
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_use_the_unit_that_fits() {
        for (seconds, text) in [
            (0.0, "0 ms"),
            (0.85, "850 ms"),
            (6.34, "6.3 s"),
            (42.4, "42 s"),
            (59.6, "1m 00s"),
            (125.0, "2m 05s"),
            (12_000.0, "3h 20m"),
            (90_000.0, "1d 01h"),
            (f64::NAN, "unknown"),
            (f64::INFINITY, "unknown"),
        ] {
            assert_eq!(format_seconds(seconds), text, "{seconds}");
        }
    }
}
