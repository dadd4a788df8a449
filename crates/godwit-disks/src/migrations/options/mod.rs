//! The options of a migration: checked, completed with defaults, and passed on to the engine.

mod engine;
mod in_flight;
mod push;
mod rounds;
#[cfg(test)]
mod tests;

use godwit_block::engine::InterfaceCounter;
use godwit_core::units::Bytes;
use godwit_core::wire::{MAX_PLACE, Place};
use godwit_core::{MAX_MOVED, MAX_PULLED, MAX_VERIFIED};

pub(super) use self::engine::{Circumstances, engine};
pub(crate) use self::in_flight::InFlight;
use self::push::push;
pub(crate) use self::push::push_options;
pub(crate) use self::rounds::round_options;
use self::rounds::rounds;
use super::promise::Asked;
use godwit_api::text::format_seconds;
use godwit_api::{ErrorBody, ErrorCode, MigrateRequest, MigrationSettings, MoveOptions};
use godwit_peers::names;

/// An invalid option: the contradiction and a remedy.
struct Wrong {
    text: String,
    hint: String,
}

impl Wrong {
    fn new(text: impl Into<String>, hint: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            hint: hint.into(),
        }
    }

    /// Returns the error about a disk.
    fn of(self, disk: &str) -> ErrorBody {
        ErrorBody::new(ErrorCode::Invalid, format!("disk {disk}: {}", self.text)).hint(self.hint)
    }
}

/// Returns the requested place of the disk at the destination.
///
/// # Errors
/// [`ErrorCode::Invalid`] if the request names two places, or an impossible one.
pub fn place(request: &MigrateRequest) -> Result<Option<Place>, ErrorBody> {
    let invalid = |text: &str, hint: &str| Err(Wrong::new(text, hint).of(&request.disk));
    match (&request.pool, &request.into) {
        (None, None) => Ok(None),
        (Some(_), Some(_)) => invalid("a pool and a path are two places", "give one of them"),
        (Some(pool), None) => {
            names::check("pool", pool)?;
            Ok(Some(Place::Pool(pool.clone())))
        }
        (None, Some(path)) => {
            let possible = path.starts_with('/') && path.len() <= MAX_PLACE && !path.contains('\0');
            if !possible {
                return invalid(
                    &format!("{path:?} is no path that an image can have"),
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
    let chosen = complete(&request.options, request.with_guest, asked);
    chosen.map_err(|wrong| wrong.of(&request.disk))
}

fn complete(
    options: &MoveOptions,
    with_guest: bool,
    asked: Asked,
) -> Result<MigrationSettings, Wrong> {
    let sizes = in_flight::sizes(options)?;
    check_limits(options)?;
    Ok(MigrationSettings {
        policy: options.policy.unwrap_or_default(),
        policy_reason: None,
        rounds: rounds(options)?,
        push: push(options)?,
        window_bytes: sizes.window,
        idle_window_bytes: sizes.idle_window,
        busy_window_bytes: sizes.busy_window,
        chunk_bytes: sizes.chunk,
        busy_chunk_bytes: sizes.busy_chunk,
        max_bandwidth: options.max_bandwidth,
        verify: options.verify,
        whole: options.whole,
        with_guest,
        sla: None,
        sla_auto: asked == Asked::Auto,
        delayed_writes: delayed_writes(options, asked)?,
        delayed_write_rate: options.delayed_write_rate,
        deadline_seconds: options.deadline_seconds,
        interface: options.interface.clone(),
        interface_budget: options.interface_budget,
    })
}

/// Checks the limits of rate and time.
fn check_limits(options: &MoveOptions) -> Result<(), Wrong> {
    for (value, name) in [
        (options.max_bandwidth, "bandwidth"),
        (options.delayed_write_rate, "rate of delayed writes"),
        (options.interface_budget, "budget of the interface"),
    ] {
        if value == Some(0) {
            return Err(Wrong::new(
                format!("a {name} of 0 would never move anything"),
                "leave it out for as much as there is",
            ));
        }
    }
    if options.deadline_seconds == Some(0) {
        return Err(Wrong::new(
            "a deadline of 0 seconds is over before anything moves",
            "give it the time that you have, or leave it out",
        ));
    }
    let text = match (&options.interface, options.interface_budget) {
        (None, None) | (Some(_), Some(_)) => return Ok(()),
        (None, Some(_)) => "a budget of an interface needs the interface",
        (Some(_), None) => "an interface is watched only for its budget",
    };
    let hint = "give both the interface's name and its budget, or neither";
    Err(Wrong::new(text, hint))
}

/// Returns true if writes are delayed in pauses. Only a promise or a budget makes a move pause.
fn delayed_writes(options: &MoveOptions, asked: Asked) -> Result<bool, Wrong> {
    let pauses = asked != Asked::Off || options.interface_budget.is_some();
    let wanted = options.delayed_writes.unwrap_or(true);
    match (pauses, wanted) {
        (true, true) => Ok(true),
        _ if options.delayed_write_rate.is_none() => Ok(false),
        (true, false) => Err(Wrong::new(
            "a rate of delayed writes contradicts that there are to be none",
            "leave the rate out, or allow delayed writes",
        )),
        (false, _) => Err(Wrong::new(
            "without a promise to the guest no writes are delayed, and they have no rate",
            "leave the rate out, or give a latency target",
        )),
    }
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
            settings.policy.name
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
