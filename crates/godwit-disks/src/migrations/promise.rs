//! The promise of a migration to the guest: the request, checked against the guest's measured latency.

use std::time::Duration;

use godwit_block::engine::{EngineHandle, LatencyBaseline};
use godwit_core::sla::LatencyTarget;
use godwit_core::{Arrivals, GuestLoad};
use tokio::sync::oneshot;

use godwit_api::{ErrorBody, ErrorCode};

/// Fewest requests for a statement about the guest's latency.
const FEWEST_REQUESTS: u64 = 100;

/// Fewest requests for a statement about the 99.99th percentile.
const FEWEST_FOR_AUTOMATIC: u64 = 10_000;

/// Requests in a million that may exceed the limit of an automatic promise, which is about the 99.99th percentile.
const AUTOMATIC_ALLOWANCE: u32 = 100;

/// The shortest limit of an automatic promise. A longer limit allows so much data in flight that a guest with hardly
/// enough throughput loses a part of it.
const LEAST_LIMIT: Duration = Duration::from_millis(3);

/// The longest limit promised to a closed-loop guest just because such a guest gets less while its disk moves.
const MOST_FOR_CLOSED_LOOP: Duration = Duration::from_millis(20);

/// The shortest limit promised to a guest whose latency is not known well.
const IDLE_LIMIT: Duration = Duration::from_millis(10);

/// The requested promise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// A quarter above the guest's current latency.
    Auto,
    /// No promise.
    Off,
    /// This target.
    Target(LatencyTarget),
}

impl Asked {
    /// Parses `auto`, `off` or a target. No text means `auto`.
    ///
    /// # Errors
    /// [`ErrorCode::Invalid`].
    pub fn parse(disk: &str, text: Option<&str>) -> Result<Self, ErrorBody> {
        match text.map(str::trim) {
            None | Some("auto") => Ok(Self::Auto),
            Some("off") => Ok(Self::Off),
            Some(text) => text.parse().map(Self::Target).map_err(|error| {
                let shown: String = text.chars().take(64).collect();
                ErrorBody::new(
                    ErrorCode::Invalid,
                    format!("disk {disk}: the latency target {shown:?} cannot be read: {error}"),
                )
                .hint("write auto, off, or a percentile and a time like 'p99.99<2ms'")
            }),
        }
    }
}

/// The guest's recent latency without a migration.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Measured {
    requests: u64,
    load: Option<GuestLoad>,
    median: Duration,
    /// At the promised percentile.
    promised: Duration,
}

impl Measured {
    /// Returns the longest wait of a closed-loop guest, which gets less while its disk moves.
    fn share(&self) -> Duration {
        let takes_all = self
            .load
            .is_some_and(|load| load.arrivals == Arrivals::ClosedLoop);
        if takes_all {
            (self.median * GuestLoad::CLOSED_LOOP_PARTS).min(MOST_FOR_CLOSED_LOOP)
        } else {
            Duration::ZERO
        }
    }
}

/// The promise, with the warnings for the user.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Promise {
    pub target: Option<LatencyTarget>,
    /// The guest's current load: `auto` promises room for as much. `None` if the user stated the promise.
    pub(crate) guest_load: Option<GuestLoad>,
    /// The longest wait of a waking guest for the migration. `None` if no latency was requested and the guest has shown
    /// none: the migration then uses its own limit.
    pub(crate) wake_up_limit: Option<Duration>,
    pub warnings: Vec<String>,
}

/// Asks the engine for the guest's recent latency. Returns `None` if the engine has ended.
pub(crate) async fn measure(engine: Option<EngineHandle>) -> Option<LatencyBaseline> {
    let (reply, answer) = oneshot::channel();
    let reply = move |baseline| {
        // The waiting request may be gone.
        let _ = reply.send(baseline);
    };
    engine?.latency_baseline(Box::new(reply));
    answer.await.ok().flatten()
}

impl Measured {
    /// Returns the latency at the requested percentile. `None` without a promise.
    fn of(baseline: &LatencyBaseline, asked: Asked) -> Option<Self> {
        let quantile = match asked {
            Asked::Off => return None,
            Asked::Auto => quantile(AUTOMATIC_ALLOWANCE),
            Asked::Target(target) => quantile(target.allowed_per_million),
        };
        Some(Self {
            requests: baseline.requests(),
            load: baseline.load(),
            median: baseline.at_quantile(0.5),
            promised: baseline.at_quantile(quantile),
        })
    }
}

fn quantile(allowed_per_million: u32) -> f64 {
    f64::from(1_000_000 - allowed_per_million) / 1e6
}

/// Settles the promise to a guest with this latency without a migration: at the start, and when another promise
/// replaces the first.
///
/// # Errors
/// [`ErrorCode::Invalid`] if the target is below the median latency of the guest's requests without a migration.
pub(crate) fn settle(
    disk: &str,
    asked: Asked,
    baseline: Option<&LatencyBaseline>,
) -> Result<Promise, ErrorBody> {
    let measured = baseline.and_then(|baseline| Measured::of(baseline, asked));
    settle_for(disk, asked, measured)
}

fn settle_for(disk: &str, asked: Asked, measured: Option<Measured>) -> Result<Promise, ErrorBody> {
    let measured = measured.filter(|measured| measured.requests >= FEWEST_REQUESTS);
    let mut warnings = Vec::new();
    let target = match asked {
        Asked::Off => None,
        Asked::Auto => Some(automatic(measured)),
        Asked::Target(target) => {
            if let Some(measured) = measured {
                warnings.extend(compare(disk, target, measured)?);
            }
            Some(target)
        }
    };
    // A stated target is about latency alone: any throughput left over belongs to the migration.
    let guest_load = (asked == Asked::Auto).then(|| {
        let seen = measured.and_then(|measured| measured.load);
        seen.unwrap_or(GuestLoad::NOT_SEEN)
    });
    let wake_up_limit = target
        .filter(|_| asked != Asked::Auto || measured.is_some())
        .map(|target| target.limit);
    Ok(Promise {
        target,
        guest_load,
        wake_up_limit,
        warnings,
    })
}

fn automatic(measured: Option<Measured>) -> LatencyTarget {
    let limit = match measured {
        None => IDLE_LIMIT,
        Some(measured) => {
            // With a quarter to spare, in steps of 0.1 ms.
            let limit = (measured.promised * 5 / 4).max(measured.share());
            let limit = Duration::from_micros((limit.as_micros() as u64).next_multiple_of(100));
            let least = if measured.requests < FEWEST_FOR_AUTOMATIC {
                IDLE_LIMIT
            } else {
                LEAST_LIMIT
            };
            limit.max(least)
        }
    };
    LatencyTarget {
        limit,
        allowed_per_million: AUTOMATIC_ALLOWANCE,
    }
}

/// Compares a target with the guest's current latency. Returns a warning if the target is tight.
fn compare(
    disk: &str,
    target: LatencyTarget,
    measured: Measured,
) -> Result<Option<String>, ErrorBody> {
    let limit = target.limit;
    let Measured {
        median, promised, ..
    } = measured;
    if limit < median {
        return Err(ErrorBody::new(
            ErrorCode::Invalid,
            format!(
                "disk {disk}: the latency target {target} cannot be kept: without a migration half \
                 of the guest's requests take longer than {median:?}"
            ),
        )
        .hint("allow a higher latency, or leave the choice to the node with auto"));
    }
    Ok((limit < promised).then(|| {
        format!(
            "disk {disk}: the target {target} is shorter than what the guest has at that percentile \
             without a migration, {promised:?}: the migration will pause often, and may not come to \
             its end"
        )
    }))
}

#[cfg(test)]
mod tests {
    use godwit_core::Arrivals;

    use super::*;

    fn guest(requests: u64, median_us: u64, promised_us: u64) -> Option<Measured> {
        guest_with(Arrivals::OpenLoop, requests, median_us, promised_us)
    }

    fn guest_with(
        arrivals: Arrivals,
        requests: u64,
        median_us: u64,
        promised_us: u64,
    ) -> Option<Measured> {
        Some(Measured {
            requests,
            load: Some(GuestLoad {
                per_second: requests / 10,
                arrivals,
            }),
            median: Duration::from_micros(median_us),
            promised: Duration::from_micros(promised_us),
        })
    }

    fn target(text: &str) -> Asked {
        Asked::Target(text.parse().expect(text))
    }

    fn shown(promise: &Promise) -> Option<String> {
        promise.target.map(|target| target.to_string())
    }

    #[test]
    fn the_automatic_promise_is_a_quarter_more_than_the_guest_has_but_not_too_little() {
        for (baseline, expected) in [
            (None, "p99.99<10ms"),
            (guest(99, 50_000, 50_000), "p99.99<10ms"),
            (guest(9_999, 90, 200), "p99.99<10ms"),
            (guest(10_000, 90, 200), "p99.99<3ms"),
            (guest(100, 9_000, 16_000), "p99.99<20ms"),
            (guest(50_000, 90, 2400), "p99.99<3ms"),
            (guest(50_000, 90, 2401), "p99.99<3.1ms"),
            (guest(50_000, 90, 8061), "p99.99<10.1ms"),
        ] {
            let promise = settle_for("root", Asked::Auto, baseline).expect("a promise");
            assert_eq!(shown(&promise).as_deref(), Some(expected));
            assert!(promise.warnings.is_empty());
        }
    }

    #[test]
    fn a_guest_that_takes_all_it_can_get_may_wait_for_its_share() {
        let promised = |arrivals, median_us, promised_us| {
            let guest = guest_with(arrivals, 50_000, median_us, promised_us);
            shown(&settle_for("root", Asked::Auto, guest).expect("a promise"))
        };
        for (median_us, promised_us, expected) in [
            (100, 2000, "p99.99<3ms"),
            (449, 2000, "p99.99<7.2ms"),
            (450, 8000, "p99.99<10ms"),
            (2000, 3000, "p99.99<20ms"),
            (2000, 30_000, "p99.99<37.5ms"),
        ] {
            let promise = promised(Arrivals::ClosedLoop, median_us, promised_us);
            assert_eq!(promise.as_deref(), Some(expected));
        }
        for arrivals in [Arrivals::OpenLoop, Arrivals::Unknown] {
            let promise = promised(arrivals, 450, 2000);
            assert_eq!(promise.as_deref(), Some("p99.99<3ms"), "{arrivals:?}");
        }
    }

    #[test]
    fn a_guest_that_wakes_up_is_promised_what_was_asked_for_or_measured_and_no_guess() {
        let limit = |asked, measured| {
            let promise = settle_for("root", asked, measured).expect("a promise");
            promise.wake_up_limit
        };
        let busy = guest(50_000, 90, 8000);
        assert_eq!(limit(Asked::Auto, None), None);
        assert_eq!(limit(Asked::Off, busy), None);
        assert_eq!(limit(Asked::Auto, busy), Some(Duration::from_millis(10)));
        let asked_for = limit(target("p99<2ms"), None);
        assert_eq!(asked_for, Some(Duration::from_millis(2)));
    }

    #[test]
    fn an_automatic_promise_is_not_taken_for_one_that_was_stated() {
        let load = |asked| {
            settle_for("root", asked, None)
                .expect("a promise")
                .guest_load
        };
        assert_eq!(load(Asked::Auto), Some(GuestLoad::NOT_SEEN));
        assert_eq!(load(target("p99<2ms")), None);
        assert_eq!(load(Asked::Off), None);
    }

    #[test]
    fn a_promise_that_the_disk_alone_breaks_is_refused() {
        let error =
            settle_for("root", target("p99<2ms"), guest(200, 3000, 5000)).expect_err("not kept");
        assert_eq!(error.code, ErrorCode::Invalid);
        for part in ["root", "p99<2ms", "3ms"] {
            assert!(error.message.contains(part), "{part}: {}", error.message);
        }
        assert!(error.hint.is_some());
        // Nothing is known of an idle guest.
        let idle = guest(99, 3000, 5000);
        let promise = settle_for("root", target("p99<2ms"), idle).expect("a promise");
        assert!(promise.warnings.is_empty());
    }

    #[test]
    fn a_promise_that_the_disk_hardly_keeps_is_warned_of() {
        let slow_at_times = guest(1000, 100, 3000);
        let warned = settle_for("root", target("p99<2ms"), slow_at_times).expect("a promise");
        assert_eq!(shown(&warned).as_deref(), Some("p99<2ms"));
        let [warning] = &warned.warnings[..] else {
            panic!("{warned:?}")
        };
        for part in ["root", "3ms", "p99<2ms"] {
            assert!(warning.contains(part), "{part}: {warning}");
        }
        let kept = settle_for("root", target("p99<3ms"), slow_at_times).expect("a promise");
        assert!(kept.warnings.is_empty());
    }

    #[test]
    fn what_is_no_promise_is_refused_with_an_example() {
        assert_eq!(Asked::parse("root", None), Ok(Asked::Auto));
        assert_eq!(Asked::parse("root", Some(" auto ")), Ok(Asked::Auto));
        assert_eq!(Asked::parse("root", Some("off")), Ok(Asked::Off));
        for text in ["", "on", "2ms", "p100<2ms", "p99<0ms"] {
            let error = Asked::parse("root", Some(text)).expect_err(text);
            assert_eq!(error.code, ErrorCode::Invalid, "{text}");
            assert!(error.message.contains("root"), "{text}: {}", error.message);
            assert!(error.hint.expect("a hint").contains("p99.99<2ms"));
        }
    }
}
