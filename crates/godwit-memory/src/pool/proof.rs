//! A proof between two nodes that a pool of one name is the same memory. Each node writes a value that only the other
//! node's current question explains, and reads the value that the other node wrote.
//!
//! The source writes a nonce and sends it. The destination finds the same nonce in its own pool, and so sees the
//! source's writes. The destination then writes an echo of the nonce. The source finds the echo, and so sees the
//! destination's writes. In a folder, both values are in a file of the migration; in a device, both are in the record
//! of the segment to be moved.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use crate::pool::page::{LOST, Page};
use crate::pool::{Pool, PoolError};

/// Bytes of a nonce, and of an echo.
const BYTES: usize = 32;

/// A question of the source.
#[derive(Debug)]
pub struct Question {
    pool: Pool,
    /// Name of the segment.
    segment: String,
    path: PathBuf,
    nonce: [u8; BYTES],
}

/// Returns a node's echo of a nonce.
fn echo(nonce: &[u8; BYTES], node: &str) -> [u8; BYTES] {
    blake3::keyed_hash(nonce, node.as_bytes()).into()
}

fn path(pool: &Pool, migration: &str) -> PathBuf {
    pool.path().join(format!(".{migration}.proof"))
}

/// Opens a file that another node may have put there, without following links and without blocking.
fn open(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    options.custom_flags(flags.bits() as i32).open(path)
}

/// Writes to a file of whole huge pages, which can be written through a mapping only.
fn write_huge(pool: &Pool, file: &File, bytes: &[u8]) -> io::Result<()> {
    let page = Page::map(file, pool.page_bytes())?;
    for (index, word) in bytes.chunks_exact(8).enumerate() {
        let mut value = [0; 8];
        value.copy_from_slice(word);
        page.word(index)
            .store(u64::from_ne_bytes(value), Ordering::Release);
    }
    match page.is_lost() {
        true => Err(io::Error::other(LOST)),
        false => Ok(()),
    }
}

/// Reads the relevant bytes, and one more byte that reveals a longer file.
fn read(pool: &Pool, path: &Path) -> io::Result<Vec<u8>> {
    let file = open(OpenOptions::new().read(true), path)?;
    if pool.is_huge() {
        // The rest of the page is unused. An echo is never all zeroes.
        let mut bytes = vec![0; 2 * BYTES];
        file.take(2 * BYTES as u64).read_exact(&mut bytes)?;
        if bytes[BYTES..].iter().all(|byte| *byte == 0) {
            bytes.truncate(BYTES);
        }
        return Ok(bytes);
    }
    let mut bytes = Vec::with_capacity(2 * BYTES + 1);
    file.take(2 * BYTES as u64 + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

impl Question {
    /// Writes a nonce into the pool for a migration of this segment. The migration's id names the file.
    ///
    /// # Errors
    /// [`PoolError::Io`]; in a device also if the segment does not exist.
    pub fn ask(pool: &Pool, segment: &str, migration: &str) -> Result<Self, PoolError> {
        let path = path(pool, migration);
        let mut nonce = [0; BYTES];
        rustix::rand::getrandom(&mut nonce, rustix::rand::GetRandomFlags::empty())
            .map_err(io::Error::from)
            .map_err(PoolError::io(&path))?;
        let question = Self {
            pool: pool.clone(),
            segment: segment.to_owned(),
            path,
            nonce,
        };
        if let Some(device) = pool.device() {
            device.ask(segment, &nonce)?;
            return Ok(question);
        }
        let path = &question.path;
        let written = match pool.is_huge() {
            false => std::fs::write(path, nonce),
            true => {
                let mut options = OpenOptions::new();
                let options = options.read(true).write(true).create(true);
                options.mode(0o600).open(path).and_then(|file| {
                    file.set_len(pool.page_bytes())?;
                    // A missing page is an error here, and would raise a signal later.
                    let flags = rustix::fs::FallocateFlags::empty();
                    rustix::fs::fallocate(&file, flags, 0, pool.page_bytes())?;
                    write_huge(pool, &file, &[nonce, [0; BYTES]].concat())
                })
            }
        };
        written.map_err(PoolError::io(path))?;
        Ok(question)
    }

    /// Returns the nonce in hexadecimal, for the other node.
    pub fn nonce(&self) -> String {
        hexadecimal(&self.nonce)
    }

    /// Checks that `node` has answered in this memory.
    ///
    /// # Errors
    /// [`PoolError::OtherMemory`] if the answer is missing.
    pub fn answered_by(&self, node: &str) -> Result<(), PoolError> {
        if let Some(device) = self.pool.device() {
            return match device.answered(&self.segment)? == echo(&self.nonce, node) {
                true => Ok(()),
                false => Err(PoolError::OtherMemory),
            };
        }
        let written = read(&self.pool, &self.path).map_err(PoolError::io(&self.path))?;
        if written.get(BYTES..) == Some(echo(&self.nonce, node).as_slice()) {
            return Ok(());
        }
        Err(PoolError::OtherMemory)
    }
}

impl Drop for Question {
    fn drop(&mut self) {
        if self.pool.is_device() {
            return;
        }
        // A file that stays behind is small and unused.
        let _ = std::fs::remove_file(&self.path);
    }
}

fn hexadecimal(bytes: &[u8; BYTES]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Answers the question of the source of a migration of this segment, as node `node`.
///
/// # Errors
/// [`PoolError::OtherMemory`] if the nonce is not in this memory.
pub fn answer(
    pool: &Pool,
    segment: &str,
    migration: &str,
    nonce: &str,
    node: &str,
) -> Result<(), PoolError> {
    if let Some(device) = pool.device() {
        let written = match device.question(segment) {
            Err(PoolError::NoSegment(_)) => return Err(PoolError::OtherMemory),
            read => read?,
        };
        return match hexadecimal(&written) == nonce {
            true => device.answer(segment, &echo(&written, node)),
            false => Err(PoolError::OtherMemory),
        };
    }
    let path = path(pool, migration);
    let written = match read(pool, &path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(PoolError::OtherMemory);
        }
        read => read.map_err(PoolError::io(&path))?,
    };
    let Ok(written) = <[u8; BYTES]>::try_from(written) else {
        return Err(PoolError::OtherMemory);
    };
    if hexadecimal(&written) != nonce {
        return Err(PoolError::OtherMemory);
    }
    let both = [written, echo(&written, node)].concat();
    // Written in place: a new file of this name need not be the file of the source.
    let file = open(OpenOptions::new().read(true).write(true), &path);
    let file = file.map_err(PoolError::io(&path))?;
    let said = match pool.is_huge() {
        false => std::os::unix::fs::FileExt::write_all_at(&file, &both, 0),
        true => write_huge(pool, &file, &both),
    };
    said.map_err(PoolError::io(&path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_folder_proves_itself_and_another_does_not() {
        let folders = [(); 2].map(|()| tempfile::tempdir().expect("a folder"));
        let [here, there] = folders
            .each_ref()
            .map(|folder| Pool::open(folder.path()).expect("a pool"));
        let question = Question::ask(&here, "v", "m").expect("asks");
        assert!(matches!(
            question.answered_by("b"),
            Err(PoolError::OtherMemory)
        ));
        let elsewhere = answer(&there, "v", "m", &question.nonce(), "b");
        assert!(matches!(elsewhere, Err(PoolError::OtherMemory)));
        // An old copy of the folder has another nonce.
        std::fs::write(there.path().join(".m.proof"), [7; 32]).expect("writes");
        answer(&there, "v", "m", &question.nonce(), "b").expect_err("an old copy");
        answer(&here, "v", "m", &question.nonce(), "b").expect("answers");
        question.answered_by("b").expect("is answered");
        question
            .answered_by("c")
            .expect_err("somebody else's answer");
        // Files of another node are never followed, waited for, or read without a limit.
        let path = here.path().join(".n.proof");
        std::os::unix::fs::symlink(here.path().join(".m.proof"), &path).expect("links");
        answer(&here, "v", "n", &question.nonce(), "b").expect_err("is elsewhere");
        std::fs::remove_file(&path).expect("removes");
        std::fs::write(&path, vec![0; 1 << 20]).expect("writes");
        assert_eq!(read(&here, &path).expect("reads").len(), 2 * BYTES + 1);
        std::fs::remove_file(&path).expect("removes");
        drop(question);
        assert_eq!(std::fs::read_dir(here.path()).expect("lists").count(), 0);
    }
}
