//! The options of pre-copy.

use godwit_core::RoundOptions;
use godwit_core::units::{Bytes, SECTOR_SIZE};

use super::Wrong;
use godwit_api::{MoveOptions, RoundSettings};

/// Longest block of pre-copy's dirty bitmap.
const MAX_ROUND_BLOCK: u64 = 1 << 30;

/// Returns the round settings of a request, or none with another policy.
///
/// # Errors
/// A value is out of range, or there are round settings with another policy.
pub(super) fn rounds(options: &MoveOptions) -> Result<Option<RoundSettings>, Wrong> {
    let invalid = |text: String, hint: &str| Err(Wrong::new(text, hint));
    let (block, most, left) = (
        options.round_block_bytes,
        options.max_rounds,
        options.round_left_bytes,
    );
    let policy = options.policy.unwrap_or_default();
    let Some(usual) = policy.usual.rounds() else {
        if block.is_some() || most.is_some() || left.is_some() {
            return invalid(
                format!("the policy {} has no rounds", policy.name),
                "leave out what is said of rounds, or choose the policy pre-copy",
            );
        }
        return Ok(None);
    };
    let rounds = RoundSettings {
        block_bytes: block.unwrap_or(u64::from(usual.block_sectors) * SECTOR_SIZE),
        max_rounds: most.unwrap_or(usual.most_rounds),
        left_bytes: left.unwrap_or(usual.most_left.0),
    };
    let possible = 4096..=MAX_ROUND_BLOCK;
    if !possible.contains(&rounds.block_bytes) || !rounds.block_bytes.is_multiple_of(4096) {
        return invalid(
            format!("blocks of {} are not possible", Bytes(rounds.block_bytes)),
            "choose a multiple of 4 KiB up to 1 GiB",
        );
    }
    if rounds.max_rounds == 0 {
        return invalid(
            String::from("without a round nothing is copied"),
            "allow at least 1",
        );
    }
    Ok(Some(rounds))
}

/// Converts round settings for the engine.
pub(crate) fn round_options(rounds: &RoundSettings) -> RoundOptions {
    RoundOptions {
        // At most 1 GiB.
        block_sectors: (rounds.block_bytes / SECTOR_SIZE) as u32,
        most_rounds: rounds.max_rounds,
        most_left: Bytes(rounds.left_bytes),
    }
}
