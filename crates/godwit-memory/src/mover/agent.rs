//! The agent inside QEMU: a library, preloaded by `vm run`, with a unix socket for requests.

use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice, Read};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{
    self, AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, sendmsg,
};

use crate::mover::protocol::{Answer, BYTES, Request, Run};

/// The library, to be written to a file that QEMU can read.
pub const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/godwit-memory-agent.so"));

/// Environment variable with the path of the agent's socket.
pub const SOCKET_VARIABLE: &str = "GODWIT_MEMORY_AGENT";

/// Time limit of each step of the agent, which waits for memory only.
const PATIENCE: Duration = Duration::from_secs(10);

/// The reason why memory does not move.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// QEMU was started without the agent.
    #[error(
        "its QEMU was started without the node's part that moves memory and tracks writes, which every machine has that \
         'godwit vm run' starts: start it anew, or move the machine to another node, where it gets one"
    )]
    Absent,
    /// QEMU's user may not hold pages.
    #[error(
        "its QEMU may not hold pages of memory (userfaultfd: {0}): let the node run as root, or set \
         vm.unprivileged_userfaultfd to 1"
    )]
    NoUserfault(io::Error),
    /// The agent does not answer, or answers with invalid data.
    #[error("the part of its QEMU that moves memory does not answer: {0}")]
    Silent(io::Error),
    /// QEMU's mappings do not show where the memory is.
    #[error("its memory is not found: {0}")]
    Lost(io::Error),
    /// A chunk does not move. The chunk is still in place, and no thread waits for its pages.
    #[error("a part of its memory does not move: {0}")]
    Refused(io::Error),
}

/// A connection to the agent of one QEMU. The end of the connection ends every hold and all tracking.
#[derive(Debug)]
pub struct Agent {
    socket: UnixStream,
}

/// The file that memory moves from or to.
#[derive(Clone, Copy, Debug)]
pub struct Side<'a> {
    /// The file.
    pub file: &'a File,
    /// Offset of the memory's first byte in the file.
    pub offset: u64,
    /// True if the file keeps its room while the memory is elsewhere: nothing is punched, and old content stays until
    /// overwritten. The room must belong to the memory, now or in the past.
    pub keeps: bool,
}

impl<'a> Side<'a> {
    /// Returns a side whose file holds this memory alone, from its start.
    pub const fn whole(file: &'a File) -> Self {
        Self {
            file,
            offset: 0,
            keeps: false,
        }
    }
}

/// The outcome of a run's move.
#[derive(Debug)]
pub struct MovedRun {
    /// Bytes moved, from the end that moves first.
    pub bytes: u64,
    /// Bytes copied: fewer than moved where there were holes.
    pub copied: u64,
    /// Chunks moved.
    pub chunks: u64,
    /// Longest time for which a chunk's pages were held.
    pub longest_hold: Duration,
    /// Total time for which the chunks' pages were held, one after the other.
    pub held: Duration,
    /// Error that stopped the rest of the run, which is still in place with no thread waiting for its pages.
    pub refused: Option<io::Error>,
}

impl Agent {
    /// Connects to the agent, and checks that QEMU can hold pages.
    ///
    /// # Errors
    /// [`AgentError`].
    pub fn connect(path: &Path) -> Result<Self, AgentError> {
        let socket = dial(path)?;
        let mut agent = Self { socket };
        let device = userfault_device();
        let files: Vec<_> = device.iter().map(AsFd::as_fd).collect();
        let answer = agent.ask(Request::Hello, &files)?;
        match answer.error {
            0 => Ok(agent),
            error => Err(AgentError::NoUserfault(io::Error::from_raw_os_error(error))),
        }
    }

    /// Fills the page tables of the QEMU whose agent listens at `path` with the present pages of `bytes` bytes of
    /// memory at `address`. Needs no privileges.
    ///
    /// # Errors
    /// [`AgentError`].
    pub fn fill(path: &Path, address: u64, bytes: u64) -> Result<(), AgentError> {
        let socket = dial(path)?;
        let filled = Self { socket }.ask(Request::Fill { address, bytes }, &[])?;
        done(filled).map(drop)
    }

    /// Begins to move `bytes` bytes of memory that QEMU has at `address`.
    ///
    /// # Errors
    /// [`AgentError`].
    pub fn begin(
        &mut self,
        address: u64,
        bytes: u64,
        from: Side<'_>,
        to: Side<'_>,
    ) -> Result<(), AgentError> {
        let device = userfault_device();
        let mut files = vec![from.file.as_fd(), to.file.as_fd()];
        files.extend(device.iter().map(AsFd::as_fd));
        let request = Request::Begin {
            address,
            bytes,
            from_offset: from.offset,
            to_offset: to.offset,
            to_keeps: to.keeps,
        };
        let answer = self.ask(request, &files)?;
        done(answer).map(drop)
    }

    /// Moves a run of chunks, or its first chunks. The guest waits for pages no longer than the reported hold times.
    ///
    /// # Errors
    /// [`AgentError::Silent`]. Then only QEMU's mappings show where the run is.
    pub fn move_run(&mut self, run: Run) -> Result<MovedRun, AgentError> {
        let answer = self.ask(Request::Move(run), &[])?;
        if answer.moved > run.all.bytes {
            let error = io::Error::other("it has moved more than it was asked");
            return Err(AgentError::Silent(error));
        }
        let error = (answer.error != 0).then(|| io::Error::from_raw_os_error(answer.error));
        Ok(MovedRun {
            bytes: answer.moved,
            copied: answer.copied,
            chunks: answer.chunks,
            longest_hold: Duration::from_nanos(answer.longest_ns),
            held: Duration::from_nanos(answer.held_ns),
            // An answer without an error must have moved the whole run.
            refused: error.or_else(|| {
                (answer.moved < run.all.bytes).then(|| io::Error::other("it has moved less"))
            }),
        })
    }

    /// Ends the move, whatever its progress.
    ///
    /// # Errors
    /// [`AgentError`].
    pub fn end(&mut self) -> Result<(), AgentError> {
        self.ask(Request::End, &[]).and_then(done).map(drop)
    }

    /// Begins to track the written pages of a memory ([`crate::dirty`]), until [`Agent::untrack`] or the end of this
    /// connection.
    ///
    /// # Errors
    /// [`AgentError::Refused`] if the kernel cannot track pages, or while this memory moves.
    pub fn track(&mut self, address: u64, bytes: u64) -> Result<(), AgentError> {
        let device = userfault_device();
        let files: Vec<_> = device.iter().map(AsFd::as_fd).collect();
        let answer = self.ask(Request::Track { address, bytes }, &files)?;
        done(answer).map(drop)
    }

    /// Ends the tracking.
    ///
    /// # Errors
    /// [`AgentError::Silent`].
    pub fn untrack(&mut self) -> Result<(), AgentError> {
        self.ask(Request::Untrack, &[]).and_then(done).map(drop)
    }

    /// Disconnects from the agent, which ends the move once its current request is answered.
    pub fn hang_up(&self) {
        // The agent may have hung up first.
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    fn ask(&mut self, request: Request, files: &[BorrowedFd<'_>]) -> Result<Answer, AgentError> {
        let bytes = request.to_bytes();
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(files));
        }
        let sent = sendmsg(
            &self.socket,
            &[IoSlice::new(&bytes)],
            &mut control,
            SendFlags::NOSIGNAL,
        );
        let sent = sent.map_err(|error| AgentError::Silent(error.into()))?;
        if sent != BYTES {
            let error = io::Error::from(io::ErrorKind::WriteZero);
            return Err(AgentError::Silent(error));
        }
        let mut answer = [0; BYTES];
        self.socket
            .read_exact(&mut answer)
            .map_err(AgentError::Silent)?;
        Answer::from_bytes(&answer)
            .ok_or_else(|| AgentError::Silent(io::Error::other("its answer makes no sense")))
    }
}

/// Connects with a time limit: a stopped process accepts no connections.
fn dial(path: &Path) -> Result<UnixStream, AgentError> {
    let silent = |error: Errno| AgentError::Silent(error.into());
    let flags = SocketFlags::CLOEXEC;
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    let socket = socket.map_err(silent)?;
    for direction in [Timeout::Send, Timeout::Recv] {
        sockopt::set_socket_timeout(&socket, direction, Some(PATIENCE)).map_err(silent)?;
    }
    let address = SocketAddrUnix::new(path).map_err(silent)?;
    match net::connect(&socket, &address) {
        Ok(()) => Ok(UnixStream::from(socket)),
        Err(error @ (Errno::AGAIN | Errno::INTR | Errno::TIMEDOUT)) => Err(silent(error)),
        Err(_) => Err(AgentError::Absent),
    }
}

fn done(answer: Answer) -> Result<Answer, AgentError> {
    match answer.error {
        0 => Ok(answer),
        error => Err(AgentError::Refused(io::Error::from_raw_os_error(error))),
    }
}

/// Opens the device that gives a userfaultfd to processes without the privilege for one.
fn userfault_device() -> Option<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/userfaultfd")
        .ok()
}
