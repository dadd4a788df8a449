//! The options of a migration.

mod in_flight;
mod policy;
mod push;
mod rounds;
#[cfg(test)]
mod tests;

use godwit_block::engine::InterfaceCounter;
use godwit_core::units::Bytes;
use godwit_core::wire::{MAX_PLACE, Place};
use godwit_core::{MAX_MOVED, MAX_PULLED, MAX_VERIFIED};

pub(crate) use self::in_flight::InFlight;
pub(super) use self::policy::{policy, transfer};
use self::push::push;
pub(crate) use self::push::push_options;
pub(crate) use self::rounds::round_options;
use self::rounds::rounds;
use super::promise::Asked;
use godwit_api::text::format_seconds;
use godwit_api::{ErrorBody, ErrorCode, MigrateRequest, MigrationSettings};
use godwit_peers::names;

/// Bytes per chunk unless requested.
const DEFAULT_CHUNK: u64 = 1 << 20;
/// Bytes per chunk while the guest does I/O, or with a requested window.
const BUSY_CHUNK: u64 = 256 << 10;
/// Bytes in flight while the guest is idle, unless a window is requested. While chunks are quick, the window grows up
/// to the longest window.
const IDLE_WINDOW: u64 = 8 << 20;
/// Bytes in flight while the guest does I/O, unless a window is requested: a double write queues behind the data in
/// flight.
const BUSY_WINDOW: u64 = 1 << 20;
/// Most chunks in flight: the number of an engine's slots.
const MAX_WINDOW_CHUNKS: u64 = 64;
/// Longest chunk in bytes.
const MAX_CHUNK: u64 = 16 << 20;
/// Most bytes in flight: the size of an engine's chunk memory.
const MAX_WINDOW: u64 = 32 << 20;

/// Returns the requested place of the disk at the destination.
///
/// # Errors
/// [`ErrorCode::Invalid`] if the request names two places, or an impossible one.
pub fn place(request: &MigrateRequest) -> Result<Option<Place>, ErrorBody> {
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

/// Returns the settings of a request, with defaults for everything left open. The promise to the guest is settled
/// later, by [`promise`](super::promise).
///
/// # Errors
/// [`ErrorCode::Invalid`] naming the option and its range.
pub fn settings(request: &MigrateRequest, asked: Asked) -> Result<MigrationSettings, ErrorBody> {
    let invalid = |text: String, hint: String| {
        Err(ErrorBody::new(ErrorCode::Invalid, format!("disk {}: {text}", request.disk)).hint(hint))
    };
    let chunk_bytes = request
        .chunk_bytes
        .unwrap_or_else(|| match request.window_bytes {
            // As many chunks as there are slots.
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
        policy: request.policy.unwrap_or_default(),
        policy_reason: None,
        rounds: rounds(request)?,
        push: push(request)?,
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
        whole: request.whole,
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

/// Checks that a disk of this size can be moved, and verified if requested.
///
/// # Errors
/// [`ErrorCode::Invalid`] if the disk is too large.
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
    if settings.push.is_some() && size > MAX_PULLED {
        let text = format!(
            "disk {disk} has {size}: by the policy {} only disks of up to {MAX_PULLED} can be moved",
            settings.policy.name()
        );
        return Err(ErrorBody::new(ErrorCode::Invalid, text).hint("choose another policy"));
    }
    if !settings.verify || size <= MAX_VERIFIED {
        return Ok(());
    }
    let text = format!(
        "disk {disk} has {size}: it cannot be verified, only disks of up to {MAX_VERIFIED}"
    );
    Err(ErrorBody::new(ErrorCode::Invalid, text).hint("move it without --verify"))
}

/// Checks that a disk can be moved in time if its image occupies `taken` bytes.
///
/// # Errors
/// [`ErrorCode::Invalid`] if the bandwidth is too low for the deadline.
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

/// Opens the counter of the interface with the budget.
///
/// # Errors
/// [`ErrorCode::Invalid`] if the interface does not exist.
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
