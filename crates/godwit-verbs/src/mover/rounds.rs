//! Pre-copy of a process's memory: a copy while the process runs, then copies of the pages that changed meanwhile,
//! until the rest is small or stops shrinking (section 2.2 of the paper).

/// Most rounds. Each round copies at most half of the previous one, so more rounds bring little.
pub const MOST_ROUNDS: u32 = 5;

/// Bytes that are copied as fast as the process can be stopped for a round.
const LITTLE: u64 = 8 << 20;

/// Returns true if pre-copy pays off for a process with so many bytes of memory. Each round stops the process for a
/// moment, and a full copy of little memory may take less time.
pub fn is_worth_copying(resident: u64) -> bool {
    resident > LITTLE
}

/// Returns true if another round should follow the rounds that copied these bytes.
pub fn another_round(copied: &[u64]) -> bool {
    match copied {
        _ if copied.len() >= MOST_ROUNDS as usize => false,
        [.., last] if *last <= LITTLE => false,
        // Otherwise the process changes memory about as fast as a round copies.
        [.., before, last] => *last <= before / 2,
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn rounds_go_on_while_they_become_smaller() {
        assert!(another_round(&[]));
        assert!(another_round(&[1000 * MIB]));
        assert!(another_round(&[1000 * MIB, 400 * MIB]));
        assert!(another_round(&[1000 * MIB, 400 * MIB, 150 * MIB]));
        // Little is left.
        assert!(!another_round(&[1000 * MIB, 3 * MIB]));
        assert!(!another_round(&[8 * MIB]));
        // The rest does not shrink.
        assert!(!another_round(&[1000 * MIB, 501 * MIB]));
        assert!(!another_round(&[1000 * MIB, 400 * MIB, 400 * MIB]));
    }

    #[test]
    fn rounds_end_whatever_they_copy() {
        let mut copied: Vec<u64> = Vec::new();
        while another_round(&copied) {
            copied.push((1 << 60) >> (2 * copied.len()));
        }
        assert_eq!(copied.len(), MOST_ROUNDS as usize);
    }

    #[test]
    fn little_memory_is_copied_at_once() {
        assert!(!is_worth_copying(0) && !is_worth_copying(8 * MIB));
        assert!(is_worth_copying(8 * MIB + 1));
    }
}
