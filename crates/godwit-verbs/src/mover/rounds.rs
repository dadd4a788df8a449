//! Pre-copy of a process's memory: it is copied while the process works, then what has changed meanwhile, and so on, until
//! the rest is small or does not become smaller (section 2.2 of the paper).

/// Most rounds. Each copies at most half of what the one before did, so more than these bring little.
pub const MOST_ROUNDS: u32 = 5;

/// Memory that is copied as quickly as the process can be stopped for a round.
const LITTLE: u64 = 8 << 20;

/// Whether a process with so many bytes of memory of its own is worth copying ahead: each round stops it for a moment, and all
/// of it may be copied in less.
pub fn is_worth_copying(resident: u64) -> bool {
    resident > LITTLE
}

/// Whether another round comes after those that copied so many bytes each.
pub fn another_round(copied: &[u64]) -> bool {
    match copied {
        _ if copied.len() >= MOST_ROUNDS as usize => false,
        [.., last] if *last <= LITTLE => false,
        // It changes about as much as is copied meanwhile.
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
        // It does not become less.
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
