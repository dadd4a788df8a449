//! The options of push and pull.

use core::time::Duration;

use godwit_core::PushOptions;

use super::Wrong;
use godwit_api::{MoveOptions, PushSettings};

/// Returns the push settings of a request, or none if the policy does not pull.
///
/// # Errors
/// There are push settings with a policy without a push, or verification with a policy that pulls.
pub(super) fn push(options: &MoveOptions) -> Result<Option<PushSettings>, Wrong> {
    let invalid = |text: String, hint: &str| Err(Wrong::new(text, hint));
    let chosen = options.policy.unwrap_or_default();
    let policy = chosen.name;
    let asked = options.push_threshold.is_some() || options.push_seconds.is_some();
    if asked && !chosen.pushes() {
        return invalid(
            format!("the policy {policy} pushes nothing before the disk changes hands"),
            "leave out what is said of pushing, or choose the policy push-pull",
        );
    }
    let Some(usual) = chosen.usual.push() else {
        return Ok(None);
    };
    if options.verify {
        return invalid(
            format!(
                "with the policy {policy} both copies cannot be compared before the switchover"
            ),
            "move it without --verify, or by another policy",
        );
    }
    let threshold = options.push_threshold.unwrap_or(usual.threshold);
    if chosen.pushes() && threshold == 0 {
        return invalid(
            String::from("with a threshold of 0 nothing would be pushed"),
            "choose at least 1, or the policy post-copy",
        );
    }
    Ok(Some(PushSettings {
        threshold,
        longest_seconds: options.push_seconds,
    }))
}

/// Converts push settings for the engine.
pub(crate) fn push_options(push: &PushSettings) -> PushOptions {
    PushOptions {
        threshold: push.threshold,
        longest_push: push.longest_seconds.map(Duration::from_secs),
    }
}
