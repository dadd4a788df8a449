//! A record of a device's table: a segment's header, how far the segment is, and where in the device.
//!
//! Who may write what: a free record, the first word of its stage, any node, by compare-and-swap; a claimed one, the node
//! that claimed it; a segment's title and question, the node that the title names; the answer to a question, the node that
//! found the question.

use std::sync::atomic::Ordering;

use super::claim::{Entry, Stage};
use super::space::Extent;
use super::table::checked;
use crate::ownership::Title;
use crate::pool::header::{self, Header};
use crate::pool::page::{LOST, Words};

/// Words of a record.
pub(super) const RECORD_WORDS: usize = 128;
/// Longest name of a segment in bytes: that of a machine.
pub(super) const LONGEST_NAME: usize = 128;
/// Words of a question, and of an answer.
const PROOF_WORDS: usize = 4;

/// Words behind the header's.
const AT_STAGE: usize = header::WORDS;
const AT_OFFSET: usize = AT_STAGE + 1;
const AT_CHECK: usize = AT_STAGE + 2;
const AT_LENGTH: usize = AT_STAGE + 3;
const AT_NAME: usize = AT_STAGE + 4;
const AT_QUESTION: usize = AT_NAME + LONGEST_NAME / 8;
const AT_ANSWER: usize = AT_QUESTION + PROOF_WORDS;
const _: () = assert!(AT_ANSWER + PROOF_WORDS <= RECORD_WORDS);

/// A record, mapped.
#[derive(Debug)]
pub(super) struct Record(Words);

/// What never changes of a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Content {
    pub(super) name: String,
    pub(super) extent: Extent,
    pub(super) id: [u8; 16],
}

impl Content {
    /// What its check is computed from.
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

    /// Its header.
    pub(super) fn header(&self) -> Header {
        Header::at(self.0.clone())
    }

    fn load(&self, index: usize) -> u64 {
        self.0.at(index).load(Ordering::SeqCst)
    }

    /// How far it is, and whose until there is a segment.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(super) fn stage(&self) -> Result<(Stage, u64), &'static str> {
        let stage = self.load(AT_STAGE);
        // Zeroes would say that it is free.
        if self.0.are_lost() {
            return Err(LOST);
        }
        Stage::of(stage).ok_or("its stage makes no sense")
    }

    /// Takes a free record for a claim of a node. False when another was first.
    pub(super) fn claim(&self, tag: u64) -> bool {
        self.change(Stage::Free, Stage::Claimed, tag)
    }

    /// Says how far it is, after all that was written to it before, if it is as far as the caller knows. False when it is
    /// not, and nothing has changed.
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
            // What is read afterwards is read after others can see this.
            self.0.persist(AT_STAGE..AT_STAGE + 1);
        }
        changed && !self.0.are_lost()
    }

    /// Writes what the segment is. The record must be claimed by the caller's node.
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

    /// What the segment is.
    ///
    /// # Errors
    /// What is wrong with it.
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
        // It is shown as it is.
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

    /// What it says to a node that allocates: its content is only looked at when that is shown.
    ///
    /// # Errors
    /// What is wrong with it: nobody can tell what is free then.
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

    /// Writes what a node asks in it, and takes away what was answered before.
    pub(super) fn ask(&self, nonce: &[u8; 32]) {
        self.write_proof(AT_ANSWER, &[0; 32]);
        self.write_proof(AT_QUESTION, nonce);
    }

    /// What was asked last.
    pub(super) fn question(&self) -> [u8; 32] {
        self.read_proof(AT_QUESTION)
    }

    /// Writes an answer.
    pub(super) fn answer(&self, echo: &[u8; 32]) {
        self.write_proof(AT_ANSWER, echo);
    }

    /// What was answered.
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
