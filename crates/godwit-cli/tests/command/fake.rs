//! An API with scripted answers.

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use godwit_node::api::{ErrorBody, Move};
use serde_json::{Value, json};

/// Answers by `METHOD /path`, ignoring the query. The answers are given in order, and the last one repeats.
type Script = HashMap<String, Vec<(u16, Value)>>;

/// An API on a unix socket that records its requests.
pub(crate) struct FakeApi {
    directory: tempfile::TempDir,
    asked: Arc<Mutex<Vec<(String, Value)>>>,
}

impl FakeApi {
    pub(crate) fn start(script: &[(&str, Vec<(u16, Value)>)]) -> Self {
        Self::start_after(Duration::ZERO, script)
    }

    /// Starts an API that takes a second to answer.
    pub(crate) fn start_slow(script: &[(&str, Vec<(u16, Value)>)]) -> Self {
        Self::start_after(Duration::from_secs(1), script)
    }

    fn start_after(delay: Duration, script: &[(&str, Vec<(u16, Value)>)]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("godwit.sock")).unwrap();
        let script: Script = script
            .iter()
            .map(|(call, answers)| ((*call).to_owned(), answers.clone()))
            .collect();
        let script = Arc::new(Mutex::new(script));
        let asked = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&asked);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (script, log) = (Arc::clone(&script), Arc::clone(&log));
                std::thread::spawn(move || serve(stream, delay, &script, &log));
            }
        });
        Self { directory, asked }
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("godwit.sock")
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_godwit"));
        command
            .args(args)
            .env("GODWIT_SOCKET", self.socket())
            .env_remove("GODWIT_API");
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    pub(crate) fn run(&self, args: &[&str]) -> Ran {
        Ran::from(self.command(args).output().unwrap())
    }

    /// Runs a command that has to succeed.
    #[track_caller]
    pub(crate) fn succeeds(&self, args: &[&str]) -> Ran {
        let ran = self.run(args);
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        ran
    }

    pub(crate) fn asked_nothing(&self) -> bool {
        self.asked.lock().unwrap().is_empty()
    }

    pub(crate) fn asked(&self, call: &str) -> Vec<Value> {
        let asked = self.asked.lock().unwrap();
        asked
            .iter()
            .filter(|(made, _)| made == call)
            .map(|(_, body)| body.clone())
            .collect()
    }
}

fn serve(
    stream: UnixStream,
    delay: Duration,
    script: &Mutex<Script>,
    log: &Mutex<Vec<(String, Value)>>,
) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut writer = stream;
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).unwrap_or(0) == 0 {
            return;
        }
        let mut words = line.split_whitespace();
        let (method, target) = (words.next().unwrap(), words.next().unwrap());
        let path = target.split_once('?').map_or(target, |(path, _)| path);
        let call = format!("{method} {path}");
        let mut length = 0;
        loop {
            let mut header = String::new();
            reader.read_line(&mut header).unwrap();
            if header.trim().is_empty() {
                break;
            }
            if let Some(value) = header.to_ascii_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().unwrap();
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).unwrap();
        let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
        log.lock().unwrap().push((call.clone(), body));
        std::thread::sleep(delay);
        let (status, answer) = match script.lock().unwrap().get_mut(&call) {
            Some(answers) if answers.len() > 1 => answers.remove(0),
            Some(answers) => answers[0].clone(),
            None => (
                404,
                json!({ "code": "not_found", "message": format!("no {call}") }),
            ),
        };
        let text = if answer.is_null() {
            String::new()
        } else {
            answer.to_string()
        };
        let head = format!(
            "HTTP/1.1 {status} x\r\ncontent-length: {}\r\n\r\n",
            text.len()
        );
        if writer
            .write_all(head.as_bytes())
            .and_then(|()| writer.write_all(text.as_bytes()))
            .is_err()
        {
            return;
        }
    }
}

pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl From<Output> for Ran {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

impl Ran {
    /// Expects these words on standard output.
    #[track_caller]
    pub(crate) fn says(&self, words: &str) {
        assert!(self.stdout.contains(words), "{}", self.stdout);
    }

    /// Expects these words on standard error.
    #[track_caller]
    pub(crate) fn tells(&self, words: &str) {
        assert!(self.stderr.contains(words), "{}", self.stderr);
    }
}

/// Answers with a move of any kind, as the node lists and shows it.
pub(crate) fn seen(migration: impl Into<Move>) -> (u16, Value) {
    ok(migration.into())
}

pub(crate) fn ok(value: impl serde::Serialize) -> (u16, Value) {
    (200, serde_json::to_value(value).unwrap())
}

pub(crate) fn refused(status: u16, body: ErrorBody) -> (u16, Value) {
    (status, serde_json::to_value(body).unwrap())
}

pub(crate) fn wait_until(what: &str, done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(
            start.elapsed() < Duration::from_secs(20),
            "{what}: not within 20 s"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}
