//! Programs that tests and the demo run.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output};
use std::time::{Duration, Instant};

use rustix::process::Pid;

/// A child process that does not outlive its handle.
#[derive(Debug)]
pub struct Process {
    child: Child,
    name: String,
}

impl Process {
    /// Starts the command.
    ///
    /// # Errors
    /// When the program cannot be started, with its name.
    pub fn spawn(command: &mut Command) -> io::Result<Self> {
        let name = command.get_program().to_string_lossy().into_owned();
        let child = command
            .spawn()
            .map_err(|error| io::Error::other(format!("cannot start {name}: {error}")))?;
        Ok(Self { child, name })
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal.
    pub fn signal(&self, signal: rustix::process::Signal) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.child.id() as i32) {
            // A process that is already gone needs no signal.
            let _ = rustix::process::kill_process(pid, signal);
        }
    }

    /// Kills it at once and waits until it is gone.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Its exit status when it has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Waits until it ends.
    ///
    /// # Errors
    /// When it still runs after `timeout`.
    pub fn wait(&mut self, timeout: Duration) -> io::Result<ExitStatus> {
        wait_for(timeout, || self.ended())
            .ok_or_else(|| io::Error::other(format!("{} still runs after {timeout:?}", self.name)))
    }

    /// The child itself, to reach its pipes.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// CPU seconds, user and system, that a process has used, with all threads that it ever had; `None`
/// when it is gone. What `/proc/PID/stat` says, without being rounded to hundredths.
pub fn cpu_seconds(pid: u32) -> Option<f64> {
    let mut clock = 0;
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: both pointers are to values that live through the calls, which write no further.
    let known = unsafe {
        libc::clock_getcpuclockid(pid as libc::pid_t, &raw mut clock) == 0
            && libc::clock_gettime(clock, &raw mut time) == 0
    };
    known.then(|| time.tv_sec as f64 + time.tv_nsec as f64 / 1e9)
}

/// Asks again and again until there is an answer; `None` when there is none in time.
pub fn wait_for<T>(timeout: Duration, mut ask: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + timeout;
    loop {
        if let Some(answer) = ask() {
            return Some(answer);
        }
        if Instant::now() >= deadline {
            return None;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Runs a program to its end.
///
/// # Errors
/// When it cannot be started or fails, with the command line and what it printed.
pub fn run(command: &mut Command) -> io::Result<Output> {
    let line = command_line(command);
    let output = command
        .output()
        .map_err(|error| io::Error::other(format!("cannot start '{line}': {error}")))?;
    if output.status.success() {
        return Ok(output);
    }
    Err(io::Error::other(format!(
        "'{line}' failed ({}):\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )))
}

/// The command as one would type it.
pub fn command_line(command: &Command) -> String {
    std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| word.to_string_lossy().into_owned())
        .collect::<Vec<_>>()
        .join(" ")
}

/// A directory for a run's files, on a file system with O_DIRECT: inside the build directory.
///
/// # Errors
/// When it cannot be made.
pub fn scratch_dir() -> io::Result<tempfile::TempDir> {
    let base = target_dir().join("scratch");
    std::fs::create_dir_all(&base)?;
    // Short, because a unix socket's path has at most 107 bytes.
    tempfile::Builder::new()
        .prefix("t")
        .rand_bytes(6)
        .tempdir_in(base)
}

/// The workspace's build directory.
pub fn target_dir() -> PathBuf {
    let mut crates = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let root = crates.nth(2).unwrap_or(Path::new("."));
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), |dir| root.join(dir))
}

/// Waits until somebody listens at a socket: it is there before that.
pub fn wait_for_listener(socket: &Path, timeout: Duration) -> bool {
    let connected = || std::os::unix::net::UnixStream::connect(socket).ok();
    wait_for(timeout, connected).is_some()
}

/// The processes of the QEMUs whose command lines name something in this directory, which is a test's own.
pub fn machines_in(directory: &Path) -> Vec<Pid> {
    let directory = directory.as_os_str().as_encoded_bytes();
    let processes = std::fs::read_dir("/proc").into_iter().flatten();
    let ours = processes.filter_map(|process| {
        let process = process.ok()?;
        let number = process.file_name().to_str()?.parse().ok()?;
        let line = std::fs::read(process.path().join("cmdline")).ok()?;
        let program = line.split(|&byte| byte == 0).next()?;
        let is_qemu = program.windows(11).any(|part| part == b"qemu-system");
        let names_it = line.windows(directory.len()).any(|part| part == directory);
        Pid::from_raw(number).filter(|_| is_qemu && names_it)
    });
    ours.collect()
}

/// Ends every QEMU whose command line names something in this directory, which is a test's own.
pub fn end_machines_of(directory: &Path) {
    for machine in machines_in(directory) {
        // It may have ended by itself.
        let _ = rustix::process::kill_process(machine, rustix::process::Signal::KILL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_of_a_process_goes_on_and_that_of_none_is_unknown() {
        let me = std::process::id();
        let before = cpu_seconds(me).expect("this process");
        let started = Instant::now();
        while started.elapsed() < Duration::from_millis(20) {
            std::hint::spin_loop();
        }
        let used = cpu_seconds(me).expect("this process") - before;
        // Other tests of this process run at the same time.
        assert!(used > 0.0, "{used}");
        let mut gone = Process::spawn(&mut Command::new("true")).expect("a process");
        gone.wait(Duration::from_secs(20)).expect("its end");
        assert!(cpu_seconds(gone.id()).is_none());
    }

    #[test]
    fn machines_of_a_directory_end_and_nothing_else_does() {
        let (ours, theirs) = (scratch_dir().unwrap(), scratch_dir().unwrap());
        let sleeper = |directory: &Path, name: &str| {
            let program = directory.join(name);
            std::os::unix::fs::symlink("/bin/sleep", &program).unwrap();
            Process::spawn(Command::new(program).arg("600")).unwrap()
        };
        let mut machine = sleeper(ours.path(), "qemu-system-test");
        let mut node = sleeper(ours.path(), "godwit");
        let mut other = sleeper(theirs.path(), "qemu-system-test");
        end_machines_of(ours.path());
        machine.wait(Duration::from_secs(10)).unwrap();
        assert!(node.ended().is_none() && other.ended().is_none());
    }
}
