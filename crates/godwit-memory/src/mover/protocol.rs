//! The protocol between a node and the agent inside QEMU: structures of 64 bytes, as in `agent/agent.c`.

use std::time::Duration;

use super::plan::Chunk;

/// Bytes of a request, and of an answer.
pub(super) const BYTES: usize = 64;
/// First word of each request and answer.
const MAGIC: u64 = 0x3254_4d47_4f44;

/// Consecutive chunks to move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Offset and length of the whole run.
    pub all: Chunk,
    /// Most bytes of a chunk.
    pub chunk_bytes: u64,
    /// Longest time for which a chunk may be held. The agent shrinks chunks whose copy would take more than half of the
    /// limit.
    pub hold: Duration,
    /// True if the end of the run moves first.
    pub downwards: bool,
    /// Bytes of the next move, for which the agent makes room after its answer.
    pub ahead_bytes: u64,
}

/// A request to the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Request {
    /// Asks for the ability to hold pages. Carries a file of `/dev/userfaultfd`, if there is one.
    Hello,
    /// Begins to move a memory. Carries the file to move from and the file to move to.
    Begin {
        /// Address of the memory in QEMU.
        address: u64,
        /// Bytes of the memory.
        bytes: u64,
        /// Offset of the first byte in the file to move from.
        from_offset: u64,
        /// Offset of the first byte in the file to move to.
        to_offset: u64,
        /// True if the file to move to already has room for the memory, and keeps the room and its old content.
        to_keeps: bool,
    },
    /// Moves a run of chunks.
    Move(Run),
    /// Ends the move and every hold.
    End,
    /// Begins to track the written pages of a memory. Carries a file of `/dev/userfaultfd`, if there is one.
    Track {
        /// Address of the memory in QEMU.
        address: u64,
        /// Bytes of the memory.
        bytes: u64,
    },
    /// Ends the tracking.
    Untrack,
    /// Fills QEMU's page tables with the present pages of a part of the memory.
    Fill {
        /// Address of the part in QEMU.
        address: u64,
        /// Bytes of the part.
        bytes: u64,
    },
}

impl Request {
    pub(super) fn to_bytes(self) -> [u8; BYTES] {
        let words: [u64; BYTES / 8] = match self {
            Self::Hello => [MAGIC, 1, 0, 0, 0, 0, 0, 0],
            Self::Begin {
                address,
                bytes,
                from_offset,
                to_offset,
                to_keeps,
            } => {
                let keeps = u64::from(to_keeps);
                [MAGIC, 2, address, bytes, from_offset, to_offset, 0, keeps]
            }
            Self::Move(Run {
                all: Chunk { offset, bytes },
                chunk_bytes,
                hold,
                downwards,
                ahead_bytes,
            }) => {
                let hold = u64::try_from(hold.as_nanos()).unwrap_or(u64::MAX);
                let downwards = u64::from(downwards);
                let ahead = ahead_bytes;
                [MAGIC, 3, ahead, bytes, offset, chunk_bytes, hold, downwards]
            }
            Self::End => [MAGIC, 4, 0, 0, 0, 0, 0, 0],
            Self::Track { address, bytes } => [MAGIC, 5, address, bytes, 0, 0, 0, 0],
            Self::Untrack => [MAGIC, 6, 0, 0, 0, 0, 0, 0],
            Self::Fill { address, bytes } => [MAGIC, 7, address, bytes, 0, 0, 0, 0],
        };
        let mut encoded = [0; BYTES];
        for (place, word) in encoded.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        encoded
    }
}

/// An answer of the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    /// Zero, or an errno.
    pub(super) error: i32,
    /// Longest time for which a chunk was held, in nanoseconds.
    pub(super) longest_ns: u64,
    /// Bytes copied.
    pub(super) copied: u64,
    /// Bytes moved.
    pub(super) moved: u64,
    /// Chunks moved.
    pub(super) chunks: u64,
    /// Total time for which chunks were held, in nanoseconds.
    pub(super) held_ns: u64,
}

impl Answer {
    /// Decodes an answer; returns `None` for invalid bytes.
    pub(super) fn from_bytes(bytes: &[u8; BYTES]) -> Option<Self> {
        let word = |index: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[index * 8..index * 8 + 8]);
            u64::from_ne_bytes(word)
        };
        let error = i32::try_from(word(1) as i64)
            .ok()
            .filter(|error| *error >= 0)?;
        (word(0) == MAGIC).then(|| Self {
            error,
            longest_ns: word(2),
            copied: word(3),
            moved: word(4),
            chunks: word(5),
            held_ns: word(6),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_answer_is_not_taken_for_one() {
        let encode = |words: [u64; 8]| {
            let mut bytes = [0; BYTES];
            for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
                place.copy_from_slice(&word.to_ne_bytes());
            }
            bytes
        };
        let good = encode([MAGIC, 28, 7, 9, 11, 2, 13, 0]);
        let answer = Answer::from_bytes(&good).expect("is one");
        let Answer { error, copied, .. } = answer;
        assert_eq!((error, answer.longest_ns, copied), (28, 7, 9));
        assert_eq!((answer.moved, answer.chunks, answer.held_ns), (11, 2, 13));
        for bad in [
            encode([0; 8]),
            encode([MAGIC, u64::MAX, 0, 0, 0, 0, 0, 0]),
            encode([MAGIC, 1 << 40, 0, 0, 0, 0, 0, 0]),
        ] {
            assert_eq!(Answer::from_bytes(&bad), None);
        }
    }
}
