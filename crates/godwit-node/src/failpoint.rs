//! Named points at which tests stop a disk's progress. Without the feature `failpoints` they are
//! nothing.

/// Stops here when a test says so. It waits on a thread of its own, so that only the caller stops.
#[cfg(feature = "failpoints")]
pub(crate) async fn reach(name: String) {
    if fail::list().iter().any(|(point, _)| *point == name) {
        // Whoever set it learns from the log that this is where the node is.
        tracing::info!(point = name, "at a fail point");
    }
    // The point's own failure (a test may make it panic) ends that thread alone.
    let _ = tokio::task::spawn_blocking(move || fail::fail_point!(&name)).await;
}

/// Nothing: the feature `failpoints` is off.
#[cfg(not(feature = "failpoints"))]
pub(crate) async fn reach(_name: String) {}

/// As [`reach`], on a thread that may block.
#[cfg(feature = "failpoints")]
pub(crate) fn reach_blocking(name: &str) {
    if fail::list().iter().any(|(point, _)| point == name) {
        tracing::info!(point = name, "at a fail point");
    }
    fail::fail_point!(name);
}

/// Nothing: the feature `failpoints` is off.
#[cfg(not(feature = "failpoints"))]
pub(crate) fn reach_blocking(_name: &str) {}

/// Reads the fail points that the environment sets, once for the process.
#[cfg(feature = "failpoints")]
pub(crate) fn set_up() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    // Dropping the scenario would clear the points: it lasts as long as the process.
    ONCE.call_once(|| std::mem::forget(fail::FailScenario::setup()));
}

/// Nothing: the feature `failpoints` is off.
#[cfg(not(feature = "failpoints"))]
pub(crate) fn set_up() {}
