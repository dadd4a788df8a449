//! The state of a stopped machine's processors and devices, without the memory: saved beside a machine that goes on, and
//! loaded into another QEMU.

use std::io;

use rustix::io::Errno;
use serde_json::json;
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe::{OpenOptions, Receiver};

use crate::machine::Places;
use crate::monitor::qmp::{Qmp, QmpError};
use crate::process;
use crate::user::QemuUser;

/// Most bytes of a state.
pub const MOST_BYTES: usize = 64 << 20;
/// Bytes of the pipe: enough for most machines, so that QEMU need not wait for the reader.
const PIPE_BYTES: usize = 1 << 20;
/// Bytes read at once.
const PIECE: usize = 256 << 10;

/// The beginning of QEMU's migration stream: its magic number and version 3.
const HEAD: [u8; 8] = *b"QEVM\0\0\0\x03";
/// Mark of the section that names the machine type.
const CONFIGURATION: u8 = 7;

/// The reason why a state was not saved.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// QEMU refused.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// The pipe to QEMU failed.
    #[error("the pipe for its state: {0}")]
    Pipe(io::Error),
    /// QEMU wrote something else.
    #[error("QEMU's state of its devices is not understood")]
    Format,
    /// The state is larger than [`MOST_BYTES`].
    #[error("QEMU's state of its devices has more than {} MiB", MOST_BYTES >> 20)]
    Long,
}

/// Reads the states that one QEMU saves, through a pipe in the machine's folder.
#[derive(Debug)]
pub struct StateReader {
    pipe: Receiver,
    path: String,
}

impl StateReader {
    /// Makes the pipe, in place of an earlier one.
    ///
    /// # Errors
    /// The system's error.
    pub fn new(places: &Places, user: Option<&QemuUser>) -> io::Result<Self> {
        let path = places.device_state();
        process::make_pipe(&path, user)?;
        // Opened for both directions: the pipe always has a writer, so a read before QEMU opens the pipe waits.
        let pipe = OpenOptions::new().read_write(true).open_receiver(&path)?;
        // Without privileges the limit may be lower: QEMU then waits for the reader.
        let _ = rustix::pipe::fcntl_setpipe_size(&pipe, PIPE_BYTES);
        let path = path.display().to_string();
        Ok(Self { pipe, path })
    }

    /// Saves the state of a stopped machine. The state is as QEMU wrote it: see [`to_load`].
    ///
    /// # Errors
    /// [`SaveError`].
    pub async fn save(&mut self, qmp: &Qmp) -> Result<Vec<u8>, SaveError> {
        let mut state = Vec::with_capacity(PIECE);
        let arguments = json!({ "filename": self.path, "live": false });
        let saving = qmp.execute("xen-save-devices-state", arguments);
        tokio::pin!(saving);
        loop {
            state.reserve(PIECE);
            tokio::select! {
                answer = &mut saving => {
                    answer?;
                    break;
                }
                read = self.pipe.read_buf(&mut state) => read.map_err(SaveError::Pipe)?,
            };
            check_length(&state)?;
        }
        // QEMU has written everything before the answer. The pipe itself is asked: the runtime may not know yet that there is
        // more to read.
        loop {
            state.reserve(PIECE);
            match rustix::io::read(&self.pipe, rustix::buffer::spare_capacity(&mut state)) {
                Err(Errno::AGAIN) | Ok(0) => break,
                Err(Errno::INTR) => {}
                read => {
                    read.map_err(|errno| SaveError::Pipe(errno.into()))?;
                }
            }
            check_length(&state)?;
        }
        match state.starts_with(&HEAD) {
            true => Ok(state),
            false => Err(SaveError::Format),
        }
    }
}

impl Drop for StateReader {
    /// Takes the pipe's name away while there still is a reader. A QEMU that comes to the command late, because its disks
    /// hold their answers, would wait at a pipe without a reader for ever, and its guest with it.
    fn drop(&mut self) {
        // Somebody else may have removed it.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Frees a QEMU that waits at the pipe of an earlier process of this node, which died amid a command.
pub fn free_waiting(places: &Places) {
    let path = places.device_state();
    // The pipe gets a reader for a moment. Most machines have none.
    let pipe = OpenOptions::new().read_write(true).open_receiver(&path);
    if pipe.is_ok() {
        let _ = std::fs::remove_file(&path);
    }
}

const fn check_length(state: &[u8]) -> Result<(), SaveError> {
    match state.len() > MOST_BYTES {
        true => Err(SaveError::Long),
        false => Ok(()),
    }
}

/// Returns a saved state as a QEMU loads it that waits for a migration of a machine of this type. QEMU's command for the
/// state leaves out the section that names the type, which a migration has.
///
/// # Errors
/// [`SaveError::Format`] if this is no saved state.
pub fn to_load(state: &[u8], machine_type: &str) -> Result<Vec<u8>, SaveError> {
    let rest = state.strip_prefix(&HEAD).ok_or(SaveError::Format)?;
    let length = u32::try_from(machine_type.len()).map_err(|_| SaveError::Format)?;
    let mut stream = Vec::with_capacity(state.len() + machine_type.len() + 5);
    stream.extend_from_slice(&HEAD);
    stream.push(CONFIGURATION);
    stream.extend_from_slice(&length.to_be_bytes());
    stream.extend_from_slice(machine_type.as_bytes());
    stream.extend_from_slice(rest);
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::sync::mpsc;
    use std::time::Duration;

    /// Opens the pipe as QEMU does. Returns the news that it is open.
    fn opens(places: &Places) -> mpsc::Receiver<()> {
        let (opened, news) = mpsc::channel();
        let path = places.device_state();
        std::thread::spawn(move || {
            File::create(path).expect("it opens");
            opened.send(())
        });
        news
    }

    #[tokio::test]
    async fn a_qemu_that_comes_late_or_early_does_not_wait_at_a_pipe_without_a_reader() {
        let folder = tempfile::tempdir().expect("a folder");
        let places = Places {
            folder: folder.path().to_owned(),
        };
        let long = Duration::from_secs(20);
        drop(StateReader::new(&places, None).expect("a pipe"));
        opens(&places).recv_timeout(long).expect("after the reader");
        process::make_pipe(&places.device_state(), None).expect("a pipe");
        let waits = opens(&places);
        let early = waits.recv_timeout(Duration::from_millis(300));
        early.expect_err("it waits for a reader");
        free_waiting(&places);
        waits.recv_timeout(long).expect("it was freed");
        free_waiting(&places);
    }

    #[test]
    fn a_state_gets_the_section_that_a_migration_has() {
        let loaded = to_load(b"QEVM\0\0\0\x03\x04rest", "pc-q35-10.0").expect("a state");
        assert_eq!(loaded, b"QEVM\0\0\0\x03\x07\0\0\0\x0bpc-q35-10.0\x04rest");
    }

    #[test]
    fn other_bytes_are_no_state() {
        for bytes in [&b"QEVM\0\0\0\x02\x04"[..], b"QEVM", b""] {
            assert!(to_load(bytes, "q35").is_err(), "{bytes:?}");
        }
    }
}
