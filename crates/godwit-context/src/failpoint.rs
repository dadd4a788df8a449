//! Named points at which tests stop a disk's progress. Without the feature `failpoints` the functions do nothing.

/// Stops here if a test set the point. Waits on a thread of its own, so only the caller stops.
#[cfg(feature = "failpoints")]
pub async fn reach(name: String) {
    if fail::list().iter().any(|(point, _)| *point == name) {
        // The log tells the test that the node has reached the point.
        tracing::info!(point = name, "at a fail point");
    }
    // A failure of the point (a test may make the point panic) ends only the thread.
    let _ = tokio::task::spawn_blocking(move || fail::fail_point!(&name)).await;
}

/// Does nothing: the feature `failpoints` is off.
#[cfg(not(feature = "failpoints"))]
pub async fn reach(_name: String) {}

/// Does the same as [`reach`] on a thread that may block.
#[cfg(feature = "failpoints")]
pub fn reach_blocking(name: &str) {
    if fail::list().iter().any(|(point, _)| point == name) {
        tracing::info!(point = name, "at a fail point");
    }
    fail::fail_point!(name);
}

/// Does nothing: the feature `failpoints` is off.
#[cfg(not(feature = "failpoints"))]
pub fn reach_blocking(_name: &str) {}

/// Reads the fail points from the environment, once for the process.
#[cfg(feature = "failpoints")]
pub fn set_up() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    // Dropping the scenario would clear the points, so the scenario lasts as long as the process.
    ONCE.call_once(|| std::mem::forget(fail::FailScenario::setup()));
}

/// Does nothing: the feature `failpoints` is off.
#[cfg(not(feature = "failpoints"))]
pub fn set_up() {}
