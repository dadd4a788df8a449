//! A record of a device's table: a segment's header, its stage, and its part of the device.
//!
//! Write access by field: the stage of a free record, any node, by compare-and-swap; a claimed record, the claiming
//! node; a segment's title and question, the node named in the title; the answer to a question, the node that found the
//! question.

use std::sync::atomic::Ordering;

use super::claim::{Entry, Stage};
use super::space::Extent;
use super::table::checked;
use crate::ownership::Title;
use crate::pool::header::{self, Header};
use crate::pool::page::{LOST, Words};

/// Words of a record.
pub(super) const RECORD_WORDS: usize = 128;
/// Longest name of a segment in bytes, like a VM's.
pub(super) const LONGEST_NAME: usize = 128;
/// Words of a question, and of an answer.
const PROOF_WORDS: usize = 4;

/// Positions of the words after the header.
const AT_STAGE: usize = header::WORDS;
const AT_OFFSET: usize = AT_STAGE + 1;
const AT_CHECK: usize = AT_STAGE + 2;
const AT_LENGTH: usize = AT_STAGE + 3;
const AT_NAME: usize = AT_STAGE + 4;
const AT_QUESTION: usize = AT_NAME + LONGEST_NAME / 8;
const AT_ANSWER: usize = AT_QUESTION + PROOF_WORDS;
const _: () = assert!(AT_ANSWER + PROOF_WORDS <= RECORD_WORDS);

/// A mapped record.
#[derive(Debug)]
pub(super) struct Record(Words);

/// The immutable content of a segment's record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Content {
    pub(super) name: String,
    pub(super) extent: Extent,
    pub(super) id: [u8; 16],
}

impl Content {
    /// Computes the checksum.
    fn check(&self, index: usize) -> u64 {
        let id = u128::from_le_bytes(self.id);
        let Extent { offset, bytes } = self.extent;
        let mut words = vec![index as u64, offset, bytes, id as u64, (id >> 64) as u64];
        words.extend(name_words(&self.name));
        checked(&words)
    }
}

fn name_words(name: &str) -> impl Iterator<Item = u64> {
    let word = |index: usize| {
        let mut word = [0; 8];
        let bytes = name.as_bytes();
        let from = (index * 8).min(bytes.len());
        let part = &bytes[from..bytes.len().min(from + 8)];
        word[..part.len()].copy_from_slice(part);
        u64::from_le_bytes(word)
    };
    (0..LONGEST_NAME / 8).map(word)
}

impl Record {
    pub(super) const fn at(words: Words) -> Self {
        Self(words)
    }

    pub(super) fn header(&self) -> Header {
        Header::at(self.0.clone())
    }

    fn load(&self, index: usize) -> u64 {
        self.0.at(index).load(Ordering::SeqCst)
    }

    /// Returns the stage, and the claim's tag until the record is a segment.
    ///
    /// # Errors
    /// A description of the damage.
    pub(super) fn stage(&self) -> Result<(Stage, u64), &'static str> {
        let stage = self.load(AT_STAGE);
        // Lost memory reads as zeroes, which would mean a free record.
        if self.0.are_lost() {
            return Err(LOST);
        }
        Stage::of(stage).ok_or("its stage makes no sense")
    }

    /// Claims a free record. Returns false if another claim was first.
    pub(super) fn claim(&self, tag: u64) -> bool {
        self.change(Stage::Free, Stage::Claimed, tag)
    }

    /// Changes the stage from `from` to `to`, after persisting all earlier writes. Returns false without a change if
    /// the stage is not `from`.
    #[must_use]
    pub(super) fn change(&self, from: Stage, to: Stage, tag: u64) -> bool {
        if from != Stage::Free {
            self.0.persist(0..RECORD_WORDS);
        }
        let stage = self.0.at(AT_STAGE);
        let (success, failure) = (Ordering::SeqCst, Ordering::SeqCst);
        let changed = stage
            .compare_exchange(from.word(tag), to.word(tag), success, failure)
            .is_ok();
        if changed {
            // Later reads must come after others can see the new stage.
            self.0.persist(AT_STAGE..AT_STAGE + 1);
        }
        changed && !self.0.are_lost()
    }

    /// Writes the segment's content. The record must be claimed by the caller's node.
    pub(super) fn write(&self, index: usize, content: &Content, title: &Title) {
        let store = |at: usize, value: u64| self.0.at(at).store(value, Ordering::Relaxed);
        self.header().write(content.extent.bytes, content.id, title);
        store(AT_OFFSET, content.extent.offset);
        store(AT_LENGTH, content.name.len() as u64);
        for (word, value) in name_words(&content.name).enumerate() {
            store(AT_NAME + word, value);
        }
        for word in 0..2 * PROOF_WORDS {
            store(AT_QUESTION + word, 0);
        }
        store(AT_CHECK, content.check(index));
    }

    /// Reads the segment's content.
    ///
    /// # Errors
    /// A description of the damage.
    pub(super) fn content(
        &self,
        index: usize,
        space: Extent,
        align: u64,
    ) -> Result<Content, &'static str> {
        let (bytes, id) = self.header().read()?;
        let length = usize::try_from(self.load(AT_LENGTH)).unwrap_or(usize::MAX);
        if length == 0 || length > LONGEST_NAME {
            return Err("its name makes no sense");
        }
        let words = (0..LONGEST_NAME / 8).map(|word| self.load(AT_NAME + word));
        let mut name: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        name.truncate(length);
        // The name is displayed without escaping.
        let name = String::from_utf8(name).ok();
        let name = name.filter(|name| !name.contains(char::is_control));
        let name = name.ok_or("its name makes no sense")?;
        let offset = self.load(AT_OFFSET);
        let extent = Extent { offset, bytes };
        let content = Content { name, extent, id };
        let check = self.load(AT_CHECK);
        if self.0.are_lost() {
            return Err(LOST);
        }
        if check != content.check(index) {
            return Err("its check does not fit");
        }
        let is_whole = offset.is_multiple_of(align) && bytes.is_multiple_of(align);
        if !is_whole || offset.checked_add(bytes).is_none() || !space.has(extent) {
            return Err("it is not where segments are");
        }
        Ok(content)
    }

    /// Reads the entry for an allocating node; the content is read only once announced.
    ///
    /// # Errors
    /// A description of the damage. The free space is then unknown.
    pub(super) fn entry(
        &self,
        index: usize,
        space: Extent,
        align: u64,
    ) -> Result<Entry<String>, &'static str> {
        let mut last = Err("it changes all the time");
        // Another node may be between two of its writes.
        for _ in 0..1000 {
            let stage = self.stage()?;
            let read = match stage.0.has_space() {
                true => self.content(index, space, align),
                false => Ok(Content {
                    name: String::new(),
                    extent: Extent {
                        offset: 0,
                        bytes: 0,
                    },
                    id: [0; 16],
                }),
            };
            if self.stage()? != stage {
                continue;
            }
            last = read.map(|content| Entry {
                index,
                stage: stage.0,
                name: content.name,
                extent: content.extent,
            });
            if last.is_ok() {
                break;
            }
        }
        last
    }

    /// Writes a question, and clears the previous answer.
    pub(super) fn ask(&self, nonce: &[u8; 32]) {
        self.write_proof(AT_ANSWER, &[0; 32]);
        self.write_proof(AT_QUESTION, nonce);
    }

    pub(super) fn question(&self) -> [u8; 32] {
        self.read_proof(AT_QUESTION)
    }

    pub(super) fn answer(&self, echo: &[u8; 32]) {
        self.write_proof(AT_ANSWER, echo);
    }

    pub(super) fn answered(&self) -> [u8; 32] {
        self.read_proof(AT_ANSWER)
    }

    fn write_proof(&self, at: usize, bytes: &[u8; 32]) {
        for (index, chunk) in bytes.chunks_exact(8).enumerate() {
            let mut word = [0; 8];
            word.copy_from_slice(chunk);
            let word = u64::from_le_bytes(word);
            self.0.at(at + index).store(word, Ordering::Release);
        }
        self.0.persist(at..at + PROOF_WORDS);
    }

    fn read_proof(&self, at: usize) -> [u8; 32] {
        let mut bytes = [0; 32];
        for (index, chunk) in bytes.chunks_exact_mut(8).enumerate() {
            let word = self.0.at(at + index).load(Ordering::Acquire);
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }
}
