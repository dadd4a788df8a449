//! The `godwit` command as a person or a script would call it.

use std::fmt;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::process::command_line;

/// A `godwit` command that did not exit with 0.
#[derive(Clone, Debug)]
pub struct Failure {
    pub line: String,
    /// Exit code; `None` for a killed command.
    pub code: Option<i32>,
    /// Output on standard error and standard output.
    pub text: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "'{}' exited with {:?}: {}",
            self.line, self.code, self.text
        )
    }
}

impl std::error::Error for Failure {}

impl From<Failure> for std::io::Error {
    fn from(failure: Failure) -> Self {
        Self::other(failure.to_string())
    }
}

/// A call under construction.
#[derive(Debug)]
pub struct GodwitCommand(Command);

impl GodwitCommand {
    /// Creates a call of the node whose API is on this socket.
    pub fn new(godwit: &Path, socket: &Path, args: &[&str]) -> Self {
        let mut command = Command::new(godwit);
        command.args(args).env("GODWIT_SOCKET", socket);
        Self(command)
    }

    /// Runs the command with its output for people.
    pub fn text(mut self) -> Result<String, Failure> {
        let line = command_line(&self.0);
        let output = self.0.output().map_err(|error| Failure {
            line: line.clone(),
            code: None,
            text: error.to_string(),
        })?;
        let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.success() {
            return Ok(stdout);
        }
        let text = format!("{}{stdout}", String::from_utf8_lossy(&output.stderr));
        Err(Failure {
            line,
            code: output.status.code(),
            text,
        })
    }

    /// Runs the command with `--json` and parses the output; of several documents, the last.
    pub fn json(self) -> Result<Value, Failure> {
        let command = self.printing_json();
        let line = command_line(&command);
        let text = Self(command).text()?;
        let documents = serde_json::Deserializer::from_str(&text).into_iter::<Value>();
        let failure = |what: String| Failure {
            line: line.clone(),
            code: Some(0),
            text: what,
        };
        let mut last = Value::Null;
        for document in documents {
            last = document.map_err(|error| failure(format!("not JSON ({error}): {text}")))?;
        }
        Ok(last)
    }

    /// Returns the command with `--json` in front, because words after `--` belong to another program.
    pub fn printing_json(&self) -> Command {
        let mut command = Command::new(self.0.get_program());
        command.arg("--json").args(self.0.get_args());
        for (name, value) in self.0.get_envs() {
            command.envs(value.map(|value| (name, value)));
        }
        command
    }
}
