//! A segment's header, mapped by all nodes: the segment's size, identity and title.
//!
//! The title is replaced without a lock, and is never torn: the next epoch's owner is written beside the present owner,
//! and then a single word switches over.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::ownership::Title;
use crate::pool::PAGE_BYTES;
use crate::pool::page::{LOST, Page, Words};

/// First word of each header.
const MAGIC: u64 = u64::from_le_bytes(*b"GODWITMS");
/// Version of the layout.
const VERSION: u64 = 1;
/// Longest name of an owner in bytes, like a node's.
const LONGEST_NAME: usize = 128;
/// Words of an owner's slot: the name's length, then the name.
const SLOT_WORDS: usize = 1 + LONGEST_NAME / 8;

/// Positions of the words.
const AT_MAGIC: usize = 0;
const AT_VERSION: usize = 1;
const AT_BYTES: usize = 2;
const AT_ID: usize = 3;
const AT_AWAY: usize = 5;
const AT_EPOCH: usize = 8;
const AT_SLOTS: usize = 16;

/// Words of a header.
pub(super) const WORDS: usize = AT_SLOTS + 64;

/// A mapped header: a page of its own, or a record of a device's table.
#[derive(Debug)]
pub(super) struct Header(Words);

impl Header {
    /// Maps the header in a file of at least one page of `page_bytes` bytes.
    ///
    /// # Errors
    /// If the file is shorter, or the kernel refuses.
    pub(super) fn map(file: &File, page_bytes: u64) -> io::Result<Self> {
        let page = Arc::new(Page::map(file, page_bytes)?);
        Ok(Self(Words::from(page, 0)))
    }

    /// Returns the header in these words.
    pub(super) const fn at(words: Words) -> Self {
        Self(words)
    }

    /// Makes all writes so far visible to other hosts.
    pub(super) fn persist(&self) {
        self.0.persist(0..WORDS);
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        self.0.at(index)
    }

    /// Writes a whole header. No other node may know of the segment yet.
    pub(super) fn write(&self, bytes: u64, id: [u8; 16], title: &Title) {
        let id = u128::from_le_bytes(id);
        self.word(AT_VERSION).store(VERSION, Ordering::Relaxed);
        self.word(AT_BYTES).store(bytes, Ordering::Relaxed);
        self.word(AT_ID).store(id as u64, Ordering::Relaxed);
        self.word(AT_ID + 1)
            .store((id >> 64) as u64, Ordering::Relaxed);
        self.write_slot(title);
        self.word(AT_EPOCH).store(title.epoch, Ordering::Release);
        self.word(AT_MAGIC).store(MAGIC, Ordering::Release);
    }

    /// Returns the bytes of the segment's memory, and its id.
    ///
    /// # Errors
    /// A description of the damage.
    pub(super) fn read(&self) -> Result<(u64, [u8; 16]), &'static str> {
        let magic = self.word(AT_MAGIC).load(Ordering::Acquire);
        if self.0.are_lost() {
            return Err(LOST);
        }
        if magic != MAGIC {
            return Err("it does not begin as a segment's does");
        }
        if self.word(AT_VERSION).load(Ordering::Relaxed) != VERSION {
            return Err("another version of Godwit wrote it");
        }
        let bytes = self.word(AT_BYTES).load(Ordering::Relaxed);
        if bytes == 0 || !bytes.is_multiple_of(PAGE_BYTES) {
            return Err("its size is no number of whole pages");
        }
        let low = u128::from(self.word(AT_ID).load(Ordering::Relaxed));
        let high = u128::from(self.word(AT_ID + 1).load(Ordering::Relaxed));
        if self.0.are_lost() {
            return Err(LOST);
        }
        Ok((bytes, (high << 64 | low).to_le_bytes()))
    }

    /// Returns the bytes at the start of the memory whose room is given up because the bytes are elsewhere.
    pub(super) fn away(&self) -> u64 {
        self.word(AT_AWAY).load(Ordering::Acquire)
    }

    /// Sets the bytes whose room is given up. Only the segment's owner may do so.
    pub(super) fn set_away(&self, bytes: u64) {
        self.word(AT_AWAY).store(bytes, Ordering::Release);
    }

    /// Reads the current title.
    ///
    /// # Errors
    /// A description of the damage.
    pub(super) fn title(&self) -> Result<Title, &'static str> {
        // The title changes a few times in a VM's life, so a second attempt is nearly always the last.
        for _ in 0..1000 {
            let epoch = self.word(AT_EPOCH).load(Ordering::Acquire);
            let owner = self.read_slot(epoch);
            let is_settled = self.word(AT_EPOCH).load(Ordering::Acquire) == epoch;
            if self.0.are_lost() {
                return Err(LOST);
            }
            if is_settled {
                // No count gets this far; the next epoch would be zero.
                if epoch == 0 || epoch == u64::MAX {
                    return Err("its epoch makes no sense");
                }
                let owner = owner.ok_or("its owner's name makes no sense")?;
                return Ok(Title { epoch, owner });
            }
        }
        Err("its title changes all the time")
    }

    /// Replaces the title of the previous epoch. Returns false if another epoch is present, or if the memory is lost.
    pub(super) fn replace(&self, title: &Title) -> bool {
        let before = title.epoch - 1;
        if self.word(AT_EPOCH).load(Ordering::Acquire) != before {
            return false;
        }
        self.write_slot(title);
        let replaced = self.word(AT_EPOCH).compare_exchange(
            before,
            title.epoch,
            Ordering::AcqRel,
            Ordering::Acquire,
        );
        replaced.is_ok() && !self.0.are_lost()
    }

    fn slot(epoch: u64) -> usize {
        AT_SLOTS + (epoch % 2) as usize * 32
    }

    fn write_slot(&self, title: &Title) {
        let slot = Self::slot(title.epoch);
        let name = title.owner.as_bytes();
        let name = &name[..name.len().min(LONGEST_NAME)];
        self.word(slot).store(name.len() as u64, Ordering::Relaxed);
        for index in 1..SLOT_WORDS {
            let mut word = [0; 8];
            let from = ((index - 1) * 8).min(name.len());
            let part = &name[from..name.len().min(from + 8)];
            word[..part.len()].copy_from_slice(part);
            self.word(slot + index)
                .store(u64::from_le_bytes(word), Ordering::Relaxed);
        }
    }

    fn read_slot(&self, epoch: u64) -> Option<String> {
        let slot = Self::slot(epoch);
        let length = usize::try_from(self.word(slot).load(Ordering::Relaxed)).ok()?;
        let mut name = Vec::with_capacity(LONGEST_NAME);
        for index in 1..SLOT_WORDS {
            name.extend(
                self.word(slot + index)
                    .load(Ordering::Relaxed)
                    .to_le_bytes(),
            );
        }
        if length == 0 || length > name.len() {
            return None;
        }
        name.truncate(length);
        let name = String::from_utf8(name).ok()?;
        // The name is displayed without escaping.
        (!name.contains(char::is_control)).then_some(name)
    }
}
