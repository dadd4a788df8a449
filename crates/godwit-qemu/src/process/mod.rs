//! Starts QEMU, which outlives the node, and ends QEMU.

pub mod sandbox;

use std::fs::OpenOptions;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{CWD, FileType, Mode};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::io::unix::AsyncFd;

use crate::machine::Places;
use crate::monitor::qmp::Qmp;
use crate::user::QemuUser;

/// Longest wait for a new QEMU to answer.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// Time between two attempts to reach a new QEMU.
const START_POLL: Duration = Duration::from_millis(10);

/// Flags against a link or a pipe that QEMU's user may have put in place of the log.
const NO_LINK: i32 = libc::O_NOFOLLOW | libc::O_NONBLOCK;

/// Bytes shown from the end of QEMU's log.
const LOG_TAIL: u64 = 2048;

/// A QEMU process, not necessarily a child of this one.
#[derive(Debug)]
pub struct Process {
    /// Process id.
    pub pid: u32,
    handle: AsyncFd<OwnedFd>,
}

impl Process {
    /// Opens the process of this id.
    ///
    /// # Errors
    /// There is no such process, or the system is out of descriptors.
    pub fn open(pid: u32) -> io::Result<Self> {
        let raw = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let raw = raw.ok_or(io::ErrorKind::NotFound)?;
        let handle = pidfd_open(raw, PidfdFlags::NONBLOCK)?;
        // SAFETY: the descriptor is owned, so it names the same process until it is dropped together with its
        // registration.
        let handle =
            unsafe { AsyncFd::register_with_interest(handle, tokio::io::Interest::READABLE)? };
        Ok(Self { pid, handle })
    }

    /// Returns the QEMU started with this VM's places as this user, or as the node's own, in any state of
    /// responsiveness. Processes of other users are ignored, whatever their name. Blocks.
    pub fn started_in(places: &Places, user: Option<&QemuUser>) -> Option<Self> {
        let word = places.monitor_word();
        let own = rustix::process::geteuid().as_raw();
        let is_ours = |process: &std::fs::DirEntry| {
            let runs_as = process.metadata().map(|status| status.uid());
            runs_as.is_ok_and(|it| it == own || user.is_some_and(|user| user.number() == it))
        };
        let processes = std::fs::read_dir("/proc").ok()?.flatten().filter(is_ours);
        let mut pids = processes.filter_map(|process| process.file_name().to_str()?.parse().ok());
        let names_it = |pid: &u32| command_line(*pid).is_ok_and(|line| line.contains(&word));
        Self::open(pids.find(names_it)?).ok()
    }

    /// Waits until the process has ended.
    pub async fn ended(&self) {
        // The descriptor becomes readable at the end and stays so; it cannot fail otherwise.
        let _ = self.handle.readable().await;
    }

    /// Kills the process and waits for the end.
    pub async fn kill(&self) {
        // The process may have ended by itself.
        let _ = pidfd_send_signal(self.handle.get_ref(), Signal::KILL);
        self.ended().await;
    }
}

/// A guard that kills an unwatched process when dropped.
#[derive(Debug)]
pub struct Unwatched(Option<Arc<Process>>);

impl Unwatched {
    /// Guards the process while this value exists.
    pub fn new(process: &Arc<Process>) -> Self {
        Self(Some(Arc::clone(process)))
    }

    /// Releases the process, which goes on.
    pub fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for Unwatched {
    fn drop(&mut self) {
        if let Some(process) = &self.0 {
            // The process may have ended by itself.
            let _ = pidfd_send_signal(process.handle.get_ref(), Signal::KILL);
        }
    }
}

/// Makes the folder of a VM, owned by QEMU's user.
///
/// # Errors
/// The system's error.
pub fn make_folder(places: &Places, user: Option<&QemuUser>) -> io::Result<()> {
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&places.folder)?;
    user.map_or(Ok(()), |user| user.own(&places.folder))
}

/// Makes a named pipe for QEMU to open, in place of an earlier one.
pub(crate) fn make_pipe(path: &Path, user: Option<&QemuUser>) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    rustix::fs::mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
    user.map_or(Ok(()), |user| user.own(path))
}

/// The reasons for which QEMU does not run.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The program cannot be started.
    #[error("{program}: {cause}")]
    Program {
        /// Program to start.
        program: String,
        /// The system's error.
        cause: io::Error,
    },
    /// QEMU ended by itself, or did not answer.
    #[error("{why}{}{said}", if said.is_empty() { "" } else { ": " })]
    Ended {
        /// True if QEMU rejected the arguments.
        arguments: bool,
        /// Description of the failure.
        why: String,
        /// The end of QEMU's log; empty without output.
        said: String,
    },
}

impl StartError {
    /// Returns true if the requester of the machine can fix the error.
    pub fn is_askers(&self) -> bool {
        match self {
            Self::Program { cause, .. } => matches!(
                cause.kind(),
                io::ErrorKind::NotFound
                    | io::ErrorKind::PermissionDenied
                    | io::ErrorKind::InvalidInput
                    | io::ErrorKind::ArgumentListTooLong
            ),
            Self::Ended { arguments, .. } => *arguments,
        }
    }
}

/// A library to preload into QEMU.
#[derive(Clone, Copy, Debug)]
pub struct Preload<'a> {
    /// Content of the library.
    pub library: &'a [u8],
    /// Environment variable with the library's listening socket.
    pub variable: &'a str,
}

/// Starts QEMU in a separate session, with messages in the VM's log, and waits until the monitor answers. Dropping the
/// future kills QEMU.
///
/// # Errors
/// [`StartError`] with the end of QEMU's log if QEMU does not start.
pub async fn start(
    program: &str,
    line: &[String],
    places: &Places,
    user: Option<&QemuUser>,
    preload: Preload<'_>,
) -> Result<(Arc<Process>, Qmp), StartError> {
    let cannot = |cause| StartError::Program {
        program: program.to_owned(),
        cause,
    };
    let mut child = spawn(program, line, places, user, preload).map_err(cannot)?;
    let pid = child.id().unwrap_or_default();
    let process = Process::open(pid)
        .map(Arc::new)
        .map_err(|error| StartError::Ended {
            arguments: false,
            why: error.to_string(),
            said: String::new(),
        })?;
    let unwatched = Unwatched::new(&process);
    // Reaps QEMU at the end, even long after the VM was handed over.
    let mut child = tokio::spawn(async move { child.wait().await });
    let answers = async {
        loop {
            match Qmp::connect(&places.qmp()).await {
                Ok(qmp) => return qmp,
                Err(_) => tokio::time::sleep(START_POLL).await,
            }
        }
    };
    // QEMU usually ends by itself because of bad arguments, which is not the node's fault.
    let (arguments, why) = tokio::select! {
        qmp = answers => {
            unwatched.keep();
            return Ok((process, qmp));
        }
        ended = &mut child => match ended {
            Ok(Ok(status)) => {
                // QEMU rejects some arguments only by an assertion.
                let arguments = status.signal().is_none_or(|signal| signal == libc::SIGABRT);
                (arguments, format!("QEMU ended with {status}"))
            }
            _ => (false, String::from("QEMU ended")),
        },
        () = tokio::time::sleep(START_TIMEOUT) => {
            process.kill().await;
            let limit = START_TIMEOUT.as_secs();
            (false, format!("QEMU's monitor did not answer within {limit} seconds"))
        }
    };
    // The log is removed with the VM's other files, so the error contains the end of the log.
    let said = log_tail(&places.log());
    Err(StartError::Ended {
        arguments,
        why,
        said,
    })
}

fn spawn(
    program: &str,
    line: &[String],
    places: &Places,
    user: Option<&QemuUser>,
    preload: Preload<'_>,
) -> io::Result<tokio::process::Child> {
    for socket in [places.qmp(), places.console(), places.incoming()] {
        match std::fs::remove_file(socket) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    match std::fs::remove_file(places.log()) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // An appending writer starts at the beginning again once the log is cut.
    let log = OpenOptions::new()
        .create_new(true)
        .append(true)
        .mode(0o600)
        .open(places.log())?;
    let mut command = Command::new(program);
    command
        .args(line)
        .current_dir(&places.folder)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log);
    let library = places.agent_library();
    std::fs::write(&library, preload.library)?;
    let readable = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    std::fs::set_permissions(&library, readable)?;
    command.env("LD_PRELOAD", library);
    command.env(preload.variable, places.agent());
    // SAFETY: between fork and exec only the system call is made, which allocates nothing and takes no lock.
    unsafe {
        // A separate session: neither the end of the node nor of the node's terminal reaches QEMU.
        command.pre_exec(|| rustix::process::setsid().map(drop).map_err(io::Error::from));
    }
    if let Some(user) = user {
        user.run_as(&mut command);
    }
    tokio::process::Command::from(command).spawn()
}

/// Empties a log above the longest useful size.
pub fn cut_log(path: &Path) {
    const LONGEST: u64 = 4 << 20;
    if std::fs::symlink_metadata(path).is_ok_and(|log| log.len() > LONGEST) {
        // The next attempt may succeed.
        let _ = OpenOptions::new()
            .write(true)
            .truncate(true)
            .custom_flags(NO_LINK)
            .open(path);
    }
}

/// Returns the end of a log, on one line.
pub fn log_tail(path: &Path) -> String {
    let read = || -> io::Result<String> {
        let mut file = OpenOptions::new()
            .read(true)
            .custom_flags(NO_LINK)
            .open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(LOG_TAIL)))?;
        let mut bytes = Vec::new();
        file.take(LOG_TAIL).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    let text = read().unwrap_or_default();
    let lines: Vec<&str> = text
        .lines()
        .map(str::trim)
        .filter(|l| !l.is_empty())
        .collect();
    lines.join("; ")
}

/// Returns the words of a process's command line.
///
/// # Errors
/// The process is gone, belongs to another user, or its command line is malformed.
pub fn command_line(pid: u32) -> io::Result<Vec<String>> {
    const LONGEST: u64 = 1 << 20;
    let mut bytes = Vec::new();
    std::fs::File::open(format!("/proc/{pid}/cmdline"))?
        .take(LONGEST)
        .read_to_end(&mut bytes)?;
    if bytes.pop() != Some(0) {
        return Err(io::Error::other("its command line is empty or too long"));
    }
    bytes
        .split(|&byte| byte == 0)
        .map(|word| {
            String::from_utf8(word.to_vec())
                .map_err(|_| io::Error::other("its command line is not UTF-8"))
        })
        .collect()
}
