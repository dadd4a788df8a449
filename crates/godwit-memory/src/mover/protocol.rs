//! What a node and the agent inside QEMU say to each other: structures of 64 bytes, as in `agent/agent.c`.

use std::time::Duration;

use super::plan::Chunk;

/// Bytes of a request, and of an answer.
pub(super) const BYTES: usize = 64;
/// The first word of each.
const MAGIC: u64 = 0x3254_4d47_4f44;

/// Chunks that move one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// All of them together.
    pub all: Chunk,
    /// Bytes of one, at most.
    pub chunk_bytes: u64,
    /// How long one may be held: it becomes smaller when it cannot be copied in half of that.
    pub hold: Duration,
    /// Whether the end moves first.
    pub downwards: bool,
    /// Bytes that move next, for which the agent makes room when it has answered.
    pub ahead_bytes: u64,
}

/// What the agent is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Request {
    /// Whether it may hold pages. Goes with a file of `/dev/userfaultfd`, if there is one.
    Hello,
    /// To begin to move this memory. Goes with the file that it is in, and the one that it goes to.
    Begin {
        /// Where QEMU has it.
        address: u64,
        /// All of it.
        bytes: u64,
        /// Of its first byte in the file that it is in.
        from_offset: u64,
        /// Of its first byte in the file that it goes to.
        to_offset: u64,
        /// Whether that file has room for it already, which it keeps, with what was there before.
        to_keeps: bool,
    },
    /// To move a run of chunks.
    Move(Run),
    /// To hold nothing any more.
    End,
    /// To track which pages of this memory are written. Goes with a file of `/dev/userfaultfd`, if there is one.
    Track {
        /// Where QEMU has it.
        address: u64,
        /// All of it.
        bytes: u64,
    },
    /// To track nothing any more.
    Untrack,
    /// To fill QEMU's page tables with what is there of a part of the memory.
    Fill {
        /// Where QEMU has the part.
        address: u64,
        /// Of the part.
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

/// What it answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    /// Zero, or an errno.
    pub(super) error: i32,
    /// Nanoseconds for which a chunk was held, at most.
    pub(super) longest_ns: u64,
    /// Bytes that were copied.
    pub(super) copied: u64,
    /// Bytes that have moved.
    pub(super) moved: u64,
    /// Chunks that have moved.
    pub(super) chunks: u64,
    /// Nanoseconds for which they were held in all.
    pub(super) held_ns: u64,
}

impl Answer {
    /// Nothing when the bytes are no answer.
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
