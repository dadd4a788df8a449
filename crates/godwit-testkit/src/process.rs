//! Programs of the tests and the demo.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output};
use std::time::{Duration, Instant};

use rustix::process::Pid;

/// A child process that does not outlive this handle.
#[derive(Debug)]
pub struct Process {
    child: Child,
    name: String,
}

impl Process {
    pub fn spawn(command: &mut Command) -> io::Result<Self> {
        let name = command.get_program().to_string_lossy().into_owned();
        let child = command
            .spawn()
            .map_err(|error| io::Error::other(format!("cannot start {name}: {error}")))?;
        Ok(Self { child, name })
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: rustix::process::Signal) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.child.id() as i32) {
            // A process that is already gone needs no signal.
            let _ = rustix::process::kill_process(pid, signal);
        }
    }

    /// Kills the process at once and waits for its end.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Returns the exit status once the process has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Waits until the process ends.
    pub fn wait(&mut self, timeout: Duration) -> io::Result<ExitStatus> {
        wait_for(timeout, || self.ended())
            .ok_or_else(|| io::Error::other(format!("{} still runs after {timeout:?}", self.name)))
    }

    /// Returns the child itself, for access to its pipes.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Returns the CPU seconds, user and system, of all threads of a process, past and present; `None` if the process is
/// gone. `/proc/PID/stat` has the same figure, rounded to hundredths.
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

/// Repeats a query until there is an answer; returns `None` if `timeout` passes without one.
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

/// Runs a program to the end.
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

/// Returns the words of a command line.
pub fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

/// Returns the command as a user would type it.
pub fn command_line(command: &Command) -> String {
    std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| word.to_string_lossy().into_owned())
        .collect::<Vec<_>>()
        .join(" ")
}

/// Creates a directory for a run's files inside the build directory, on a file system with O_DIRECT.
pub fn scratch_dir() -> io::Result<tempfile::TempDir> {
    let base = target_dir().join("scratch");
    std::fs::create_dir_all(&base)?;
    // Short, because a unix socket's path has at most 107 bytes.
    tempfile::Builder::new()
        .prefix("t")
        .rand_bytes(6)
        .tempdir_in(base)
}

/// Returns the workspace's build directory.
pub fn target_dir() -> PathBuf {
    let mut crates = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let root = crates.nth(2).unwrap_or(Path::new("."));
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), |dir| root.join(dir))
}

/// Waits until a server listens at a socket; the file exists before then.
pub fn wait_for_listener(socket: &Path, timeout: Duration) -> bool {
    let connected = || std::os::unix::net::UnixStream::connect(socket).ok();
    wait_for(timeout, connected).is_some()
}

/// Returns the processes of the QEMUs whose command lines name a path in this directory, which belongs to one test.
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

/// Kills every QEMU whose command line names a path in this directory, which belongs to one test.
pub fn end_machines_of(directory: &Path) {
    for machine in machines_in(directory) {
        // The machine may have ended by itself.
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
