//! The options of push and pull.

use core::time::Duration;

use godwit_core::PushOptions;

use godwit_api::{ErrorBody, ErrorCode, MigrateRequest, Policy, PushSettings};

/// Returns the push settings of a request, or none if the policy does not pull.
///
/// # Errors
/// [`ErrorCode::Invalid`] for push settings with a policy without a push, and for verification with a policy that
/// pulls.
pub(super) fn push(request: &MigrateRequest) -> Result<Option<PushSettings>, ErrorBody> {
    let invalid = |text: String, hint: &str| {
        Err(ErrorBody::new(ErrorCode::Invalid, format!("disk {}: {text}", request.disk)).hint(hint))
    };
    let chosen = request.policy.unwrap_or_default();
    let policy = chosen.name();
    let asked = request.push_threshold.is_some() || request.push_seconds.is_some();
    if chosen != Policy::PushPull && asked {
        return invalid(
            format!("the policy {policy} pushes nothing before the disk changes hands"),
            "leave out what is said of pushing, or choose the policy push-pull",
        );
    }
    let usual = PushOptions::default();
    let settings = match chosen {
        Policy::PushPull => PushSettings {
            threshold: request.push_threshold.unwrap_or(usual.threshold),
            longest_seconds: request.push_seconds,
        },
        Policy::PostCopy => PushSettings {
            threshold: 0,
            longest_seconds: None,
        },
        Policy::DoubleWrite | Policy::PreCopy | Policy::Mirror => return Ok(None),
    };
    if request.verify {
        return invalid(
            format!(
                "with the policy {policy} both copies cannot be compared before the switchover"
            ),
            "move it without --verify, or by another policy",
        );
    }
    if chosen == Policy::PushPull && settings.threshold == 0 {
        return invalid(
            String::from("with a threshold of 0 nothing would be pushed"),
            "choose at least 1, or the policy post-copy",
        );
    }
    Ok(Some(settings))
}

/// Converts push settings for the engine.
pub(crate) fn push_options(push: Option<&PushSettings>) -> PushOptions {
    push.map_or_else(PushOptions::default, |push| PushOptions {
        threshold: push.threshold,
        longest_push: push.longest_seconds.map(Duration::from_secs),
    })
}
