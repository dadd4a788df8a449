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
