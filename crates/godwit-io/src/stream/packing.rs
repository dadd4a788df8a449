//! The data of a migration, compressed block by block before it leaves (docs/internals/protocol.md).
//!
//! The header of a compressed frame is followed by blocks. A block starts with four bytes, little-endian: the number of
//! bytes that follow, with the highest bit set if these bytes are uncompressed data. Each block stands for 64 KiB of
//! data, the last block for the rest.

use std::io;

use godwit_core::wire::{DecodeError, HEADER_SIZE, Header};
use zstd::bulk::{Compressor, Decompressor};

use crate::zeroes::has_zero_block;

/// Data of one block. Short, because the compressing thread also serves guests.
const BLOCK: usize = 64 << 10;

/// Bytes before a block.
const LENGTH: usize = 4;

/// Flag in a block's length: the block holds uncompressed data.
const STORED: u32 = 1 << 31;

/// The fastest of the usual levels.
const LEVEL: i32 = 1;

/// The compressor of waiting frames.
pub struct Packer(Compressor<'static>);

impl Packer {
    /// Returns a compressor with its working memory.
    ///
    /// # Errors
    /// The library has no memory for the compressor.
    pub fn new() -> io::Result<Self> {
        Compressor::new(LEVEL).map(Self)
    }

    /// Appends a block that stands for `data` to `into`.
    fn append(&mut self, data: &[u8], into: &mut Vec<u8>) {
        let start = into.len();
        // Only a result that is at least a little shorter than the data is worth decompressing.
        into.resize(start + LENGTH + data.len() - data.len() / 16, 0);
        let body = start + LENGTH;
        let length = match self.0.compress_to_buffer(data, &mut into[body..]) {
            Ok(length) => {
                into.truncate(body + length);
                length as u32
            }
            // The buffer is too short, so the data does not become shorter.
            Err(_) => {
                into.truncate(start);
                return append_stored(data, into);
            }
        };
        into[start..body].copy_from_slice(&length.to_le_bytes());
    }
}

/// Appends a block that is `data` itself to `into`.
fn append_stored(data: &[u8], into: &mut Vec<u8>) {
    into.extend_from_slice(&(data.len() as u32 | STORED).to_le_bytes());
    into.extend_from_slice(data);
}

/// The part of a frame to compress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// All blocks, because the link is slow. A frame that does not become shorter soon leaves uncompressed.
    Everything,
    /// Only the blocks with zeroes, which are known to be many. Takes next to no time.
    Zeroes,
}

/// The progress of compressing a frame's data.
#[derive(Debug)]
pub(super) struct Packing {
    /// Part to compress.
    pub(super) what: What,
    /// Blocks so far.
    pub(super) blocks: Vec<u8>,
    /// Bytes of data in `blocks`.
    done: usize,
}

/// The outcome of one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// More data of the frame follows.
    More,
    /// The data is complete, and the frame is shorter now.
    Complete,
    /// Compression saves too little: the frame leaves uncompressed.
    Useless,
}

impl Packing {
    pub(super) const fn new(what: What) -> Self {
        Self {
            what,
            blocks: Vec::new(),
            done: 0,
        }
    }

    /// Compresses the next block of `data`. Returns the length of the data in the block. `data` is the same in every
    /// call.
    pub(super) fn step(&mut self, data: &[u8], packer: &mut Packer) -> (usize, Step) {
        let block = &data[self.done..data.len().min(self.done + BLOCK)];
        if self.what == What::Everything || has_zero_block(block) {
            packer.append(block, &mut self.blocks);
        } else {
            append_stored(block, &mut self.blocks);
        }
        self.done += block.len();
        let decided = self.what == What::Everything || self.done == data.len();
        let step = if decided && self.blocks.len() > self.done - self.done / 8 {
            Step::Useless
        } else if self.done == data.len() {
            Step::Complete
        } else {
            Step::More
        };
        (block.len(), step)
    }
}

/// Writes into the header at the start of `frame` that `length` bytes of compressed data follow. Returns false if
/// `frame` does not start with a header.
pub(super) fn announce(frame: &mut [u8], length: usize) -> bool {
    let header = frame
        .first_chunk_mut::<HEADER_SIZE>()
        .and_then(|bytes| Some((Header::decode(bytes).ok()?, bytes)));
    let (Some((header, bytes)), Ok(length)) = (header, u32::try_from(length)) else {
        return false;
    };
    *bytes = header.compressed(length).encode();
    true
}

/// The decompressor of arriving frames.
pub struct Unpacker {
    context: Decompressor<'static>,
    /// Room for one block and its length.
    block: Box<[u8]>,
    /// Bytes of `block` received so far.
    filled: usize,
}

impl Unpacker {
    /// Returns a decompressor with its working memory.
    ///
    /// # Errors
    /// Memory is short.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            context: Decompressor::new()?,
            block: vec![0; LENGTH + BLOCK].into_boxed_slice(),
            filled: 0,
        })
    }

    /// Returns the room for the next bytes, of `missing` bytes left in the frame. Never empty.
    ///
    /// # Errors
    /// The frame ends within a block, or no block is that long.
    pub fn room(&mut self, missing: u32) -> Result<&mut [u8], DecodeError> {
        let end = self.end()?;
        let room = &mut self.block[self.filled..end];
        if room.len() > missing as usize {
            return Err(DecodeError::Body);
        }
        Ok(room)
    }

    /// Counts `count` bytes as received in the room. Returns true if a whole block is there.
    ///
    /// # Errors
    /// No block is that long.
    pub fn received(&mut self, count: usize) -> Result<bool, DecodeError> {
        self.filled += count;
        Ok(self.filled > LENGTH && self.filled == self.end()?)
    }

    /// Returns the range of the block at `done` in a frame's `length` bytes of data.
    pub fn place(done: u32, length: u32) -> std::ops::Range<usize> {
        done as usize..length.min(done.saturating_add(BLOCK as u32)) as usize
    }

    /// Fills `into` from the received block.
    ///
    /// # Errors
    /// The block stands for less or more.
    pub fn unpack(&mut self, into: &mut [u8]) -> Result<(), DecodeError> {
        let (_, stored) = self.length();
        let body = &self.block[LENGTH..self.filled];
        let length = if stored {
            if body.len() == into.len() {
                into.copy_from_slice(body);
            }
            body.len()
        } else {
            self.context
                .decompress_to_buffer(body, into)
                .map_err(|_| DecodeError::Body)?
        };
        self.filled = 0;
        if length == into.len() {
            Ok(())
        } else {
            Err(DecodeError::Body)
        }
    }

    /// Returns the length of the current block, and true if the block holds uncompressed data.
    fn length(&self) -> (usize, bool) {
        let [a, b, c, d, ..] = *self.block else {
            return (0, false);
        };
        let length = u32::from_le_bytes([a, b, c, d]);
        ((length & !STORED) as usize, length & STORED != 0)
    }

    /// Returns the number of bytes that complete the current part, the length or the block.
    fn end(&self) -> Result<usize, DecodeError> {
        if self.filled < LENGTH {
            return Ok(LENGTH);
        }
        match self.length() {
            (length @ 1..=BLOCK, _) => Ok(LENGTH + length),
            _ => Err(DecodeError::Body),
        }
    }
}

#[cfg(test)]
mod tests {
    use godwit_core::action::ChunkSlot;
    use godwit_core::units::{Extent, Generation, Lba};
    use godwit_core::wire::Message;
    use proptest::prelude::*;

    use super::*;

    /// Returns data of which every other run of 1 KiB is random: it compresses to half.
    fn half(length: usize) -> Vec<u8> {
        let mut state = 1_u64;
        let byte = |at: usize| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            if (at / 1024).is_multiple_of(2) {
                (state >> 56) as u8
            } else {
                0x5a
            }
        };
        (0..length).map(byte).collect()
    }

    /// Returns the blocks of `data` and the last step.
    fn packed(data: &[u8]) -> (Vec<u8>, Step) {
        let mut packer = Packer::new().expect("a packer");
        let mut packing = Packing::new(What::Everything);
        loop {
            match packing.step(data, &mut packer) {
                (_, Step::More) => {}
                (_, end) => return (packing.blocks, end),
            }
        }
    }

    /// Unpacks `blocks` as an engine does when they arrive `at_once` bytes at a time.
    fn unpacked(blocks: &[u8], length: usize, at_once: usize) -> Result<Vec<u8>, DecodeError> {
        let mut unpacker = Unpacker::new().expect("an unpacker");
        let (mut data, mut done, mut rest) = (vec![0; length], 0, blocks);
        while done < length as u32 {
            let room = unpacker.room(rest.len() as u32)?;
            let count = room.len().min(at_once);
            let (now, later) = rest.split_at(count);
            room[..count].copy_from_slice(now);
            rest = later;
            if unpacker.received(count)? {
                let place = Unpacker::place(done, length as u32);
                done = place.end as u32;
                unpacker.unpack(&mut data[place])?;
            }
        }
        assert!(rest.is_empty());
        Ok(data)
    }

    fn block(length: u32, body: &[u8]) -> Vec<u8> {
        [&length.to_le_bytes(), body].concat()
    }

    #[test]
    fn data_of_any_length_comes_back() {
        for length in [4096, BLOCK - 512, BLOCK, BLOCK + 512, 1 << 20] {
            let data = half(length);
            let (blocks, step) = packed(&data);
            assert_eq!(step, Step::Complete, "{length} bytes");
            assert!(blocks.len() < length * 6 / 10, "{length} bytes");
            for at_once in [1000, 1 << 20] {
                assert!(unpacked(&blocks, length, at_once) == Ok(data.clone()));
            }
        }
    }

    #[test]
    fn a_block_that_does_not_become_shorter_is_kept_as_it_is() {
        let random: Vec<u8> = (0..BLOCK as u64)
            .map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8 ^ (at >> 3) as u8)
            .collect();
        let data = [&half(4 * BLOCK)[..], &random].concat();
        let mut packer = Packer::new().expect("a packer");
        let mut blocks = Vec::new();
        data.chunks(BLOCK)
            .for_each(|data| packer.append(data, &mut blocks));
        assert!(unpacked(&blocks, data.len(), 1 << 20) == Ok(data));
    }

    #[test]
    fn one_block_is_tried_of_data_that_does_not_become_shorter() {
        let mut state = 1_u64;
        let random: Vec<u8> = (0..4 * BLOCK)
            .map(|_| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                (state >> 56) as u8
            })
            .collect();
        let mut packing = Packing::new(What::Everything);
        let mut packer = Packer::new().expect("a packer");
        assert_eq!(packing.step(&random, &mut packer), (BLOCK, Step::Useless));
    }

    #[test]
    fn a_header_tells_of_compressed_data() {
        let message = Message::Copy {
            slot: ChunkSlot(3),
            generation: Generation(1),
            extent: Extent::new(Lba(8), 16).expect("an extent"),
            zeroes: false,
        };
        let mut frame = message.encode().0.encode();
        assert!(announce(&mut frame, 1000));
        let header = Header::decode(&frame).expect("a header");
        assert!(header.is_compressed());
        assert_eq!(header.payload_length, 1000);
        assert_eq!(Message::decode(&header, &[]), Ok(message));
        assert!(!announce(&mut [0; 64], 1000));
    }

    #[test]
    fn blocks_that_no_packer_makes_are_refused() {
        let data = half(BLOCK + 512);
        let (blocks, _) = packed(&data);
        let first = LENGTH + u32::from_le_bytes(*blocks.first_chunk().expect("a length")) as usize;
        for (what, wrong) in [
            ("nothing", Vec::new()),
            ("half a length", vec![1, 0]),
            ("a block of nothing", block(0, &[])),
            (
                "a block that is too long",
                block(BLOCK as u32 + 1, &[0; BLOCK + 1]),
            ),
            ("the end within a block", blocks[..first - 1].to_vec()),
            ("the end after a block", blocks[..first].to_vec()),
            ("the last block first", blocks[first..].to_vec()),
            ("as it is, but short", block(4096 | STORED, &[0; 4096])),
            ("no compressed data", block(4096, &[7; 4096])),
        ] {
            assert_eq!(
                unpacked(&wrong, data.len(), 1 << 20),
                Err(DecodeError::Body),
                "{what}"
            );
        }
    }

    proptest! {
        #[test]
        fn whatever_arrives_is_refused_or_fills_the_buffer(
            blocks in proptest::collection::vec(any::<u8>(), 1..2000),
            flips in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        ) {
            // Arbitrary bytes, and blocks that are nearly right.
            let _ = unpacked(&blocks, 4096, 100);
            let (mut right, _) = packed(&half(8192));
            for (at, value) in flips {
                let at = at.index(right.len());
                right[at] = value;
            }
            if let Ok(data) = unpacked(&right, 8192, 1 << 20) {
                prop_assert_eq!(data.len(), 8192);
            }
        }
    }
}
