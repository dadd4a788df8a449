//! What tests of several commands show.

use godwit_node::api::{Direction, Migration, MigrationPhase, MigrationProgress};

/// A migration of disk `d` from node `a` to node `b` that has just begun.
pub(crate) fn migration() -> Migration {
    Migration {
        id: "00112233445566778899aabbccddeeff".to_owned(),
        disk: "d".to_owned(),
        from: "a".to_owned(),
        to: "b".to_owned(),
        direction: Direction::Outgoing,
        phase: MigrationPhase::Copying,
        options: None,
        progress: MigrationProgress::default(),
        promise: None,
        rate_bytes_per_second: None,
        eta_seconds: None,
        guest: None,
        started_at: "2026-01-01T00:00:00Z".to_owned(),
        ended_at: None,
        lm_seconds: None,
        error: None,
        verified: false,
        warnings: Vec::new(),
    }
}
