//! The agent inside QEMU: a library that `vm run` preloads, which listens at a unix socket.

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

/// The library, to be written where QEMU can read it.
pub const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/godwit-memory-agent.so"));

/// The variable of the environment that tells the library where to listen.
pub const SOCKET_VARIABLE: &str = "GODWIT_MEMORY_AGENT";

/// How long the agent may take for a step: it waits for nothing but memory.
const PATIENCE: Duration = Duration::from_secs(10);

/// Why memory does not move.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// QEMU was started without it.
    #[error(
        "its QEMU was started without the part that moves memory, which one has that a node with a memory pool started: \
         move the machine to another node with --memory zero-copy, where it gets one"
    )]
    Absent,
    /// QEMU's user may not hold pages.
    #[error(
        "its QEMU may not hold pages of memory (userfaultfd: {0}): let the node run as root, or set \
         vm.unprivileged_userfaultfd to 1"
    )]
    NoUserfault(io::Error),
    /// It does not answer, or not so that it makes sense.
    #[error("the part of its QEMU that moves memory does not answer: {0}")]
    Silent(io::Error),
    /// QEMU's mappings do not say where the memory is.
    #[error("its memory is not found: {0}")]
    Lost(io::Error),
    /// A chunk does not move; it is where it was, and nobody waits for it.
    #[error("a part of its memory does not move: {0}")]
    Refused(io::Error),
}

/// A connection to the agent of one QEMU. When it ends, nothing is held or tracked any more.
#[derive(Debug)]
pub struct Agent {
    socket: UnixStream,
}

/// A file that memory is in, or goes to.
#[derive(Clone, Copy, Debug)]
pub struct Side<'a> {
    /// The file.
    pub file: &'a File,
    /// Of the memory's first byte in it.
    pub offset: u64,
    /// Whether the memory's room there is kept when the memory is elsewhere: it is not punched, and what was there before
    /// stays until it is overwritten. The memory must be of this room, or have been.
    pub keeps: bool,
}

impl<'a> Side<'a> {
    /// A file that has this memory alone, from its start.
    pub const fn whole(file: &'a File) -> Self {
        Self {
            file,
            offset: 0,
            keeps: false,
        }
    }
}

/// What has become of a run.
#[derive(Debug)]
pub struct MovedRun {
    /// Bytes that have moved, from the end that moves first.
    pub bytes: u64,
    /// Bytes that were copied: fewer where there were holes.
    pub copied: u64,
    /// Chunks that have moved.
    pub chunks: u64,
    /// How long the pages of a chunk were held, at most.
    pub longest_hold: Duration,
    /// How long those of all chunks were held, one after the other.
    pub held: Duration,
    /// Why the rest is where it was, and nobody waits for it.
    pub refused: Option<io::Error>,
}

impl Agent {
    /// Connects, and asks whether pages can be held.
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

    /// Fills the page tables of the QEMU whose agent listens at `path` with what is there of `bytes` bytes of memory that it
    /// has at `address`. Takes no rights.
    ///
    /// # Errors
    /// [`AgentError`].
    pub fn fill(path: &Path, address: u64, bytes: u64) -> Result<(), AgentError> {
        let socket = dial(path)?;
        let filled = Self { socket }.ask(Request::Fill { address, bytes }, &[])?;
        done(filled).map(drop)
    }

    /// Begins to move memory of `bytes` bytes that QEMU has at `address`.
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

    /// Moves a run of chunks, or its first ones. QEMU's guest waits for pages only as long as the answer says.
    ///
    /// # Errors
    /// [`AgentError::Silent`]; then only QEMU's mappings say where the run is.
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
            // One that says that all is well has moved all.
            refused: error.or_else(|| {
                (answer.moved < run.all.bytes).then(|| io::Error::other("it has moved less"))
            }),
        })
    }

    /// Ends the move, however far it is.
    ///
    /// # Errors
    /// [`AgentError`].
    pub fn end(&mut self) -> Result<(), AgentError> {
        self.ask(Request::End, &[]).and_then(done).map(drop)
    }

    /// Begins to track which pages of memory are written ([`crate::dirty`]), until [`Agent::untrack`] or the end of
    /// this connection.
    ///
    /// # Errors
    /// [`AgentError::Refused`] where the kernel cannot, and while this memory moves.
    pub fn track(&mut self, address: u64, bytes: u64) -> Result<(), AgentError> {
        let device = userfault_device();
        let files: Vec<_> = device.iter().map(AsFd::as_fd).collect();
        let answer = self.ask(Request::Track { address, bytes }, &files)?;
        done(answer).map(drop)
    }

    /// Ends that.
    ///
    /// # Errors
    /// [`AgentError::Silent`].
    pub fn untrack(&mut self) -> Result<(), AgentError> {
        self.ask(Request::Untrack, &[]).and_then(done).map(drop)
    }

    /// Lets the agent go, which ends the move once it has answered what it was asked.
    pub fn hang_up(&self) {
        // It may have gone first.
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

/// A process that stands still takes no connections, and is not waited for without an end.
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

/// What lets a process have a userfaultfd that may not have one by itself.
fn userfault_device() -> Option<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/userfaultfd")
        .ok()
}
