//! Disks as the API shows them.

use godwit_block::engine::{LatencySummary, Snapshot};
use godwit_core::request::RequestError;
use godwit_core::units::Sectors;
use godwit_core::{Progress, event};
use godwit_vhost::memory::LOST_PAGES;

use crate::disks::Disks;
use crate::disks::disk::{Disk, Inner};
use crate::disks::storage::image;
use godwit_api::{
    self, DeltaBy, DiskImage, DiskState, GuestLatency, IoCounters, MigrationDelta,
    MigrationPromise, Obstacle, PauseReason, Pauses,
};
use godwit_context::config::NodeConfig;

/// Returns the disk as the API shows it. Blocks while the file system describes a file.
pub fn disk(disks: &Disks, disk: &Disk) -> godwit_api::Disk {
    let config = &disks.context.config;
    let path = disk.lock().entry.path.clone();
    let allocated_bytes = image::allocated(&path);
    let inner = disk.lock();
    let snapshot = inner.engine.as_ref().map(|engine| engine.handle.snapshot());
    let state = inner.state();
    let base = inner.entry.base.as_ref();
    let fetching = inner.entry.fetches(&inner.record).is_some();
    let standing = base.zip(disks.users());
    let standing = standing
        .map(|(base, users)| users.standing(&disk.name, base, fetching))
        .unwrap_or_default();
    godwit_api::Disk {
        name: disk.name.clone(),
        size_bytes: Sectors(inner.entry.sectors).bytes().0,
        allocated_bytes,
        path: path.display().to_string(),
        managed: inner.entry.managed,
        state,
        status: status(&inner, state),
        epoch: inner.record.epoch.0,
        counterpart: inner.entry.counterpart.clone(),
        moved_to: inner.entry.moved_to.clone(),
        clients: disk.clients(),
        serves: snapshot.as_ref().is_some_and(|snapshot| snapshot.serves),
        migration: inner
            .activity
            .migration()
            .or_else(|| inner.in_doubt())
            .map(|migration| migration.to_string()),
        nbd: nbd_uris(config, &disk.name),
        io: snapshot.as_ref().map(counters).unwrap_or_default(),
        latency: snapshot
            .as_ref()
            .map(|s| latency(&s.latency))
            .unwrap_or_default(),
        missing_bytes: snapshot
            .as_ref()
            .and_then(|s| s.missing)
            .map(|missing| missing.0),
        owes: inner.record.owes().is_some(),
        kept: inner.entry.kept.is_some(),
        image: base.map(|base| DiskImage {
            name: base.image.clone(),
            content: base.manifest.clone(),
            fetching,
            prefetch: base.prefetch,
            trouble: inner.image_trouble.clone(),
            noted: !fetching || !standing.unnoted,
        }),
        lacks_room: inner.lacks_room(),
        problem: inner
            .problem
            .clone()
            .or_else(|| outdated(&disk.name, &inner))
            .or_else(|| {
                let lost = snapshot.as_ref().is_some_and(|s| s.lost_pages);
                lost.then(|| format!("the virtual machine was disconnected: {LOST_PAGES}"))
            })
            .or_else(|| pulling_trouble(&inner, snapshot.as_ref())),
        warnings: standing
            .warning
            .into_iter()
            .chain(abandoned(&inner))
            .collect(),
    }
}

/// Returns the reason why the disk's I/O is held, if another node has had the disk since.
fn outdated(name: &str, inner: &Inner) -> Option<String> {
    let surpassed = inner.entry.surpassed.as_ref()?;
    let (why, by) = (
        surpassed.why("the disk", inner.record.epoch.0),
        &surpassed.by,
    );
    Some(format!(
        "{why}; use it at node '{by}', and remove it here with 'godwit disk rm {name}'; or, if what is here is right, 'godwit \
         disk claim {name} --force'"
    ))
}

/// Returns a warning if the missing parts were given up as lost.
fn abandoned(inner: &Inner) -> Option<String> {
    let other = inner
        .entry
        .counterpart
        .as_deref()
        .unwrap_or("the other node");
    inner.entry.abandoned.then(|| {
        format!("what it lacks was given up as lost with node '{other}': reads of that fail, unless the node comes back")
    })
}

/// Returns the reason why missing parts do not arrive.
fn pulling_trouble(inner: &Inner, snapshot: Option<&Snapshot>) -> Option<String> {
    let trouble = snapshot?.missing_trouble?;
    let other = inner.entry.counterpart.as_deref();
    let other = other.unwrap_or("the other node");
    Some(match trouble {
        RequestError::NoSpace => {
            let path = inner.entry.path.display();
            format!(
                "what it lacks cannot be pulled: no space is left for its image {path}; free some, and pulling goes on \
                 by itself"
            )
        }
        error => format!(
            "a part of what it lacks cannot be pulled from node '{other}': {error}; it is tried again"
        ),
    })
}

fn status(inner: &Inner, state: DiskState) -> String {
    let other = inner
        .entry
        .counterpart
        .as_deref()
        .unwrap_or("the other node");
    let doing = inner.activity.describe();
    match state {
        DiskState::Serving if inner.lacks_room() => {
            String::from("served here; writes wait, because no space is left for its image")
        }
        DiskState::Serving if inner.activity.migration().is_some() => {
            format!("served here, migrating to node '{other}'")
        }
        DiskState::Serving if inner.record.lacks().is_some() => {
            let snapshot = inner.engine.as_ref().map(|engine| engine.handle.snapshot());
            let is_owed = snapshot.as_ref().is_some_and(|it| it.missing_is_owed);
            let left = snapshot.as_ref().and_then(|it| it.missing);
            let left = left.map_or_else(|| String::from("a part"), |left| left.to_string());
            if let Some(base) = inner.entry.fetches(&inner.record) {
                let how = match (&inner.image_trouble, base.prefetch) {
                    (Some(trouble), _) => format!("reads of that wait: {trouble}"),
                    (None, true) => String::from("from where it is being fetched"),
                    (None, false) => String::from("from where it is fetched when it is read"),
                };
                let at_source = snapshot.and_then(|it| it.missing_at_source);
                let Some(at_source) = at_source.filter(|at_source| at_source.0 > 0) else {
                    return format!(
                        "served here; {left} of it still in image '{}', {how}",
                        base.image
                    );
                };
                let needed = match is_owed {
                    true => "which is needed until that has come",
                    false => "which is needed and not connected: reads of that wait",
                };
                return format!(
                    "served here; {left} of it still elsewhere: {at_source} at node '{other}', {needed}; the rest in \
                     image '{}', {how}",
                    base.image
                );
            }
            let how = match is_owed {
                true => "which is needed until it has come",
                false => "which is needed and not connected: reads of that wait",
            };
            format!("served here; {left} of it still at node '{other}', {how}")
        }
        DiskState::Serving => String::from("served here"),
        DiskState::Outdated => match &inner.entry.surpassed {
            Some(by) => format!("node '{}' has had it since; I/O is held", by.by),
            None => String::from("another node has had it since; I/O is held"),
        },
        DiskState::Receiving => format!("being received from node '{other}', which serves it"),
        DiskState::Accepted => format!(
            "in doubt: accepted from node '{other}', which is asked whether it gave the disk away; \
             I/O is held"
        ),
        DiskState::Relinquished => {
            format!("given away to node '{other}', which is asked to confirm; I/O is held")
        }
        DiskState::Departed => match &inner.entry.moved_to {
            Some(owner) if inner.record.owes().is_some() => {
                let snapshot = inner.engine.as_ref().map(|engine| engine.handle.snapshot());
                let is_there = snapshot.is_some_and(|it| it.owner_is_there);
                let how = if is_there {
                    ""
                } else {
                    " and is not connected"
                };
                format!("moved to node '{owner}', which still needs a part of it from here{how}")
            }
            Some(owner) => format!("moved to node '{owner}'; the image here is stale"),
            None => format!("not served here ({doing})"),
        },
        DiskState::Importing => String::from("its image is being made"),
        DiskState::Failed => {
            format!(
                "not usable: {}",
                inner
                    .problem
                    .as_deref()
                    .unwrap_or("the thread that served it has ended")
            )
        }
    }
}

/// Returns the URIs at which NBD clients can attach to a disk.
pub(crate) fn nbd_uris(config: &NodeConfig, disk: &str) -> Vec<String> {
    let mut uris = vec![format!(
        "nbd+unix:///{disk}?socket={}",
        encoded(&config.nbd_socket())
    )];
    if let Some(address) = config.nbd_listen {
        let scheme = if config.nbd_plain { "nbd" } else { "nbds" };
        uris.push(format!("{scheme}://{address}/{disk}"));
    }
    uris
}

/// Encodes a path as the value of a URI's query.
fn encoded(path: &std::path::Path) -> String {
    use std::os::unix::ffi::OsStrExt;
    path.as_os_str()
        .as_bytes()
        .iter()
        .fold(String::new(), |mut text, &byte| {
            if byte.is_ascii_alphanumeric() || b"/-._~".contains(&byte) {
                text.push(char::from(byte));
            } else {
                text.push_str(&format!("%{byte:02X}"));
            }
            text
        })
}

fn counters(snapshot: &Snapshot) -> IoCounters {
    let from = snapshot.counters;
    IoCounters {
        reads: from.reads,
        writes: from.writes,
        flushes: from.flushes,
        discards: from.discards,
        read_bytes: from.read_bytes,
        written_bytes: from.written_bytes,
        errors: from.errors,
        forwarded: from.forwarded,
        compressed_from_bytes: from.compressed_from,
        compressed_to_bytes: from.compressed_to,
    }
}

/// Converts an engine's latency summary for the API.
pub const fn latency(from: &LatencySummary) -> GuestLatency {
    GuestLatency {
        p50_us: from.p50_us,
        p99_us: from.p99_us,
        p9999_us: from.p9999_us,
        max_us: from.max_us,
        iops: from.iops,
    }
}

/// Converts the counts of skipped blocks of a migration for the API.
pub(crate) const fn delta(delta: godwit_core::DeltaProgress) -> MigrationDelta {
    MigrationDelta {
        by: match delta.by {
            godwit_core::DeltaBy::Written => DeltaBy::Written,
            godwit_core::DeltaBy::Compared => DeltaBy::Compared,
        },
        comparing: delta.comparing,
        bytes_skipped: delta.bytes_skipped,
    }
}

/// Converts a migration's promise for the API.
pub fn promise(progress: &Progress) -> MigrationPromise {
    let from = &progress.promise;
    let [guest_latency, link_queue, interface_budget] = from.pauses;
    MigrationPromise {
        limit_us: from.limit.map(|limit| limit.as_micros() as u64),
        allowed_us: from.allowed.map(|allowed| allowed.as_micros() as u64),
        periods: from.periods,
        breached_periods: from.breached_periods,
        paused: from.paused.map(|reason| match reason {
            event::PauseReason::GuestLatency => PauseReason::GuestLatency,
            event::PauseReason::LinkQueue => PauseReason::LinkQueue,
            event::PauseReason::InterfaceBudget => PauseReason::InterfaceBudget,
        }),
        pauses: Pauses {
            guest_latency,
            link_queue,
            interface_budget,
        },
        paused_seconds: from.paused_for.as_secs_f64(),
        delayed_bytes: from.delayed_bytes,
        delayed_bytes_sent: from.delayed_bytes_sent,
        delayed_bytes_cancelled: from.delayed_bytes_cancelled,
        rate_limit: from.rate_limit,
        obstacle: from.obstacle.map(|obstacle| match obstacle {
            event::Obstacle::Promise => Obstacle::Promise,
            event::Obstacle::WriteRate => Obstacle::WriteRate,
            event::Obstacle::InterfaceBudget => Obstacle::InterfaceBudget,
            event::Obstacle::Bandwidth => Obstacle::Bandwidth,
            event::Obstacle::Deadline => Obstacle::Deadline,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_in_odd_places_survive_the_uri() {
        let path = std::path::Path::new("/run/my disks/a&b?.sock");
        assert_eq!(encoded(path), "/run/my%20disks/a%26b%3F.sock");
    }
}
