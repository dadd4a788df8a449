//! Limits on the data of a disk in flight.

use godwit_api::{MigrationSettings, MoveOptions};
use godwit_core::units::{Bytes, SECTOR_SIZE};

use super::Wrong;

/// Bytes per chunk unless requested.
const DEFAULT_CHUNK: u64 = 1 << 20;
/// Bytes per chunk while the guest does I/O, or with a requested window.
pub(super) const BUSY_CHUNK: u64 = 256 << 10;
/// Bytes in flight while the guest is idle, unless a window is requested. While chunks are quick, the window grows up
/// to the longest window.
const IDLE_WINDOW: u64 = 8 << 20;
/// Bytes in flight while the guest does I/O, unless a window is requested: a double write queues behind the data in
/// flight.
const BUSY_WINDOW: u64 = 1 << 20;
/// Most chunks in flight: the number of an engine's slots.
pub(super) const MAX_WINDOW_CHUNKS: u64 = 64;
/// Longest chunk in bytes.
pub(super) const MAX_CHUNK: u64 = 16 << 20;
/// Most bytes in flight: the size of an engine's chunk memory.
pub(super) const MAX_WINDOW: u64 = 32 << 20;

/// Bytes in flight and per chunk.
pub(super) struct Sizes {
    pub(super) window: u64,
    pub(super) idle_window: u64,
    pub(super) busy_window: u64,
    pub(super) chunk: u64,
    pub(super) busy_chunk: u64,
}

/// Returns the sizes of a request, with defaults that fit the given ones.
///
/// # Errors
/// A size is out of range.
pub(super) fn sizes(options: &MoveOptions) -> Result<Sizes, Wrong> {
    let chunk = options
        .chunk_bytes
        .unwrap_or_else(|| match options.window_bytes {
            // As many chunks as there are slots.
            Some(window) => window
                .div_ceil(MAX_WINDOW_CHUNKS)
                .next_multiple_of(4096)
                .clamp(BUSY_CHUNK, DEFAULT_CHUNK),
            None => DEFAULT_CHUNK,
        });
    if chunk == 0 || !chunk.is_multiple_of(4096) || chunk > MAX_CHUNK {
        return Err(Wrong::new(
            format!("a chunk of {} is not possible", Bytes(chunk)),
            format!("choose a multiple of 4 KiB up to {}", Bytes(MAX_CHUNK)),
        ));
    }
    let most = MAX_WINDOW.min(chunk * MAX_WINDOW_CHUNKS);
    let window = options.window_bytes.unwrap_or(most);
    if window < chunk || window > most {
        return Err(Wrong::new(
            format!("a window of {} is not possible", Bytes(window)),
            format!(
                "with chunks of {0} choose {0} to {1}",
                Bytes(chunk),
                Bytes(most)
            ),
        ));
    }
    let chosen_or = |usual: u64| {
        options
            .window_bytes
            .unwrap_or_else(|| usual.clamp(chunk, window))
    };
    Ok(Sizes {
        window,
        idle_window: chosen_or(IDLE_WINDOW),
        busy_window: chosen_or(BUSY_WINDOW),
        chunk,
        busy_chunk: match (options.chunk_bytes, options.window_bytes) {
            (None, None) => BUSY_CHUNK,
            _ => chunk,
        },
    })
}

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
