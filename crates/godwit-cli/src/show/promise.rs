//! Texts about a migration's promise to the guest.

use godwit_api::{Migration, MigrationPromise, Obstacle, PauseReason};

use godwit_api::text::{format_bytes, format_micros, format_rate, format_seconds};

/// Formats a number with its noun: `1 pause`, `3 pauses`.
pub(crate) fn counted(count: u32, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// Returns the reason of a pause in words.
pub(crate) const fn reason_text(reason: PauseReason) -> &'static str {
    match reason {
        PauseReason::GuestLatency => "guest latency",
        PauseReason::LinkQueue => "queue on the link",
        PauseReason::InterfaceBudget => "interface budget",
    }
}

/// Returns the promise, and the breaches so far.
pub(crate) fn promised(migration: &Migration) -> Option<String> {
    let target = migration.options.as_ref()?.sla.as_ref()?;
    let auto = migration
        .options
        .as_ref()
        .is_some_and(|options| options.sla_auto);
    let mut text = format!("{target}{}", if auto { " (auto)" } else { "" });
    if let Some(promise) = migration
        .promise
        .as_ref()
        .filter(|promise| promise.periods > 0)
    {
        let (breached, periods) = (promise.breached_periods, promise.periods);
        let limit = promise.limit_us.map(format_micros).unwrap_or_default();
        text.push_str(&format!(
            ", a request above {limit} in {breached} of {periods} periods of 10 ms"
        ));
        if let Some(eased) = eased(promise) {
            text.push_str(&format!("; eased to {}", format_micros(eased)));
        }
    }
    Some(text)
}

/// Returns the latency allowed at the moment in microseconds, if clearly above the promise.
fn eased(promise: &MigrationPromise) -> Option<u64> {
    let limit = promise.limit_us?;
    promise
        .allowed_us
        .filter(|allowed| *allowed > limit + limit / 4)
}

/// Returns the number and duration of pauses.
pub(crate) fn pauses(promise: &MigrationPromise) -> Option<String> {
    let by_reason = [
        (PauseReason::GuestLatency, promise.pauses.guest_latency),
        (PauseReason::LinkQueue, promise.pauses.link_queue),
        (
            PauseReason::InterfaceBudget,
            promise.pauses.interface_budget,
        ),
    ];
    let total = promise.pauses.total();
    if total == 0 {
        return None;
    }
    let reasons: Vec<_> = by_reason
        .into_iter()
        .filter(|(_, count)| *count > 0)
        .map(|(reason, count)| format!("{} {count}", reason_text(reason)))
        .collect();
    let time = format_seconds(promise.paused_seconds);
    Some(format!("{total} ({}), {time} in all", reasons.join(", ")))
}

/// Returns the fate of delayed writes.
pub(crate) fn delayed(promise: &MigrationPromise) -> Option<String> {
    let facts = [
        (promise.delayed_bytes, "to send"),
        (promise.delayed_bytes_sent, "sent"),
        (promise.delayed_bytes_cancelled, "written again before that"),
    ];
    let facts: Vec<_> = facts
        .into_iter()
        .filter(|(bytes, _)| *bytes > 0)
        .map(|(bytes, what)| format!("{} {what}", format_bytes(bytes)))
        .collect();
    (!facts.is_empty()).then(|| facts.join(", "))
}

/// Returns the obstacle to the end of a migration, and the options to change. Most options cannot be changed while a
/// migration runs.
pub(crate) fn obstacle(migration: &Migration) -> Option<String> {
    let obstacle = migration.promise.as_ref()?.obstacle?;
    let options = migration.options.as_ref();
    let given = |rate: fn(&godwit_api::MigrationSettings) -> Option<u64>, name: &str| {
        let rate = options.and_then(rate)?;
        Some(format!("raise {name} (now {})", format_rate(rate as f64)))
    };
    let promised = options.and_then(|options| options.sla.as_deref());
    let higher = format!(
        "allow a higher latency with --sla{}",
        promised.map_or(String::new(), |target| format!(" (now {target})"))
    );
    let bandwidth = given(|options| options.max_bandwidth, "--max-bandwidth");
    let copies_again = options.is_some_and(|options| options.policy.usual.rounds().is_some());
    if obstacle == Obstacle::WriteRate && copies_again {
        let id = &migration.id;
        let slower = bandwidth.map_or(String::new(), |change| {
            format!(", or cancel it and start it again: {change}")
        });
        return Some(format!(
            "the guest writes faster than the link carries what is written again. It goes on trying; to end it with what \
             is there, 'godwit migration switch {id} --policy push-pull'{slower}"
        ));
    }
    let (why, changes) = match obstacle {
        Obstacle::Promise => (
            "the guest's promise leaves no room",
            vec![higher, "give --deadline".to_owned()],
        ),
        Obstacle::WriteRate => (
            "the guest writes faster than the link carries delayed writes",
            given(|options| options.delayed_write_rate, "--delayed-write-rate")
                .into_iter()
                .chain(bandwidth)
                .chain([higher])
                .collect(),
        ),
        Obstacle::InterfaceBudget => (
            "other traffic leaves nothing of the interface's budget",
            given(|options| options.interface_budget, "--interface-budget")
                .into_iter()
                .collect(),
        ),
        Obstacle::Bandwidth => (
            "the guest's writes, which are not held back, take all the bandwidth",
            bandwidth.into_iter().collect(),
        ),
        Obstacle::Deadline => (
            "at this rate it will not be done by its deadline",
            ["give it more time with --deadline".to_owned()]
                .into_iter()
                .chain(bandwidth)
                .chain(given(
                    |options| options.interface_budget,
                    "--interface-budget",
                ))
                .collect(),
        ),
    };
    Some(format!(
        "{why}. It goes on trying; to change that, cancel it and start it again: {}",
        changes.join(", or ")
    ))
}

#[cfg(test)]
mod tests {
    use godwit_api::{MigrationSettings, Pauses, Policy};

    use super::*;
    use crate::fixture;

    fn stuck(obstacle: Option<Obstacle>) -> Migration {
        Migration {
            options: Some(MigrationSettings {
                policy: Policy::default(),
                policy_reason: None,
                rounds: None,
                push: None,
                window_bytes: 32 << 20,
                idle_window_bytes: 8 << 20,
                busy_window_bytes: 1 << 20,
                chunk_bytes: 512 << 10,
                busy_chunk_bytes: 128 << 10,
                max_bandwidth: Some(100 << 20),
                verify: false,
                whole: false,
                sla: Some("p99.99<3.2ms".to_owned()),
                sla_auto: true,
                delayed_writes: true,
                with_guest: false,
                delayed_write_rate: Some(10 << 20),
                deadline_seconds: Some(60),
                interface: Some("eth0".to_owned()),
                interface_budget: Some(1 << 30),
            }),
            promise: Some(MigrationPromise {
                limit_us: Some(3200),
                allowed_us: Some(3300),
                periods: 500,
                breached_periods: 3,
                obstacle,
                ..MigrationPromise::default()
            }),
            ..fixture::migration()
        }
    }

    #[test]
    fn every_obstacle_says_why_and_what_to_change() {
        assert_eq!(obstacle(&stuck(None)), None);
        for (what, why, changes) in [
            (
                Obstacle::Promise,
                "leaves no room",
                &["--sla (now p99.99<3.2ms)", "--deadline"][..],
            ),
            (
                Obstacle::WriteRate,
                "writes faster",
                &[
                    "--delayed-write-rate (now 10.0 MiB/s)",
                    "--max-bandwidth (now 100 MiB/s)",
                    "--sla",
                ],
            ),
            (
                Obstacle::InterfaceBudget,
                "other traffic",
                &["--interface-budget (now 1.00 GiB/s)"],
            ),
            (
                Obstacle::Bandwidth,
                "the guest's writes",
                &["--max-bandwidth (now 100 MiB/s)"],
            ),
            (
                Obstacle::Deadline,
                "deadline",
                &["--deadline", "--max-bandwidth", "--interface-budget"],
            ),
        ] {
            let text = obstacle(&stuck(Some(what))).unwrap();
            assert!(text.contains(why), "{text}");
            for change in changes {
                assert!(text.contains(change), "{change}: {text}");
            }
        }
    }

    #[test]
    fn limits_that_were_not_given_need_not_be_raised() {
        let mut migration = stuck(Some(Obstacle::WriteRate));
        if let Some(options) = &mut migration.options {
            options.max_bandwidth = None;
            options.delayed_write_rate = None;
        }
        let text = obstacle(&migration).unwrap();
        assert!(!text.contains("--max-bandwidth"), "{text}");
        assert!(!text.contains("--delayed-write-rate"), "{text}");
        assert!(text.contains("--sla"), "{text}");
    }

    #[test]
    fn pre_copy_delays_no_writes_and_can_end_otherwise() {
        let mut migration = stuck(Some(Obstacle::WriteRate));
        if let Some(options) = &mut migration.options {
            options.policy = Policy::named("pre-copy").unwrap();
        }
        let text = obstacle(&migration).unwrap();
        let switch = format!(
            "'godwit migration switch {} --policy push-pull'",
            migration.id
        );
        assert!(text.contains(&switch), "{text}");
        assert!(text.contains("--max-bandwidth (now 100 MiB/s)"), "{text}");
        assert!(!text.contains("delayed"), "{text}");
    }

    #[test]
    fn a_promise_is_shown_with_how_it_was_kept() {
        let mut migration = stuck(None);
        assert_eq!(
            promised(&migration).unwrap(),
            "p99.99<3.2ms (auto), a request above 3.2 ms in 3 of 500 periods of 10 ms"
        );
        migration.promise.as_mut().unwrap().allowed_us = Some(8000);
        assert!(
            promised(&migration)
                .unwrap()
                .ends_with("10 ms; eased to 8.0 ms")
        );
        migration.options.as_mut().unwrap().sla = None;
        assert_eq!(promised(&migration), None);
    }

    #[test]
    fn pauses_and_delayed_writes_are_shown_when_there_are_any() {
        let mut promise = MigrationPromise::default();
        assert_eq!(pauses(&promise), None);
        assert_eq!(delayed(&promise), None);
        promise.pauses = Pauses {
            guest_latency: 12,
            link_queue: 0,
            interface_budget: 2,
        };
        promise.paused_seconds = 3.2;
        promise.delayed_bytes = 1 << 20;
        promise.delayed_bytes_sent = 3 << 20;
        assert_eq!(
            pauses(&promise).unwrap(),
            "14 (guest latency 12, interface budget 2), 3.2 s in all"
        );
        assert_eq!(
            delayed(&promise).unwrap(),
            "1.00 MiB to send, 3.00 MiB sent"
        );
    }
}
