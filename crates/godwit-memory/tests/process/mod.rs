//! A process with the agent, other than QEMU: a test of this program, run again.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use godwit_memory::mover::agent::{LIBRARY, SOCKET_VARIABLE};

pub(crate) struct Process {
    child: Child,
    input: ChildStdin,
    lines: BufReader<ChildStdout>,
}

impl Process {
    /// Runs the test with a variable that holds the path of the memory file. The agent listens in the folder.
    pub(crate) fn start(folder: &Path, test: &str, (variable, memory): (&str, &Path)) -> Self {
        let library = folder.join("agent.so");
        std::fs::write(&library, LIBRARY).unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env(variable, memory)
            .env("LD_PRELOAD", &library)
            .env(SOCKET_VARIABLE, folder.join("agent.sock"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Self {
            input: child.stdin.take().unwrap(),
            lines: BufReader::new(child.stdout.take().unwrap()),
            child,
        }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits for a line with this beginning.
    pub(crate) fn line(&mut self, start: &str) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.lines.read_line(&mut line).unwrap(), 0, "it ended");
            if line.starts_with(start) {
                return line;
            }
        }
    }

    pub(crate) fn say(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
    }

    /// Waits until the process has ended successfully.
    pub(crate) fn end(mut self) {
        drop(self.input);
        assert!(self.child.wait().unwrap().success());
    }
}

/// Maps a part of a file until the process ends.
#[allow(dead_code, reason = "not every test that shares this file uses it")]
pub(crate) fn map(file: &std::fs::File, bytes: u64, offset: u64) -> *mut u8 {
    // SAFETY: a new mapping of whole pages at a place that the kernel picks.
    let memory = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes as usize,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            std::os::fd::AsRawFd::as_raw_fd(file),
            offset as libc::off_t,
        )
    };
    assert_ne!(memory, libc::MAP_FAILED);
    memory.cast()
}

/// Rewrites three quarters of a mapping again and again until a line of input comes; each pass expects the values of
/// the previous pass. Ends the process.
#[allow(dead_code, reason = "not every test that shares this file uses it")]
pub(crate) fn rewrite(memory: *mut u8, bytes: u64) -> ! {
    let words = memory.cast::<u64>();
    // A quarter stays a hole.
    let count = bytes as usize / 8 / 4 * 3;
    let stop = std::thread::spawn(|| std::io::stdin().lines().next());
    let (mut pass, mut lost) = (0_u64, 0_u64);
    while !stop.is_finished() || pass < 2 {
        for index in (0..count).step_by(64) {
            // SAFETY: the index is inside the mapping, which only this thread uses, through volatile accesses.
            unsafe {
                let word = words.add(index);
                let expected = if pass == 0 { 0 } else { pass ^ index as u64 };
                lost += u64::from(word.read_volatile() != expected);
                word.write_volatile((pass + 1) ^ index as u64);
            }
        }
        pass += 1;
        // After the first pass, all pages but the hole are present; absent pages move without a copy.
        if pass == 1 {
            println!("\nready");
            std::io::Write::flush(&mut std::io::stdout()).unwrap();
        }
    }
    println!("\npasses {pass} lost {lost}");
    std::process::exit(0);
}
