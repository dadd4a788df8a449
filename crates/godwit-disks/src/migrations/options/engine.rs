//! A move's options for the engine and for the other node.

use core::time::Duration;

use godwit_api::MigrationSettings;
use godwit_core::units::MigrationId;
use godwit_core::wire::Features;
use godwit_core::{
    GovernorParts, ImageOffer, MigrationOptions, OlderCopy, PolicyOptions, Switchover,
};

use super::{InFlight, push_options, round_options};
use crate::migrations::promise::Promise;
use godwit_context::PEER_TIMEOUT;

/// The engine's options that follow from the circumstances of a move.
pub(in crate::migrations) struct Circumstances<'a> {
    pub(in crate::migrations) migration: MigrationId,
    pub(in crate::migrations) promise: &'a Promise,
    /// The features used by both nodes.
    pub(in crate::migrations) agreed: Features,
    pub(in crate::migrations) older_copy: OlderCopy,
    /// True if the disk leaves its base image behind.
    pub(in crate::migrations) on_image: bool,
    pub(in crate::migrations) governor: GovernorParts,
}

/// Returns the engine's options.
pub(in crate::migrations) fn engine(
    settings: &MigrationSettings,
    of: &Circumstances<'_>,
) -> MigrationOptions {
    let flight = InFlight::of(settings);
    MigrationOptions {
        migration: of.migration,
        chunk_sectors: flight.chunk_sectors,
        busy_chunk_sectors: flight.busy_chunk_sectors,
        window_chunks: flight.window_chunks,
        idle_window_chunks: flight.idle_window_chunks,
        busy_window_chunks: flight.busy_window_chunks,
        image: match of.on_image {
            false => ImageOffer::None,
            true if of.agreed.contain(Features::TWO_PLACES) => ImageOffer::TwoPlaces,
            true => ImageOffer::OnePlace,
        },
        max_bandwidth: settings.max_bandwidth,
        sla: of.promise.target,
        guest_load: of.promise.guest_load,
        wake_up_limit: of.promise.wake_up_limit,
        delayed_writes: settings.delayed_writes,
        delayed_write_rate: settings.delayed_write_rate,
        interface_budget: settings.interface_budget,
        deadline: settings.deadline_seconds.map(Duration::from_secs),
        policy: match of.on_image {
            true => policy(settings).without_image(),
            false => policy(settings),
        },
        older_copy: of.older_copy,
        verify: settings.verify,
        find_holes: of.agreed.contain(Features::HOLES),
        governor: of.governor,
        switchover: match settings.with_guest {
            true => Switchover::WhenTold,
            false => Switchover::WhenConverged,
        },
        peer_timeout: PEER_TIMEOUT,
    }
}

fn policy(settings: &MigrationSettings) -> PolicyOptions {
    let rounds = settings.rounds.as_ref().map(round_options);
    let push = settings.push.as_ref().map(push_options);
    settings.policy.usual.with(rounds, push)
}
