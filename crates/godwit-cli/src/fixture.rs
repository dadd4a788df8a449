//! Migrations for tests of several commands.

use godwit_api::{
    Direction, MemoryMode, MemoryProgress, Migration, MigrationPhase, MigrationProgress,
    ProcessBreakdown, ProcessMigration, ProcessMigrationPhase, VmMigration, VmMigrationPhase,
};

/// Returns a migration of disk `d` from node `a` to node `b` that has just begun.
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
        source_needed: false,
        missing_bytes: None,
        warnings: Vec::new(),
    }
}

/// Returns a move of VM `v` with disk `d` from node `a` to node `b`, while the memory is copied.
pub(crate) fn vm_migration() -> VmMigration {
    VmMigration {
        id: "aabbccddeeff00112233445566778899".to_owned(),
        vm: "v".to_owned(),
        from: "a".to_owned(),
        to: "b".to_owned(),
        phase: VmMigrationPhase::CopyingMemory,
        memory_mode: MemoryMode::PreCopy,
        memory: MemoryProgress {
            bytes_total: 512 << 20,
            bytes_left: 128 << 20,
            bytes_sent: 400 << 20,
            passes: 2,
        },
        disks: vec![migration()],
        started_at: "2026-01-01T00:00:00Z".to_owned(),
        ended_at: None,
        total_seconds: Some(2.0),
        blackout_ms: Some(41.4),
        switchover_ms: Some(6.25),
        memory_bytes: 400 << 20,
        disk_bytes: 1 << 30,
        error: None,
        warnings: Vec::new(),
    }
}

/// Returns a move of process 7 from node `a` to node `b`, while the image is sent.
pub(crate) fn process_migration() -> ProcessMigration {
    ProcessMigration {
        id: "aabbccddeeff00112233445566778899".to_owned(),
        pid: 7,
        container: None,
        command: "ib_write_bw".to_owned(),
        from: "a".to_owned(),
        to: "b".to_owned(),
        phase: ProcessMigrationPhase::Sending,
        waits_for: None,
        partners: Vec::new(),
        queue_pairs: 4,
        image_bytes: 4 << 20,
        started_at: "2026-01-01T00:00:00Z".to_owned(),
        ended_at: None,
        pre_copy_ms: None,
        pre_copied_bytes: 0,
        pre_copy_rounds: 0,
        pre_setup_ms: None,
        blackout_ms: Some(812.4),
        wait_ms: Some(3.0),
        breakdown_ms: ProcessBreakdown::default(),
        error: None,
        warnings: Vec::new(),
    }
}
