//! Allocation on a device shared by several nodes, all of which may allocate at once, and each of which may die between
//! any two writes. There are no locks, so no node waits for a dead one.
//!
//! The table has records, each of at most one segment. A free record is claimed with one compare-and-swap. From then on
//! only the claiming node writes the record; once the record is a segment, only the node named in the title does. An
//! allocation takes these steps:
//!
//! 1. [`Stage::Claimed`]: the record belongs to the node. Other nodes ignore the content.
//! 2. The node chooses a part of the device that no other record has, writes the part and the segment's name into the
//!    record, and shows them: [`Stage::Announced`].
//! 3. Only then does the node look at all other records: [`verdict`]. If two nodes announce the same part or the same
//!    name, the second always sees the first; each may see the other. Then the node with the lower record waits for the
//!    other node's decision, and the other node returns to step 2.
//! 4. [`Stage::Taken`]: no other node may have the part any more. The memory of earlier guests is overwritten.
//! 5. [`Stage::Held`]: the segment exists.
//!
//! A node that died on the way frees its claims before its next allocation. A segment is removed with one write, which
//! frees the record.
//!
//! Each of these writes is a compare-and-swap from the record's previous stage, with a number unique to the claim. A
//! process that continues after another process of the same node has freed its claim thus changes nothing, and ends
//! with an error.

use super::space::Extent;

/// The stage of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// The record belongs to no node.
    Free,
    /// The record belongs to a node, and has no valid content yet.
    Claimed,
    /// The record shows the part and the name that the node wants.
    Announced,
    /// The node has got the part, and overwrites the old content.
    Taken,
    /// The record is a segment.
    Held,
}

/// Bits of a stage's word for the tag: the node, and the claim of the node.
const WHOSE: u64 = (1 << 56) - 1;
/// Bits of the tag that distinguish a node's claims, such as claims of a process and of its successor.
const WHICH: u64 = (1 << 24) - 1;

impl Stage {
    const ALL: [Self; 5] = [
        Self::Free,
        Self::Claimed,
        Self::Announced,
        Self::Taken,
        Self::Held,
    ];

    /// Returns the stage as a word, with the tag of the allocating node while the allocation is unfinished.
    pub fn word(self, tag: u64) -> u64 {
        let number = Self::ALL.iter().position(|stage| *stage == self);
        let number = number.unwrap_or_default() as u64;
        match self {
            Self::Free | Self::Held => number << 56,
            _ => number << 56 | tag & WHOSE,
        }
    }

    /// Decodes a word into stage and tag; returns `None` for an invalid word.
    pub fn of(word: u64) -> Option<(Self, u64)> {
        let stage = Self::ALL.get(usize::try_from(word >> 56).ok()?)?;
        let tag = word & WHOSE;
        (stage.word(tag) == word).then_some((*stage, tag))
    }

    /// Returns true if the record's part of the device is in use, or may come into use.
    pub const fn has_space(self) -> bool {
        matches!(self, Self::Announced | Self::Taken | Self::Held)
    }

    /// Returns true if the stage is one of an unfinished allocation.
    pub const fn is_unfinished(self) -> bool {
        matches!(self, Self::Claimed | Self::Announced | Self::Taken)
    }
}

/// Returns the tag of a claim: bits from the node's name, and the claim's own number.
pub fn tag(node: &str, claim: u64) -> u64 {
    let hash = blake3::hash(node.as_bytes());
    let mut word = [0; 8];
    word.copy_from_slice(&hash.as_bytes()[..8]);
    u64::from_le_bytes(word) & WHOSE & !WHICH | claim & WHICH
}

/// Returns true if two tags belong to one node.
pub const fn same_node(one: u64, other: u64) -> bool {
    one & !WHICH == other & !WHICH
}

/// The content of a record.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Entry<N> {
    /// Index of the record.
    pub index: usize,
    /// Stage of the record.
    pub stage: Stage,
    /// Name of the segment.
    pub name: N,
    /// Part of the device.
    pub extent: Extent,
}

/// The next step of a node after its announcement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// The segment belongs to the node.
    Mine,
    /// The record of this index wants the same, and may still give way: look again.
    Wait(usize),
    /// The node withdraws the announcement, and tries again elsewhere.
    Again,
    /// The segment in the record of this index has the name.
    NameTaken(usize),
}

/// Returns the next step of the node that announced `own`, from the other records as seen after the announcement.
pub fn verdict<N: PartialEq>(own: &Entry<N>, others: &[Entry<N>]) -> Verdict {
    let others = others.iter().filter(|other| other.index != own.index);
    let found = others.filter_map(|other| {
        let same_name = other.name == own.name;
        if !other.stage.has_space() || !same_name && !other.extent.overlaps(own.extent) {
            return None;
        }
        Some(match other.stage {
            Stage::Announced if other.index < own.index => Verdict::Again,
            Stage::Announced => Verdict::Wait(other.index),
            _ if same_name => Verdict::NameTaken(other.index),
            _ => Verdict::Again,
        })
    });
    // Final conflicts outweigh conflicts that may dissolve.
    let weight = |verdict: &Verdict| match verdict {
        Verdict::NameTaken(_) => 3,
        Verdict::Again => 2,
        Verdict::Wait(_) => 1,
        Verdict::Mine => 0,
    };
    found.max_by_key(weight).unwrap_or(Verdict::Mine)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(index: usize, stage: Stage, name: &'static str, offset: u64) -> Entry<&'static str> {
        let extent = Extent { offset, bytes: 10 };
        Entry {
            index,
            stage,
            name,
            extent,
        }
    }

    #[test]
    fn a_stage_s_word_says_what_it_is_and_others_are_refused() {
        for stage in Stage::ALL {
            let mine = tag("a", 1);
            let (read, whose) = Stage::of(stage.word(mine)).expect("makes sense");
            assert_eq!(read, stage);
            assert_eq!(whose, if stage.is_unfinished() { mine } else { 0 });
        }
        assert_eq!(Stage::Free.word(7), 0, "an empty table is all free");
        assert!(!same_node(tag("a", 1), tag("b", 1)));
        assert!(same_node(tag("a", 1), tag("a", 2)));
        assert_ne!(tag("a", 1), tag("a", 2), "another process of the node");
        for odd in [1, 5 << 56, u64::MAX, 4 << 56 | 1] {
            assert_eq!(Stage::of(odd), None, "{odd:x}");
        }
    }

    #[test]
    fn what_others_have_or_want_decides() {
        let own = entry(3, Stage::Announced, "v", 100);
        let seen = |others: &[Entry<&'static str>]| verdict(&own, others);
        assert_eq!(seen(std::slice::from_ref(&own)), Verdict::Mine);
        // Records do not count before their announcement, and neither do segments elsewhere.
        let apart = [
            entry(0, Stage::Claimed, "v", 100),
            entry(1, Stage::Free, "v", 100),
            entry(2, Stage::Held, "w", 110),
            entry(4, Stage::Announced, "x", 90),
        ];
        assert_eq!(seen(&apart), Verdict::Mine);
        for stage in [Stage::Taken, Stage::Held] {
            assert_eq!(seen(&[entry(9, stage, "v", 500)]), Verdict::NameTaken(9));
            assert_eq!(seen(&[entry(9, stage, "w", 109)]), Verdict::Again);
        }
        for name in ["v", "w"] {
            let (lower, higher) = (
                entry(1, Stage::Announced, name, 100),
                entry(5, Stage::Announced, name, 95),
            );
            assert_eq!(seen(std::slice::from_ref(&lower)), Verdict::Again);
            assert_eq!(seen(std::slice::from_ref(&higher)), Verdict::Wait(5));
            assert_eq!(seen(&[higher, lower]), Verdict::Again);
        }
        let both = [
            entry(5, Stage::Announced, "w", 95),
            entry(1, Stage::Held, "v", 0),
        ];
        assert_eq!(seen(&both), Verdict::NameTaken(1));
    }
}
