//! How nodes that share a device share its space, although each may die between any two writes and all may allocate at
//! once. No node locks anything, so nobody waits for one that died.
//!
//! The table has records, each of at most one segment. A free record is claimed with one compare-and-swap; from then on
//! the node that claimed it alone writes there, and after it has become a segment, the node that the segment's title
//! names does. An allocation takes these steps:
//!
//! 1. [`Stage::Claimed`]: the record is the node's. Nobody else looks at its content.
//! 2. The node chooses a part of the device that is in no other record, writes it there, with the segment's name, and
//!    shows that: [`Stage::Announced`].
//! 3. Only then it looks at all other records: [`verdict`]. Of two nodes that announce the same part or the same name,
//!    the second one to announce sees the first, always; perhaps both see each other. Then the one with the lower record
//!    waits for what the other does, and the other goes back to step 2.
//! 4. Nobody else may have the part from now on: [`Stage::Taken`]. Whatever an earlier guest left there is overwritten.
//! 5. [`Stage::Held`]: the segment exists.
//!
//! A node that died on the way frees what it had claimed before its next allocation. A segment's end is one write: its
//! record is free.
//!
//! Each of these writes is a compare-and-swap from what the record said before, in which each claim has a number of its
//! own. So a process that goes on although another one of its node has freed what it had begun changes nothing, and ends
//! with an error.

use super::space::Extent;

/// How far a record is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// It is nobody's.
    Free,
    /// It is a node's, and says nothing yet.
    Claimed,
    /// It says what the node wants.
    Announced,
    /// The node has got it, and overwrites what was there.
    Taken,
    /// It is a segment.
    Held,
}

/// Bits of a stage's word that say whose it is: those of the node, and of one claim of it.
const WHOSE: u64 = (1 << 56) - 1;
/// Bits that tell a node's claims apart: those of a process that ends from those of the next.
const WHICH: u64 = (1 << 24) - 1;

impl Stage {
    const ALL: [Self; 5] = [
        Self::Free,
        Self::Claimed,
        Self::Announced,
        Self::Taken,
        Self::Held,
    ];

    /// As a word, with the tag of the node that allocates, which only matters until there is a segment.
    pub fn word(self, tag: u64) -> u64 {
        let number = Self::ALL.iter().position(|stage| *stage == self);
        let number = number.unwrap_or_default() as u64;
        match self {
            Self::Free | Self::Held => number << 56,
            _ => number << 56 | tag & WHOSE,
        }
    }

    /// What a word says: how far, and whose. Nothing when it makes no sense.
    pub fn of(word: u64) -> Option<(Self, u64)> {
        let stage = Self::ALL.get(usize::try_from(word >> 56).ok()?)?;
        let tag = word & WHOSE;
        (stage.word(tag) == word).then_some((*stage, tag))
    }

    /// Whether the record's part of the device is somebody's, or may become so.
    pub const fn has_space(self) -> bool {
        matches!(self, Self::Announced | Self::Taken | Self::Held)
    }

    /// Whether a node that died left it so on its way to a segment.
    pub const fn is_unfinished(self) -> bool {
        matches!(self, Self::Claimed | Self::Announced | Self::Taken)
    }
}

/// What tells a claim of a node from all others: a number from its name, and one that is as good as new each time.
pub fn tag(node: &str, claim: u64) -> u64 {
    let hash = blake3::hash(node.as_bytes());
    let mut word = [0; 8];
    word.copy_from_slice(&hash.as_bytes()[..8]);
    u64::from_le_bytes(word) & WHOSE & !WHICH | claim & WHICH
}

/// Whether two claims are of one node.
pub const fn same_node(one: u64, other: u64) -> bool {
    one & !WHICH == other & !WHICH
}

/// What a record says.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Entry<N> {
    /// Which record.
    pub index: usize,
    /// How far it is.
    pub stage: Stage,
    /// The segment's name.
    pub name: N,
    /// Where it is.
    pub extent: Extent,
}

/// What a node does that has announced a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// It is the node's.
    Mine,
    /// The record of this number wants the same, and gives it up or gets it: to be looked at again.
    Wait(usize),
    /// It takes back what it announced, and tries again elsewhere.
    Again,
    /// The segment in the record of this number has its name.
    NameTaken(usize),
}

/// What a node does that has announced `own`, by what it sees in all other records afterwards.
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
    // What cannot be got comes before what might be.
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
        // Others' content does not count before it is announced, nor what is elsewhere.
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
