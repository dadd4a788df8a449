//! A process that keeps the connection of QEMU's migration open for a moment after this node has died.
//!
//! QEMU, at least up to 10.0, aborts (in `vhost_log_global_stop`) if its migration fails while a vhost-user NIC has
//! lost its back end and QEMU has not noticed the loss yet. A killed node closes both connections at the same instant,
//! and on a busy host QEMU handles the migration's connection first. The guest must not die with the node. So another
//! process also holds the migration's connection, until QEMU has surely noticed the loss of its NICs' back ends.

use std::fs::File;
use std::io::{self, PipeWriter};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::Stdio;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::net::UnixStream;

/// The argument that makes a node's program a keeper.
pub const KEEP_STREAM: &str = "keep-migration-stream";

/// Time for QEMU to notice the loss of its NICs' back ends, from the loss on.
const GRACE: Duration = Duration::from_secs(2);

/// Keeps a connection open after the end of this process, or after a drop, for as long as QEMU may need.
#[derive(Debug)]
pub(crate) struct StreamKeeper {
    /// The pipe that stays open while this process lives.
    _alive: PipeWriter,
}

impl StreamKeeper {
    /// Starts the keeper of this end of QEMU's connection.
    ///
    /// # Errors
    /// The error of the system.
    pub(crate) fn start(stream: &UnixStream) -> io::Result<Self> {
        let stream = stream.as_fd().try_clone_to_owned()?;
        let (watched, alive) = io::pipe()?;
        // Runs this very program, even if a newer one has replaced its file.
        let mut command = std::process::Command::new("/proc/self/exe");
        command
            .arg(KEEP_STREAM)
            .stdin(stream)
            .stdout(watched)
            .stderr(Stdio::null())
            // A terminal's signals to the node must not reach the keeper.
            .process_group(0);
        let mut keeper = tokio::process::Command::from(command).spawn()?;
        godwit_context::spawn(async move { keeper.wait().await });
        Ok(Self { _alive: alive })
    }
}

/// Runs the keeper. Standard input is the connection to keep, standard output the pipe whose other end the node holds.
/// Returns once QEMU has closed the connection, at the latest two seconds after the node has ended.
///
/// # Errors
/// The error of the system.
pub fn keep_stream() -> io::Result<()> {
    let stream = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    let node = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    let mut both = [hang_up(&stream), hang_up(&node)];
    // No process writes to the keeper: an event is a hang-up.
    wait(&mut both, None)?;
    if both[0].revents().is_empty() {
        wait(&mut both[..1], Some(GRACE))?;
    }
    Ok(())
}

fn hang_up(end: &File) -> PollFd<'_> {
    PollFd::new(end, PollFlags::empty())
}

fn wait(ends: &mut [PollFd<'_>], at_most: Option<Duration>) -> io::Result<()> {
    let at_most = at_most.and_then(|time| Timespec::try_from(time).ok());
    loop {
        match poll(ends, at_most.as_ref()) {
            Err(rustix::io::Errno::INTR) => {}
            done => return done.map(drop).map_err(io::Error::from),
        }
    }
}
