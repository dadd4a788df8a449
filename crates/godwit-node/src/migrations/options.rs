//! Which options a migration may run with.

use godwit_block::engine::InterfaceCounter;
use godwit_core::units::{Bytes, MigrationId, SECTOR_SIZE};
use godwit_core::wire::{MAX_PLACE, Place};
use godwit_core::{MAX_MOVED, MAX_VERIFIED, RoundOptions};
use rustls::crypto::aws_lc_rs;

use super::promise::Asked;
use crate::api::{ErrorBody, ErrorCode, MigrateRequest, MigrationSettings, Policy, RoundSettings};
use crate::names;
use godwit_api::text::format_seconds;

/// Bytes per copy when nothing else is asked for.
const DEFAULT_CHUNK: u64 = 1 << 20;
/// Bytes per copy while the guest does I/O, or with a window that is asked for.
const BUSY_CHUNK: u64 = 256 << 10;
/// Bytes in flight while the guest is idle, unless a window is asked for; more, up to the longest
/// window, while chunks are quick.
const IDLE_WINDOW: u64 = 8 << 20;
/// Bytes in flight while the guest does I/O, unless a window is asked for: a double write queues
/// behind what is in flight.
const BUSY_WINDOW: u64 = 1 << 20;
/// Most chunks in flight: what an engine has slots for.
const MAX_WINDOW_CHUNKS: u64 = 64;
/// Longest chunk in bytes.
const MAX_CHUNK: u64 = 16 << 20;
/// Most bytes in flight: what an engine has memory for.
const MAX_WINDOW: u64 = 32 << 20;
/// Longest block of which pre-copy remembers whether it was written.
const MAX_ROUND_BLOCK: u64 = 1 << 30;

/// Where the destination is to put the disk.
///
/// # Errors
/// [`ErrorCode::Invalid`] when the request says two things, or what cannot be.
pub(crate) fn place(request: &MigrateRequest) -> Result<Option<Place>, ErrorBody> {
    let invalid = |text: String, hint: &str| {
        Err(ErrorBody::new(ErrorCode::Invalid, format!("disk {}: {text}", request.disk)).hint(hint))
    };
    match (&request.pool, &request.into) {
        (None, None) => Ok(None),
        (Some(_), Some(_)) => invalid(
            String::from("a pool and a path are two places"),
            "give one of them",
        ),
        (Some(pool), None) => {
            names::check("pool", pool)?;
            Ok(Some(Place::Pool(pool.clone())))
        }
        (None, Some(path)) => {
            let possible = path.starts_with('/') && path.len() <= MAX_PLACE && !path.contains('\0');
            if !possible {
                return invalid(
                    format!("{path:?} is no path that an image can have"),
                    "give the whole path from /, at most 1024 bytes",
                );
            }
            Ok(Some(Place::Path(path.clone())))
        }
    }
}

/// The options of a request, with what it leaves open filled in. The promise to the guest is settled
/// later, by [`promise`](super::promise).
///
/// # Errors
/// [`ErrorCode::Invalid`] naming the option and its range.
pub(crate) fn settings(
    request: &MigrateRequest,
    asked: Asked,
) -> Result<MigrationSettings, ErrorBody> {
    let invalid = |text: String, hint: String| {
        Err(ErrorBody::new(ErrorCode::Invalid, format!("disk {}: {text}", request.disk)).hint(hint))
    };
    let chunk_bytes = request
        .chunk_bytes
        .unwrap_or_else(|| match request.window_bytes {
            // As many chunks as there are slots for.
            Some(window) => window
                .div_ceil(MAX_WINDOW_CHUNKS)
                .next_multiple_of(4096)
                .clamp(BUSY_CHUNK, DEFAULT_CHUNK),
            None => DEFAULT_CHUNK,
        });
    if chunk_bytes == 0 || !chunk_bytes.is_multiple_of(4096) || chunk_bytes > MAX_CHUNK {
        return invalid(
            format!("a chunk of {} is not possible", Bytes(chunk_bytes)),
            format!("choose a multiple of 4 KiB up to {}", Bytes(MAX_CHUNK)),
        );
    }
    let most = MAX_WINDOW.min(chunk_bytes * MAX_WINDOW_CHUNKS);
    let window_bytes = request.window_bytes.unwrap_or(most);
    if window_bytes < chunk_bytes || window_bytes > most {
        return invalid(
            format!("a window of {} is not possible", Bytes(window_bytes)),
            format!(
                "with chunks of {0} choose {0} to {1}",
                Bytes(chunk_bytes),
                Bytes(most)
            ),
        );
    }
    for (value, name) in [
        (request.max_bandwidth, "bandwidth"),
        (request.delayed_write_rate, "rate of delayed writes"),
        (request.interface_budget, "budget of the interface"),
    ] {
        if value == Some(0) {
            return invalid(
                format!("a {name} of 0 would never move anything"),
                String::from("leave it out for as much as there is"),
            );
        }
    }
    if request.deadline_seconds == Some(0) {
        return invalid(
            String::from("a deadline of 0 seconds is over before anything moves"),
            String::from("give it the time that you have, or leave it out"),
        );
    }
    let budgeted = request.interface_budget.is_some();
    if budgeted != request.interface.is_some() {
        return invalid(
            String::from(if budgeted {
                "a budget of an interface needs the interface"
            } else {
                "an interface is watched only for its budget"
            }),
            String::from("give both the interface's name and its budget, or neither"),
        );
    }
    // Only a pause delays writes, and only a promise or a budget makes a migration pause.
    let pauses = asked != Asked::Off || budgeted;
    if request.delayed_write_rate.is_some() && !(pauses && request.delayed_writes) {
        return invalid(
            String::from(if pauses {
                "a rate of delayed writes contradicts that there are to be none"
            } else {
                "without a promise to the guest no writes are delayed, and they have no rate"
            }),
            String::from(if pauses {
                "leave the rate out, or allow delayed writes"
            } else {
                "leave the rate out, or give a latency target"
            }),
        );
    }
    let chosen_or = |usual: u64| {
        request
            .window_bytes
            .unwrap_or_else(|| usual.clamp(chunk_bytes, window_bytes))
    };
    Ok(MigrationSettings {
        policy: request.policy,
        rounds: rounds(request)?,
        window_bytes,
        idle_window_bytes: chosen_or(IDLE_WINDOW),
        busy_window_bytes: chosen_or(BUSY_WINDOW),
        chunk_bytes,
        busy_chunk_bytes: match (request.chunk_bytes, request.window_bytes) {
            (None, None) => BUSY_CHUNK,
            _ => chunk_bytes,
        },
        max_bandwidth: request.max_bandwidth,
        verify: request.verify,
        with_guest: request.with_guest,
        sla: None,
        sla_auto: asked == Asked::Auto,
        delayed_writes: request.delayed_writes && pauses,
        delayed_write_rate: request.delayed_write_rate,
        deadline_seconds: request.deadline_seconds,
        interface: request.interface.clone(),
        interface_budget: request.interface_budget,
    })
}

/// How pre-copy is to go over the disk; nothing with another policy.
///
/// # Errors
/// [`ErrorCode::Invalid`] for what is out of range, or is asked for with another policy.
fn rounds(request: &MigrateRequest) -> Result<Option<RoundSettings>, ErrorBody> {
    let invalid = |text: String, hint: &str| {
        Err(ErrorBody::new(ErrorCode::Invalid, format!("disk {}: {text}", request.disk)).hint(hint))
    };
    let (block, most, left) = (
        request.round_block_bytes,
        request.max_rounds,
        request.round_left_bytes,
    );
    if request.policy != Policy::PreCopy {
        if block.is_some() || most.is_some() || left.is_some() {
            return invalid(
                format!("the policy {} has no rounds", request.policy.name()),
                "leave out what is said of rounds, or choose the policy pre-copy",
            );
        }
        return Ok(None);
    }
    let usual = RoundOptions::default();
    let rounds = RoundSettings {
        block_bytes: block.unwrap_or(u64::from(usual.block_sectors) * SECTOR_SIZE),
        max_rounds: most.unwrap_or(usual.most_rounds),
        left_bytes: left.unwrap_or(usual.most_left.0),
    };
    let possible = 4096..=MAX_ROUND_BLOCK;
    if !possible.contains(&rounds.block_bytes) || !rounds.block_bytes.is_multiple_of(4096) {
        return invalid(
            format!("blocks of {} are not possible", Bytes(rounds.block_bytes)),
            "choose a multiple of 4 KiB up to 1 GiB",
        );
    }
    if rounds.max_rounds == 0 {
        return invalid(
            String::from("without a round nothing is copied"),
            "allow at least 1",
        );
    }
    Ok(Some(rounds))
}

/// Rounds as the engine takes them.
pub(crate) fn round_options(rounds: &RoundSettings) -> RoundOptions {
    RoundOptions {
        // At most 1 GiB.
        block_sectors: (rounds.block_bytes / SECTOR_SIZE) as u32,
        most_rounds: rounds.max_rounds,
        most_left: Bytes(rounds.left_bytes),
    }
}

/// Sees whether a disk of this size can be moved, and both copies compared if that is asked for.
///
/// # Errors
/// [`ErrorCode::Invalid`] when it is too large.
pub(crate) fn check_size(
    disk: &str,
    settings: &MigrationSettings,
    size: Bytes,
) -> Result<(), ErrorBody> {
    if size > MAX_MOVED {
        let text = format!("disk {disk} has {size}: only disks of up to {MAX_MOVED} can be moved");
        return Err(ErrorBody::new(ErrorCode::Invalid, text));
    }
    if let Some(rounds) = &settings.rounds {
        let largest = round_options(rounds).largest_disk();
        if size > largest {
            let block = Bytes(rounds.block_bytes);
            let text = format!(
                "disk {disk} has {size}: with blocks of {block} only disks of up to {largest} can be moved"
            );
            let hint = "choose longer ones with --round-block, or another policy";
            return Err(ErrorBody::new(ErrorCode::Invalid, text).hint(hint));
        }
    }
    if !settings.verify || size <= MAX_VERIFIED {
        return Ok(());
    }
    let text = format!(
        "disk {disk} has {size}: it cannot be verified, only disks of up to {MAX_VERIFIED}"
    );
    Err(ErrorBody::new(ErrorCode::Invalid, text).hint("move it without --verify"))
}

/// Sees whether the disk can be moved in time, whose image takes so many bytes.
///
/// # Errors
/// [`ErrorCode::Invalid`] when the bandwidth is too little for the deadline.
pub(crate) fn check_deadline(
    disk: &str,
    settings: &MigrationSettings,
    taken: u64,
) -> Result<(), ErrorBody> {
    let (Some(seconds), Some(most)) = (settings.deadline_seconds, settings.max_bandwidth) else {
        return Ok(());
    };
    let needed = taken.div_ceil(seconds.max(1));
    if needed <= most {
        return Ok(());
    }
    let longer = taken.div_ceil(most);
    Err(ErrorBody::new(
        ErrorCode::Invalid,
        format!(
            "disk {disk}: its {} take at least {} at {}/s, longer than the deadline of {}",
            Bytes(taken),
            format_seconds(longer as f64),
            Bytes(most),
            format_seconds(seconds as f64)
        ),
    )
    .hint(format!("allow {}/s or more, or more time", Bytes(needed))))
}

/// Opens the counter of the interface whose budget is to be kept.
///
/// # Errors
/// [`ErrorCode::Invalid`] when there is no such interface.
pub(crate) fn open_interface(
    disk: &str,
    settings: &MigrationSettings,
) -> Result<Option<InterfaceCounter>, ErrorBody> {
    let Some(name) = &settings.interface else {
        return Ok(None);
    };
    InterfaceCounter::open(name).map(Some).map_err(|error| {
        let shown: String = name.chars().take(64).collect();
        let there = std::fs::read_dir("/sys/class/net").into_iter().flatten();
        let mut there: Vec<_> = there
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .collect();
        there.sort();
        ErrorBody::new(
            ErrorCode::Invalid,
            format!("disk {disk}: the network interface {shown:?} cannot be watched: {error}"),
        )
        .hint(format!("this node has {}", there.join(", ")))
    })
}

/// How much may be in flight, as the controller counts it.
pub(crate) struct InFlight {
    /// Longest chunk.
    pub(crate) chunk_sectors: u32,
    /// Longest chunk while the guest does I/O.
    pub(crate) busy_chunk_sectors: u32,
    /// Most chunks.
    pub(crate) window_chunks: u16,
    /// Chunks while the guest is idle, however long they take.
    pub(crate) idle_window_chunks: u16,
    /// Chunks while the guest does I/O.
    pub(crate) busy_window_chunks: u16,
}

impl InFlight {
    /// What valid settings come to.
    pub(crate) const fn of(settings: &MigrationSettings) -> Self {
        Self {
            chunk_sectors: (settings.chunk_bytes / SECTOR_SIZE) as u32,
            busy_chunk_sectors: (settings.busy_chunk_bytes / SECTOR_SIZE) as u32,
            window_chunks: (settings.window_bytes / settings.chunk_bytes) as u16,
            idle_window_chunks: (settings.idle_window_bytes / settings.chunk_bytes) as u16,
            busy_window_chunks: (settings.busy_window_bytes / settings.busy_chunk_bytes) as u16,
        }
    }
}

/// A migration id that nobody has used.
///
/// # Errors
/// The system has no randomness.
pub(crate) fn new_id() -> Result<MigrationId, ErrorBody> {
    let mut id = [0; 16];
    aws_lc_rs::default_provider()
        .secure_random
        .fill(&mut id)
        .map_err(|_| {
            ErrorBody::new(
                ErrorCode::Internal,
                "the system gave no random bytes for a migration's id",
            )
        })?;
    Ok(MigrationId(id))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(chunk: Option<u64>, window: Option<u64>) -> MigrateRequest {
        MigrateRequest {
            disk: String::from("root"),
            to: String::from("b"),
            pool: None,
            into: None,
            policy: Policy::DoubleWrite,
            round_block_bytes: None,
            max_rounds: None,
            round_left_bytes: None,
            window_bytes: window,
            chunk_bytes: chunk,
            max_bandwidth: None,
            verify: false,
            with_guest: false,
            sla: None,
            delayed_writes: true,
            delayed_write_rate: None,
            deadline_seconds: None,
            interface: None,
            interface_budget: None,
        }
    }

    #[test]
    fn a_place_is_said_once_and_is_possible() {
        let asked = |pool: Option<&str>, into: Option<&str>| {
            place(&MigrateRequest {
                pool: pool.map(str::to_owned),
                into: into.map(str::to_owned),
                ..plain()
            })
        };
        let pool = Place::Pool(String::from("fast"));
        let path = Place::Path(String::from("/dev/vg0/d"));
        assert_eq!(asked(None, None), Ok(None));
        assert_eq!(asked(Some("fast"), None), Ok(Some(pool)));
        assert_eq!(asked(None, Some("/dev/vg0/d")), Ok(Some(path)));
        let long = format!("/{}", "d".repeat(MAX_PLACE));
        for (pool, into) in [
            (Some("fast"), Some("/dev/vg0/d")),
            (Some("../fast"), None),
            (None, Some("d.raw")),
            (None, Some("/d\0")),
            (None, Some(&*long)),
        ] {
            let refused = asked(pool, into).expect_err("not possible");
            assert_eq!(refused.code, ErrorCode::Invalid, "{refused}");
        }
    }

    fn plain() -> MigrateRequest {
        request(None, None)
    }

    fn refused(request: &MigrateRequest, asked: Asked) -> String {
        let error = settings(request, asked).expect_err("invalid");
        assert_eq!(error.code, ErrorCode::Invalid);
        assert!(error.message.starts_with("disk root: "), "{error}");
        assert!(error.hint.is_some(), "{error}");
        error.message
    }

    #[test]
    fn what_is_left_open_fits_what_is_given() {
        for (chunk, window) in [
            (None, None),
            (Some(4096), None),
            (Some(64 << 10), None),
            (Some(MAX_CHUNK), None),
            (None, Some(BUSY_CHUNK)),
            (None, Some(8 << 20)),
            (None, Some((9 << 20) + 1)),
            (None, Some(MAX_WINDOW)),
            (Some(1 << 20), Some(3 << 20)),
        ] {
            let case = format!("chunk {chunk:?}, window {window:?}");
            let settings = settings(&request(chunk, window), Asked::Off).expect("valid");
            let flight = InFlight::of(&settings);
            let most = flight.window_chunks;
            assert!(u64::from(most) <= MAX_WINDOW_CHUNKS, "{case}: {most}");
            for chunks in [flight.idle_window_chunks, flight.busy_window_chunks] {
                assert!((1..=most).contains(&chunks), "{case}: {chunks} of {most}");
            }
            assert!(flight.busy_chunk_sectors <= flight.chunk_sectors, "{case}");
            assert!(settings.window_bytes <= MAX_WINDOW, "{case}");
            let chosen = [settings.idle_window_bytes, settings.busy_window_bytes];
            if let Some(window) = window {
                assert_eq!(chosen, [window; 2], "{case}");
            }
            if let Some(chunk) = chunk {
                assert_eq!(settings.chunk_bytes, chunk, "{case}");
                assert_eq!(settings.busy_chunk_bytes, chunk, "{case}");
            }
        }
    }

    #[test]
    fn impossible_options_are_refused() {
        for (chunk, window) in [
            (Some(0), None),
            (Some(512), None),
            (Some(4097), None),
            (Some(MAX_CHUNK + 4096), None),
            (Some(8192), Some(4096)),
            (Some(4096), Some(4096 * (MAX_WINDOW_CHUNKS + 1))),
            (None, Some(u64::MAX)),
        ] {
            refused(&request(chunk, window), Asked::Auto);
        }
    }

    #[test]
    fn nothing_moves_at_a_rate_of_zero_or_in_no_time() {
        let (zero, eth0) = (Some(0), Some(String::from("eth0")));
        for (request, what) in [
            (
                MigrateRequest {
                    max_bandwidth: zero,
                    ..plain()
                },
                "bandwidth",
            ),
            (
                MigrateRequest {
                    delayed_write_rate: zero,
                    ..plain()
                },
                "delayed writes",
            ),
            (
                MigrateRequest {
                    interface_budget: zero,
                    interface: eth0,
                    ..plain()
                },
                "interface",
            ),
            (
                MigrateRequest {
                    deadline_seconds: zero,
                    ..plain()
                },
                "deadline",
            ),
        ] {
            let message = refused(&request, Asked::Auto);
            assert!(message.contains(what) && message.contains('0'), "{message}");
        }
    }

    #[test]
    fn an_interface_and_its_budget_go_together() {
        let budget = MigrateRequest {
            interface_budget: Some(1 << 20),
            ..plain()
        };
        assert!(refused(&budget, Asked::Auto).contains("needs the interface"));
        let lo = Some(String::from("lo"));
        let both = MigrateRequest {
            interface: lo.clone(),
            ..budget
        };
        let valid = settings(&both, Asked::Off).expect("valid");
        assert!(
            valid.delayed_writes,
            "a budget pauses without a promise, too"
        );
        open_interface("root", &valid)
            .expect("loopback")
            .expect("a counter");
        refused(
            &MigrateRequest {
                interface: lo,
                ..plain()
            },
            Asked::Auto,
        );
        let unknown = Some(String::from("no-such-if"));
        let unknown = settings(
            &MigrateRequest {
                interface: unknown,
                ..both
            },
            Asked::Auto,
        );
        let error = open_interface("root", &unknown.expect("valid")).expect_err("unknown");
        assert_eq!(error.code, ErrorCode::Invalid);
        assert!(error.message.contains("disk root") && error.message.contains("no-such-if"));
        assert!(error.hint.expect("a hint").contains("lo"));
    }

    #[test]
    fn writes_that_are_not_delayed_have_no_rate() {
        let rated = MigrateRequest {
            delayed_write_rate: Some(1 << 20),
            ..plain()
        };
        let valid = settings(&rated, Asked::Auto).expect("valid");
        assert_eq!(valid.delayed_write_rate, Some(1 << 20));
        assert!(refused(&rated, Asked::Off).contains("without a promise"));
        let never = MigrateRequest {
            delayed_writes: false,
            ..rated
        };
        assert!(refused(&never, Asked::Auto).contains("contradicts"));
        let never = MigrateRequest {
            delayed_write_rate: None,
            ..never
        };
        assert!(!settings(&never, Asked::Auto).expect("valid").delayed_writes);
        assert!(
            !settings(&plain(), Asked::Off)
                .expect("valid")
                .delayed_writes
        );
    }

    #[test]
    fn a_deadline_must_leave_the_bandwidth_enough_time() {
        let limited = |seconds, bandwidth| {
            let request = MigrateRequest {
                deadline_seconds: seconds,
                max_bandwidth: bandwidth,
                ..plain()
            };
            let settings = settings(&request, Asked::Auto).expect("valid");
            check_deadline("root", &settings, 1_000_001)
        };
        limited(None, Some(1)).expect("no deadline");
        limited(Some(1), None).expect("no limit");
        limited(Some(100), Some(10_001)).expect("enough");
        let error = limited(Some(100), Some(10_000)).expect_err("too little");
        assert_eq!(error.code, ErrorCode::Invalid);
        for part in [
            "disk root",
            "976 KiB (1000001 bytes)",
            "at least 1m 41s at 9.76 KiB (10000 bytes)/s",
            "the deadline of 1m 40s",
        ] {
            assert!(error.message.contains(part), "{part}: {}", error.message);
        }
        assert!(
            error
                .hint
                .expect("a hint")
                .contains("10001 bytes)/s or more")
        );
    }

    #[test]
    fn what_is_too_large_to_be_compared_is_refused_before_it_moves() {
        let settings = |verify| {
            let request = MigrateRequest { verify, ..plain() };
            settings(&request, Asked::Auto).expect("valid")
        };
        check_size("root", &settings(true), MAX_VERIFIED).expect("just fits");
        let larger = Bytes(1000 << 40);
        check_size("root", &settings(false), larger).expect("is not compared");
        let error = check_size("root", &settings(true), larger).expect_err("too large");
        for part in ["disk root has 1000 TiB", "up to 64 TiB"] {
            assert!(error.message.contains(part), "{part}: {}", error.message);
        }
    }

    #[test]
    fn what_is_too_large_to_be_moved_is_refused() {
        let settings = settings(&plain(), Asked::Auto).expect("valid");
        check_size("root", &settings, MAX_MOVED).expect("just fits");
        let rounds = |block_bytes| {
            let rounds = RoundSettings {
                block_bytes,
                max_rounds: 1,
                left_bytes: 0,
            };
            let settings = MigrationSettings {
                rounds: Some(rounds),
                ..settings.clone()
            };
            check_size("root", &settings, MAX_MOVED)
        };
        rounds(65536).expect("a bitmap of 2 GiB");
        rounds(1 << 30).expect("a short bitmap");
        let error = rounds(4096).expect_err("a bitmap of 32 GiB");
        assert!(error.message.contains("64 TiB"), "{error:?}");
        let error = check_size("root", &settings, Bytes(1 << 56)).expect_err("too large");
        for part in ["disk root has 64 PiB", "up to 1 PiB"] {
            assert!(error.message.contains(part), "{part}: {}", error.message);
        }
    }

    #[test]
    fn ids_differ() {
        assert_ne!(new_id().expect("random"), new_id().expect("random"));
    }
}
