//! A migration's policy, for the other node and for the engine.

use godwit_api::{MigrationSettings, Policy};
use godwit_core::wire::TransferPolicy;
use godwit_core::{PolicyOptions, RoundOptions};

use super::{push_options, round_options};

/// Returns the policy's name on the wire.
pub(in crate::migrations) const fn transfer(policy: Policy) -> TransferPolicy {
    match policy {
        Policy::DoubleWrite => TransferPolicy::DoubleWrite,
        Policy::PreCopy => TransferPolicy::PreCopy,
        Policy::Mirror => TransferPolicy::Mirror,
        Policy::PushPull | Policy::PostCopy => TransferPolicy::PushPull,
    }
}

/// Returns the engine's policy.
pub(in crate::migrations) fn policy(settings: &MigrationSettings) -> PolicyOptions {
    match (settings.policy, settings.rounds) {
        (Policy::DoubleWrite, _) => PolicyOptions::DoubleWrite,
        (Policy::Mirror, _) => PolicyOptions::Mirror,
        (Policy::PushPull | Policy::PostCopy, _) => {
            PolicyOptions::PushPull(push_options(settings.push.as_ref()))
        }
        (Policy::PreCopy, None) => PolicyOptions::PreCopy(RoundOptions::default()),
        (Policy::PreCopy, Some(rounds)) => PolicyOptions::PreCopy(round_options(&rounds)),
    }
}
