//! The destination's side of the comparison of a hole: a hole here too is equal, and the rest is read in pieces.

use crate::action::{Action, Content, DiskOperation, DiskTag, Inspect};
use crate::controller::cx::Cx;
use crate::controller::requests::slots::Work;
use crate::request::{RequestError, RequestTag};
use crate::units::{Extent, Lba};

/// Sectors of a hole under verification read at once: 128 KiB.
pub const HOLE_PIECE_SECTORS: u32 = 256;

/// Step after an operation of the comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// The end: true if all of the extent reads as zeroes, or the disk's error.
    Over(Result<bool, RequestError>),
    /// The next operation: everything before `from` reads as zeroes.
    Next { from: Lba, operation: DiskOperation },
}

/// Returns the step after an operation that began at `from` and ended with `result`.
fn next(extent: Extent, from: Lba, result: Result<Content, RequestError>) -> Step {
    let rest = |from: Lba| Extent::new(from, extent.end().0.saturating_sub(from.0) as u32);
    let piece = |from: Lba| {
        let rest = rest(from)?;
        Extent::new(from, rest.sectors().min(HOLE_PIECE_SECTORS))
    };
    let (from, next) = match result {
        Err(error) => return Step::Over(Err(error)),
        Ok(Content::Hole(sectors)) => {
            let from = Lba(from.0 + u64::from(sectors));
            let inspect = Inspect::Zeroes;
            let read = piece(from).map(|extent| DiskOperation::Read { extent, inspect });
            (from, read)
        }
        Ok(Content::Zeroes) => {
            let from = piece(from).map_or(from, Extent::end);
            let look = rest(from).map(|extent| DiskOperation::FindHole { extent });
            (from, look)
        }
        Ok(Content::Data | Content::Digest(_) | Content::LongHole { .. }) => {
            return Step::Over(Ok(false));
        }
    };
    match next {
        Some(operation) => Step::Next { from, operation },
        None => Step::Over(Ok(true)),
    }
}

impl Cx {
    /// Handles the end of an operation of a comparison. Returns the comparison's result once it is over.
    pub(in crate::controller) fn hole_compared(
        &mut self,
        tag: RequestTag,
        result: Result<Content, RequestError>,
    ) -> Option<Result<bool, RequestError>> {
        let slot = &mut self.slots[tag];
        let (Work::VerifyHole { from, .. }, Some(extent)) = (&mut slot.work, slot.extent) else {
            return None;
        };
        match next(extent, *from, result) {
            Step::Over(result) => Some(result),
            Step::Next {
                from: next,
                operation,
            } => {
                *from = next;
                self.act(Action::Disk {
                    tag: DiskTag::Replica(tag),
                    operation,
                });
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares a hole with a disk whose pieces are holes (`.`), zeroes that take space (`0`) or data (`x`), and counts
    /// the reads.
    fn compare(disk: &str) -> (Result<bool, RequestError>, usize) {
        let piece = u64::from(HOLE_PIECE_SECTORS);
        let extent = Extent::new(Lba(1000 * piece), disk.len() as u32 * HOLE_PIECE_SECTORS)
            .expect("an extent");
        let at = |start: Lba| (start.0 / piece - 1000) as usize;
        let (mut from, mut operation) = (extent.start(), DiskOperation::FindHole { extent });
        let mut reads = 0;
        loop {
            let content = match operation {
                DiskOperation::FindHole { extent } => {
                    let holes = disk[at(extent.start())..].bytes();
                    let holes = holes.take_while(|piece| *piece == b'.').count();
                    Content::Hole(holes as u32 * HOLE_PIECE_SECTORS)
                }
                DiskOperation::Read { extent, .. } => {
                    assert_eq!(extent.sectors(), HOLE_PIECE_SECTORS);
                    reads += 1;
                    match disk.as_bytes()[at(extent.start())] {
                        b'x' => Content::Data,
                        _ => Content::Zeroes,
                    }
                }
                _ => panic!("{operation:?}"),
            };
            match next(extent, from, Ok(content)) {
                Step::Over(result) => return (result, reads),
                Step::Next {
                    from: next,
                    operation: following,
                } => (from, operation) = (next, following),
            }
        }
    }

    #[test]
    fn a_hole_equals_holes_and_zeroes_and_nothing_else() {
        assert_eq!(compare("...."), (Ok(true), 0));
        assert_eq!(compare("0"), (Ok(true), 1));
        assert_eq!(compare(".00.0"), (Ok(true), 3));
        assert_eq!(compare("..0.x"), (Ok(false), 2));
        assert_eq!(compare("x..."), (Ok(false), 1));
    }

    #[test]
    fn a_disk_that_fails_is_no_answer() {
        let extent = Extent::new(Lba(0), 8).expect("an extent");
        let failed = next(extent, Lba(0), Err(RequestError::Io));
        assert_eq!(failed, Step::Over(Err(RequestError::Io)));
    }
}
