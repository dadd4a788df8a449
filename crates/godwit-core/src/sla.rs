//! Promises to a guest: bounds on the latency of its requests while its disk moves.

use core::fmt;
use core::str::FromStr;
use core::time::Duration;

/// A promise such as *p99.99 < 2 ms*: of a million requests at most [`Self::allowed_per_million`] take longer than
/// [`Self::limit`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LatencyTarget {
    /// Longest latency of all but the slowest requests; not zero.
    pub limit: Duration,
    /// Requests of a million that may be slower: 100 for the 99.99th percentile. Less than a million.
    pub allowed_per_million: u32,
}

/// Reason why a text is not a [`LatencyTarget`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidLatencyTarget {
    /// The text is not of the form `pNN<TIME`.
    #[error("'{0}' is not of the form p99.99<2ms")]
    Form(String),
    /// The percentile is not a number below 100 with at most four decimals.
    #[error(
        "'{0}' is no percentile: it must be a number from 0 to below 100, with at most 4 decimals"
    )]
    Percentile(String),
    /// The time is not a positive number with a unit.
    #[error("'{0}' is no latency: it must be a positive number followed by ns, us, ms or s")]
    Limit(String),
}

impl FromStr for LatencyTarget {
    type Err = InvalidLatencyTarget;

    /// Reads `p99.99<2ms`: a percentile with at most four decimals, and a time in `ns`, `us`, `ms` or `s`, at most an
    /// hour. Spaces around the parts are ignored.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let form = || InvalidLatencyTarget::Form(text.to_owned());
        let (percentile, limit) = text.trim().split_once('<').ok_or_else(form)?;
        let percentile = percentile.trim().strip_prefix('p').ok_or_else(form)?;
        let limit = limit.trim();
        let per_million = decimal(percentile, 4)
            .filter(|&value| value < 1_000_000)
            .ok_or_else(|| InvalidLatencyTarget::Percentile(percentile.to_owned()))?;
        let bad_limit = || InvalidLatencyTarget::Limit(limit.to_owned());
        let (number, nanoseconds) = [("ns", 0), ("us", 3), ("µs", 3), ("ms", 6), ("s", 9)]
            .iter()
            .find_map(|&(unit, digits)| Some((limit.strip_suffix(unit)?.trim(), digits)))
            .ok_or_else(bad_limit)?;
        let nanoseconds = decimal(number, nanoseconds)
            .filter(|&value| value > 0 && value <= 3_600_000_000_000)
            .ok_or_else(bad_limit)?;
        Ok(Self {
            limit: Duration::from_nanos(nanoseconds),
            allowed_per_million: 1_000_000 - per_million as u32,
        })
    }
}

/// Returns a decimal number times ten to the power of `decimals`; `None` if the text is not a number, has more
/// decimals, or is too large.
fn decimal(text: &str, decimals: usize) -> Option<u64> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() || fraction.len() > decimals || !digits(whole) || !digits(fraction) {
        return None;
    }
    let scale = 10_u64.checked_pow(decimals as u32)?;
    let padded = format!("{fraction:0<decimals$}");
    let fraction: u64 = if padded.is_empty() {
        0
    } else {
        padded.parse().ok()?
    };
    whole
        .parse::<u64>()
        .ok()?
        .checked_mul(scale)?
        .checked_add(fraction)
}

impl fmt::Display for LatencyTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percentile = 1_000_000 - self.allowed_per_million;
        let fraction = format!("{:04}", percentile % 10_000);
        let fraction = fraction.trim_end_matches('0');
        write!(f, "p{}", percentile / 10_000)?;
        if !fraction.is_empty() {
            write!(f, ".{fraction}")?;
        }
        write!(f, "<{:?}", self.limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promises_are_read_and_written() {
        for (text, micros, allowed, shown) in [
            ("p99.99<2ms", 2000, 100, "p99.99<2ms"),
            (" p50 < 1.5ms ", 1500, 500_000, "p50<1.5ms"),
            ("p99.9999<250us", 250, 1, "p99.9999<250µs"),
            ("p0<1s", 1_000_000, 1_000_000, "p0<1s"),
            ("p9<250000ns", 250, 910_000, "p9<250µs"),
        ] {
            let target: LatencyTarget = text.parse().expect(text);
            assert_eq!(target.limit, Duration::from_micros(micros), "{text}");
            assert_eq!(target.allowed_per_million, allowed, "{text}");
            assert_eq!(target.to_string(), shown);
            assert_eq!(shown.parse(), Ok(target));
        }
    }

    #[test]
    fn what_is_no_promise_is_refused_for_its_reason() {
        use InvalidLatencyTarget::{Form, Limit, Percentile};
        let failure = |text: &str| text.parse::<LatencyTarget>().expect_err(text);
        for text in ["", "2ms", "99<2ms", "p99", "p99>2ms"] {
            assert!(matches!(failure(text), Form(_)), "{text}");
        }
        for text in [
            "p100<2ms",
            "p<2ms",
            "p-1<2ms",
            "p99.99999<2ms",
            "pxx<2ms",
            "p1e3<2ms",
        ] {
            assert!(matches!(failure(text), Percentile(_)), "{text}");
        }
        for text in [
            "p99<",
            "p99<2",
            "p99<0ms",
            "p99<-2ms",
            "p99<ms",
            "p99<2m",
            "p99<99999999999999999999s",
            "p99<2h",
            "p99<3601s",
            "p99<0.0000001us",
        ] {
            assert!(matches!(failure(text), Limit(_)), "{text}");
        }
    }
}
