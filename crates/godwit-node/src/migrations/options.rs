//! Which options a migration may run with.

use godwit_core::units::{MigrationId, SECTOR_SIZE};
use rustls::crypto::ring;

use crate::api::{ErrorBody, ErrorCode, MigrateRequest, MigrationSettings};

/// Bytes per copy when nothing else is asked for.
const DEFAULT_CHUNK: u64 = 128 << 10;
/// Bytes in flight when nothing else is asked for.
const DEFAULT_WINDOW: u64 = 8 << 20;
/// Bytes in flight while the guest does I/O, unless a window is asked for: a double write queues
/// behind what is in flight.
const BUSY_WINDOW: u64 = 1 << 20;
/// Most chunks in flight: what an engine has slots for.
const MAX_WINDOW_CHUNKS: u64 = 64;
/// Longest chunk in bytes.
const MAX_CHUNK: u64 = 16 << 20;
/// Most bytes in flight: what an engine has memory for.
const MAX_WINDOW: u64 = 32 << 20;

/// The options of a request, with what it leaves open filled in.
///
/// # Errors
/// [`ErrorCode::Invalid`] naming the option and its range.
pub(crate) fn settings(request: &MigrateRequest) -> Result<MigrationSettings, ErrorBody> {
    let invalid = |text: String, hint: String| {
        Err(ErrorBody::new(ErrorCode::Invalid, format!("disk {}: {text}", request.disk)).hint(hint))
    };
    let chunk_bytes = request.chunk_bytes.unwrap_or(DEFAULT_CHUNK);
    if chunk_bytes == 0 || !chunk_bytes.is_multiple_of(4096) || chunk_bytes > MAX_CHUNK {
        return invalid(
            format!("a chunk of {chunk_bytes} bytes is not possible"),
            format!("choose a multiple of 4096 up to {MAX_CHUNK}"),
        );
    }
    let most = MAX_WINDOW.min(chunk_bytes * MAX_WINDOW_CHUNKS);
    let window_bytes = request
        .window_bytes
        .unwrap_or_else(|| DEFAULT_WINDOW.clamp(chunk_bytes, most));
    if window_bytes < chunk_bytes || window_bytes > most {
        return invalid(
            format!("a window of {window_bytes} bytes is not possible"),
            format!("with chunks of {chunk_bytes} bytes choose {chunk_bytes} to {most}"),
        );
    }
    if request.max_bandwidth == Some(0) {
        return invalid(
            String::from("a bandwidth of 0 would never move anything"),
            String::from("leave it out for as much as there is"),
        );
    }
    Ok(MigrationSettings {
        policy: request.policy,
        window_bytes,
        busy_window_bytes: match request.window_bytes {
            Some(chosen) => chosen,
            None => BUSY_WINDOW.clamp(chunk_bytes, window_bytes),
        },
        chunk_bytes,
        max_bandwidth: request.max_bandwidth,
        verify: request.verify,
    })
}

/// The chunk's length in sectors.
pub(crate) const fn chunk_sectors(settings: &MigrationSettings) -> u32 {
    (settings.chunk_bytes / SECTOR_SIZE) as u32
}

/// Chunks in flight.
pub(crate) const fn window_chunks(settings: &MigrationSettings) -> u16 {
    (settings.window_bytes / settings.chunk_bytes) as u16
}

/// Chunks in flight while the guest does I/O.
pub(crate) fn busy_window_chunks(settings: &MigrationSettings) -> u16 {
    (settings.busy_window_bytes / settings.chunk_bytes).clamp(1, 1 << 15) as u16
}

/// A migration id that nobody has used.
///
/// # Errors
/// The system has no randomness.
pub(crate) fn new_id() -> Result<MigrationId, ErrorBody> {
    let mut id = [0; 16];
    ring::default_provider()
        .secure_random
        .fill(&mut id)
        .map_err(|_| {
            ErrorBody::new(
                ErrorCode::Internal,
                "the system gave no random bytes for a migration's id",
            )
        })?;
    Ok(MigrationId(id))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::Policy;

    fn request(chunk: Option<u64>, window: Option<u64>) -> MigrateRequest {
        MigrateRequest {
            disk: String::from("root"),
            to: String::from("b"),
            policy: Policy::DoubleWrite,
            window_bytes: window,
            chunk_bytes: chunk,
            max_bandwidth: None,
            verify: false,
        }
    }

    #[test]
    fn what_is_left_open_fits_what_is_given() {
        for chunk in [None, Some(4096), Some(64 << 10), Some(MAX_CHUNK)] {
            let settings = settings(&request(chunk, None)).expect("valid");
            let chunks = u64::from(window_chunks(&settings));
            assert!(
                (1..=MAX_WINDOW_CHUNKS).contains(&chunks),
                "{chunk:?}: {chunks}"
            );
            assert_eq!(
                u64::from(chunk_sectors(&settings)) * 512,
                settings.chunk_bytes
            );
        }
    }

    #[test]
    fn impossible_options_are_refused() {
        for (chunk, window) in [
            (Some(0), None),
            (Some(512), None),
            (Some(4097), None),
            (Some(MAX_CHUNK + 4096), None),
            (Some(8192), Some(4096)),
            (Some(4096), Some(4096 * (MAX_WINDOW_CHUNKS + 1))),
            (None, Some(u64::MAX)),
        ] {
            let error = settings(&request(chunk, window)).expect_err("invalid");
            assert_eq!(error.code, ErrorCode::Invalid, "{chunk:?} {window:?}");
        }
        let none = MigrateRequest {
            max_bandwidth: Some(0),
            ..request(None, None)
        };
        settings(&none).expect_err("no bandwidth");
    }

    #[test]
    fn ids_differ() {
        assert_ne!(new_id().expect("random"), new_id().expect("random"));
    }
}
