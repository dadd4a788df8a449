//! The named files that a machine has memory in, as the words of its command line say.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::words::{Word, field, is_set};
use super::{LOCAL_MEMORY, Machine, escaped};

/// What a memory pool has for a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolMemory {
    /// The file or device that QEMU maps.
    pub path: PathBuf,
    /// Which part of it, unless it is all the guest's.
    pub part: Option<MemoryPart>,
}

/// A part of a file or device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryPart {
    /// Of its first byte.
    pub offset: u64,
    /// Bytes that addresses of mappings are a multiple of.
    pub align: u64,
}

/// What QEMU calls memory that is a file.
const KIND: &str = "memory-backend-file";

/// A file that a command line says memory of the guest is in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryFile {
    /// Which of the machine's words says so.
    word: usize,
    /// Where the path stands in that word; nothing when it is JSON.
    at: Option<(usize, usize)>,
    /// Its path as QEMU was told it: a file, or a folder in which QEMU makes one without a name.
    pub path: PathBuf,
    /// The word.
    pub told: String,
    /// Whether what the guest writes is written to the file.
    pub is_shared: bool,
}

impl MemoryFile {
    fn of(number: usize, word: &str) -> Option<Self> {
        let found = |at, path: &str, is_shared| Self {
            word: number,
            at,
            path: path.into(),
            told: word.to_owned(),
            is_shared,
        };
        if word.starts_with('{') {
            let read = |text: &str| serde_json::from_str::<Value>(text).ok();
            // QEMU's JSON may have its text between single quotes.
            let object = read(word).or_else(|| read(&word.replace('\'', "\"")))?;
            let path = object.get("mem-path")?.as_str()?;
            let is_shared = object.get("share").is_some_and(|share| *share != false);
            return (object.get("qom-type")? == KIND).then(|| found(None, path, is_shared));
        }
        let kind = field(word, "qom-type").map(|(_, kind)| kind);
        let is_file = word.split(',').next() == Some(KIND) || kind.as_deref() == Some(KIND);
        let (at, path) = is_file.then(|| field(word, "mem-path")).flatten()?;
        Some(found(Some(at), &path, is_set(word, "share")))
    }

    /// Whether another file can be put in its place ([`Machine::take_memory_file`]).
    pub const fn is_replaceable(&self) -> bool {
        self.at.is_some()
    }
}

impl Machine {
    /// The files that are named in words which are the same on every node.
    pub fn memory_files(&self) -> Vec<MemoryFile> {
        let words = self.words.iter().enumerate();
        let files = words.filter_map(|(number, word)| match word {
            Word::Plain(word) => MemoryFile::of(number, word),
            _ => None,
        });
        files.collect()
    }

    /// Lets every node put a file of its own in the place of this one, if that can be done.
    pub fn take_memory_file(&mut self, file: &MemoryFile) {
        let (Some((from, to)), Some(word)) = (file.at, self.words.get_mut(file.word)) else {
            return;
        };
        *word = Word::MemoryFile {
            before_memory: file.told[..from].to_owned(),
            after_memory: file.told[to..].to_owned(),
        };
    }
}

/// What a word is on a node whose memory pool has this file for the guest, or that has local memory for it.
pub(super) fn in_place(before: &str, memory: Option<&Path>, after: &str) -> String {
    let path = escaped(memory.unwrap_or(Path::new(LOCAL_MEMORY)));
    format!("{before}{path}{after}")
}
