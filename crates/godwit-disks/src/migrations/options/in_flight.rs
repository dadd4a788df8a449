//! Limits on the data of a disk in flight.

use godwit_core::units::SECTOR_SIZE;

use godwit_api::MigrationSettings;

/// The limits, in the controller's units.
pub(crate) struct InFlight {
    /// Longest chunk.
    pub chunk_sectors: u32,
    /// Longest chunk while the guest does I/O.
    pub(crate) busy_chunk_sectors: u32,
    /// Most chunks.
    pub window_chunks: u16,
    /// Chunks while the guest is idle, however long they take.
    pub(crate) idle_window_chunks: u16,
    /// Chunks while the guest does I/O.
    pub(crate) busy_window_chunks: u16,
}

impl InFlight {
    /// Converts valid settings.
    pub(crate) const fn of(settings: &MigrationSettings) -> Self {
        Self {
            chunk_sectors: (settings.chunk_bytes / SECTOR_SIZE) as u32,
            busy_chunk_sectors: (settings.busy_chunk_bytes / SECTOR_SIZE) as u32,
            window_chunks: (settings.window_bytes / settings.chunk_bytes) as u16,
            idle_window_chunks: (settings.idle_window_bytes / settings.chunk_bytes) as u16,
            busy_window_chunks: (settings.busy_window_bytes / settings.busy_chunk_bytes) as u16,
        }
    }
}
