//! A process that keeps the connection of QEMU's migration open for a moment after this node has died.
//!
//! QEMU, at least up to 10.0, ends its own life (`abort` in `vhost_log_global_stop`) when its migration fails while a
//! vhost-user NIC has lost its back end and QEMU has not noticed that yet. A node that is killed closes both
//! connections at the same instant, and on a busy host QEMU looks at the migration's first. The guest must not die with
//! the node: so another process holds the migration's connection, too, until QEMU has surely seen what became of its
//! NICs.

use std::fs::File;
use std::io::{self, PipeWriter};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::Stdio;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::net::UnixStream;

/// The argument with which the program of a node becomes a keeper.
pub const KEEP_STREAM: &str = "keep-migration-stream";

/// How long QEMU gets to see that its NICs have lost their back ends, from when they have.
const GRACE: Duration = Duration::from_secs(2);

/// Keeps a connection open after this process has ended, or after this was dropped, for as long as QEMU may need.
#[derive(Debug)]
pub(crate) struct StreamKeeper {
    /// The keeper's sign that this process lives.
    _alive: PipeWriter,
}

impl StreamKeeper {
    /// Starts the keeper of this end of QEMU's connection.
    ///
    /// # Errors
    /// What the system says.
    pub(crate) fn start(stream: &UnixStream) -> io::Result<Self> {
        let stream = stream.as_fd().try_clone_to_owned()?;
        let (watched, alive) = io::pipe()?;
        // This very program, even if a newer one has taken its place.
        let mut command = std::process::Command::new("/proc/self/exe");
        command
            .arg(KEEP_STREAM)
            .stdin(stream)
            .stdout(watched)
            .stderr(Stdio::null())
            // What a terminal sends to the node is not the keeper's.
            .process_group(0);
        let mut keeper = tokio::process::Command::from(command).spawn()?;
        tokio::spawn(async move { keeper.wait().await });
        Ok(Self { _alive: alive })
    }
}

/// What the keeper does: standard input is the connection to keep, standard output the pipe whose other end the node
/// holds. It ends when QEMU has closed the connection, at the latest two seconds after the node has ended.
///
/// # Errors
/// What the system says.
pub fn keep_stream() -> io::Result<()> {
    let stream = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    let node = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    let mut both = [hang_up(&stream), hang_up(&node)];
    // Nobody speaks to the keeper: an event is a hang-up.
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
