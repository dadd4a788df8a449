//! The named files with a machine's memory, as found on the command line.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::words::{Word, field, is_set};
use super::{LOCAL_MEMORY, Machine, escaped};

/// A guest's memory in a memory pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolMemory {
    /// File or device mapped by QEMU.
    pub path: PathBuf,
    /// The guest's part of the file; `None` for the whole file.
    pub part: Option<MemoryPart>,
}

/// A part of a file or device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryPart {
    /// Offset of the first byte.
    pub offset: u64,
    /// Alignment of mapped addresses in bytes.
    pub align: u64,
}

/// QEMU's object type for memory in a file.
const KIND: &str = "memory-backend-file";

/// A file with memory of the guest, named on the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryFile {
    /// Index of the machine's word naming the file.
    word: usize,
    /// Position of the path in the word; `None` for JSON.
    at: Option<(usize, usize)>,
    /// Path on the command line: a file, or a folder in which QEMU makes an unnamed file.
    pub path: PathBuf,
    /// The word itself.
    pub told: String,
    /// True if the guest's writes reach the file.
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
            // QEMU's JSON may have text between single quotes.
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

    /// Returns true if another file can take this one's place ([`Machine::take_memory_file`]).
    pub const fn is_replaceable(&self) -> bool {
        self.at.is_some()
    }
}

impl Machine {
    /// Returns the files named in words that are the same on every node.
    pub fn memory_files(&self) -> Vec<MemoryFile> {
        let words = self.words.iter().enumerate();
        let files = words.filter_map(|(number, word)| match word {
            Word::Plain(word) => MemoryFile::of(number, word),
            _ => None,
        });
        files.collect()
    }

    /// Lets every node substitute a file of its own for this one, if the file is replaceable.
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

/// Returns the word for a node with this file in its memory pool, or with local memory.
pub(super) fn in_place(before: &str, memory: Option<&Path>, after: &str) -> String {
    let path = escaped(memory.unwrap_or(Path::new(LOCAL_MEMORY)));
    format!("{before}{path}{after}")
}
