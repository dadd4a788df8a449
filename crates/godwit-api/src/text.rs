//! Sizes, rates and times as people write and read them, in addition to `godwit_core::units`.

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

/// The reason why a text is not a size or a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidSize(String);

impl std::fmt::Display for InvalidSize {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for InvalidSize {}

/// Parses a size in bytes: `4096`, `512K`, `10G`, `1.5T`, `20GiB`, `20GB`. A bare letter and `KiB` count in 1024s, as
/// in qemu-img and fio; `KB` counts in 1000s. Case does not matter.
pub fn parse_size(text: &str) -> Result<u64, InvalidSize> {
    let wrong = |why: &str| {
        InvalidSize(format!(
            "{why}; write a number of bytes, or one with K, M, G or T, like 10G"
        ))
    };
    let text = text.trim();
    let split = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() || number.ends_with('.') || fraction.contains('.') {
        return Err(wrong("it does not start with a number"));
    }
    let factor = unit_factor(unit.trim())
        .ok_or_else(|| wrong(&format!("{:?} is not a unit", unit.trim())))?;
    // A fraction of 12 digits resolves a byte of a terabyte; more digits would only overflow.
    if fraction.len() > 12 {
        return Err(wrong("it has too many digits after the point"));
    }
    let scale = 10_u128.pow(fraction.len() as u32);
    let digits: u128 = format!("{whole}{fraction}")
        .parse()
        .map_err(|_| wrong("the number is too large"))?;
    let scaled = digits
        .checked_mul(u128::from(factor))
        .ok_or_else(|| wrong("the number is too large"))?;
    if !scaled.is_multiple_of(scale) {
        return Err(wrong("it is not a whole number of bytes"));
    }
    u64::try_from(scaled / scale).map_err(|_| wrong("the number is too large"))
}

/// Parses bytes per second: a size, optionally followed by `/s`.
pub fn parse_rate(text: &str) -> Result<u64, InvalidSize> {
    let trimmed = text.trim();
    parse_size(trimmed.strip_suffix("/s").unwrap_or(trimmed))
}

/// Parses a time in whole seconds: `90s`, `30m`, `2h`, `1h30m`, `1d`.
pub fn parse_duration(text: &str) -> Result<u64, InvalidSize> {
    let wrong = |why: &str| InvalidSize(format!("{why}; write a time like 90s, 30m or 1h30m"));
    let mut rest = text.trim();
    if rest.is_empty() {
        return Err(wrong("it does not start with a number"));
    }
    let mut seconds = 0_u64;
    while !rest.is_empty() {
        let digits = rest
            .find(|c: char| !c.is_ascii_digit())
            .ok_or_else(|| wrong("the unit is missing"))?;
        let (number, after) = rest.split_at(digits);
        let end = after
            .find(|c: char| c.is_ascii_digit())
            .unwrap_or(after.len());
        let (unit, next) = after.split_at(end);
        let number: u64 = match number {
            "" => return Err(wrong("it does not start with a number")),
            number => number
                .parse()
                .map_err(|_| wrong("the number is too large"))?,
        };
        let factor = match unit.trim() {
            "s" => 1,
            "m" | "min" => 60,
            "h" => 3600,
            "d" => 86_400,
            other => return Err(wrong(&format!("{other:?} is not a unit of time"))),
        };
        seconds = number
            .checked_mul(factor)
            .and_then(|part| seconds.checked_add(part))
            .ok_or_else(|| wrong("the number is too large"))?;
        rest = next;
    }
    Ok(seconds)
}

fn unit_factor(unit: &str) -> Option<u64> {
    let unit = unit.to_ascii_lowercase();
    let (prefix, base) = match unit.as_str() {
        "" | "b" => return Some(1),
        other => match other.strip_suffix("ib") {
            Some(prefix) => (prefix, 1024_u64),
            None => match other.strip_suffix('b') {
                Some(prefix) => (prefix, 1000),
                None => (other, 1024),
            },
        },
    };
    let power = ["k", "m", "g", "t", "p"]
        .iter()
        .position(|&letter| letter == prefix)?;
    Some(base.pow(power as u32 + 1))
}

/// Formats a number of bytes with at most four significant digits: `1.50 GiB`.
pub fn format_bytes(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    // 1023.95 would print as 1024.0.
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = match value {
        value if value < 9.995 => 2,
        value if value < 99.95 => 1,
        _ => 0,
    };
    format!("{value:.digits$} {}", UNITS[unit])
}

/// Formats bytes per second: `312 MiB/s`.
pub fn format_rate(bytes_per_second: f64) -> String {
    format!("{}/s", format_bytes(bytes_per_second.max(0.0) as u64))
}

/// Formats a request's latency: `180 µs`, `1.2 ms`, `2.5 s`.
pub fn format_micros(micros: u64) -> String {
    match micros {
        0..1000 => format!("{micros} µs"),
        1000..9950 => format!("{:.1} ms", micros as f64 / 1e3),
        9950..999_500 => format!("{:.0} ms", micros as f64 / 1e3),
        _ => format_seconds(micros as f64 / 1e6),
    }
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

    #[test]
    fn sizes_are_read_in_every_spelling() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("512b", 512),
            ("4k", 4096),
            ("10G", 10 << 30),
            ("10 GiB", 10 << 30),
            ("10gib", 10 << 30),
            ("10GB", 10_000_000_000),
            ("1.5M", 3 << 19),
            ("0.5K", 512),
            ("2T", 2 << 40),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        assert_eq!(parse_rate("100M/s"), Ok(100 << 20));
        assert_eq!(parse_rate("100M"), Ok(100 << 20));
    }

    #[test]
    fn what_is_no_size_is_refused_with_the_reason_and_an_example() {
        for (text, why) in [
            ("", "start with a number"),
            ("G", "start with a number"),
            ("-1G", "start with a number"),
            (".5G", "start with a number"),
            ("1.G", "start with a number"),
            ("1.2.3G", "start with a number"),
            ("10X", "\"X\" is not a unit"),
            ("10 GG", "is not a unit"),
            ("10G/s", "is not a unit"),
            ("1.0001K", "not a whole number of bytes"),
            ("1.0000000000001T", "too many digits"),
            ("18446744073709551616", "too large"),
            ("99999999999P", "too large"),
            ("9999999999999999999999999999999999999999999", "too large"),
        ] {
            let message = parse_size(text).expect_err(text).to_string();
            assert!(message.contains(why), "{text:?}: {message}");
            assert!(message.contains("like 10G"), "{text:?}: {message}");
        }
    }

    #[test]
    fn times_are_read_with_their_units() {
        for (text, seconds) in [
            ("90s", 90),
            ("30m", 1800),
            ("2h", 7200),
            ("1h30m", 5400),
            (" 1d 2h ", 93_600),
            ("0s", 0),
        ] {
            assert_eq!(parse_duration(text), Ok(seconds), "{text}");
        }
        for (text, why) in [
            ("", "start with a number"),
            ("m", "start with a number"),
            ("-3m", "start with a number"),
            ("30", "unit is missing"),
            ("1h30", "unit is missing"),
            ("1.5h", "is not a unit"),
            ("3w", "\"w\" is not a unit"),
            ("99999999999999999999s", "too large"),
            ("999999999999999999d", "too large"),
        ] {
            let message = parse_duration(text).expect_err(text).to_string();
            assert!(message.contains(why), "{text:?}: {message}");
            assert!(message.contains("like 90s"), "{text:?}: {message}");
        }
    }

    #[test]
    fn bytes_are_short_and_never_show_1024_of_a_unit() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (1536, "1.50 KiB"),
            ((10 << 20) + (1 << 19), "10.5 MiB"),
            (999 << 20, "999 MiB"),
            ((1 << 30) - 1, "1.00 GiB"),
            (u64::MAX, "16.0 EiB"),
        ] {
            assert_eq!(format_bytes(bytes), text, "{bytes}");
        }
        assert_eq!(format_rate(312.0 * 1048576.0), "312 MiB/s");
        assert_eq!(format_rate(-1.0), "0 B/s");
    }

    #[test]
    fn latencies_use_the_unit_that_fits() {
        for (micros, text) in [
            (0, "0 µs"),
            (999, "999 µs"),
            (1200, "1.2 ms"),
            (45_000, "45 ms"),
            (2_500_000, "2.5 s"),
        ] {
            assert_eq!(format_micros(micros), text, "{micros}");
        }
    }
}
