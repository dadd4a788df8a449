//! A monitor of a QEMU whose memory follows; the session outlives the node.
//!
//! A guest waiting for a page may hold the lock needed by QEMU's main loop. QEMU then answers nothing until the page
//! arrives. If the connection breaks in this state, QEMU can only accept another one through a monitor session that
//! allows commands past the main loop, and starting such a session takes the main loop. The node therefore starts a
//! session before the guest runs, over two named pipes that QEMU itself keeps open. The pipes are independent of their
//! users, so the node's next process can use the same session.

use std::collections::HashMap;
use std::io;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::unix::pipe::{OpenOptions, Receiver, Sender};
use tokio::sync::{mpsc, oneshot};

use crate::machine::Places;
use crate::monitor::qmp::{QMP_TIMEOUT, QmpError, text};
use crate::process;
use crate::user::QemuUser;

/// Longest understood line from QEMU in bytes: answers and events are shorter.
const MAX_LINE: u64 = 64 << 10;

/// Longest command in bytes: a pipe takes this much as a whole or not at all, so a dying node leaves no partial
/// command.
const MAX_COMMAND: usize = 4096;

/// Most commands waiting for their answer at once.
const MAX_PENDING: usize = 8;

/// Returns QEMU's arguments for the spare monitor.
pub fn arguments(places: &Places) -> [String; 4] {
    let path = places.spare().display().to_string().replace(',', ",,");
    [
        String::from("-chardev"),
        format!("pipe,id=godwit-spare,path={path}"),
        String::from("-mon"),
        String::from("chardev=godwit-spare,mode=control"),
    ]
}

/// Makes the pipes for QEMU to open.
///
/// # Errors
/// The system's error.
pub fn make_pipes(places: &Places, user: Option<&QemuUser>) -> io::Result<()> {
    process::make_pipe(&places.spare_input(), user)?;
    process::make_pipe(&places.spare_output(), user)
}

/// The spare monitor, shared by its clones. While one exists, QEMU's output there is read.
#[derive(Clone, Debug)]
pub struct Spare {
    calls: mpsc::Sender<Call>,
}

#[derive(Debug)]
struct Call {
    verb: &'static str,
    command: &'static str,
    arguments: Value,
    answer: oneshot::Sender<Result<(), QmpError>>,
}

impl Spare {
    /// Opens the session at these pipes, even one begun by another process.
    ///
    /// # Errors
    /// There are no pipes, or the system refuses.
    pub fn open(places: &Places) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        // Opens each pipe for both directions: the pipe always has a reader and a writer, and outlives QEMU and other
        // processes.
        options.read_write(true);
        let input = options.open_sender(places.spare_input())?;
        let output = options.open_receiver(places.spare_output())?;
        let (calls, incoming) = mpsc::channel(MAX_PENDING);
        tokio::spawn(serve(input, output, incoming));
        Ok(Self { calls })
    }

    /// Begins the session. QEMU's main loop must be responsive.
    ///
    /// # Errors
    /// [`QmpError`].
    pub async fn begin(&self) -> Result<(), QmpError> {
        let wanted = json!({ "enable": ["oob"] });
        self.call("execute", "qmp_capabilities", wanted).await
    }

    /// Runs a command past the main loop.
    ///
    /// # Errors
    /// [`QmpError`].
    pub async fn execute(&self, command: &'static str, arguments: Value) -> Result<(), QmpError> {
        self.call("exec-oob", command, arguments).await
    }

    async fn call(
        &self,
        verb: &'static str,
        command: &'static str,
        arguments: Value,
    ) -> Result<(), QmpError> {
        let (answer, answered) = oneshot::channel();
        let call = Call {
            verb,
            command,
            arguments,
            answer,
        };
        let closed = || QmpError::Closed(String::from("its spare monitor cannot be used"));
        let exchange = async {
            self.calls.send(call).await.map_err(|_| closed())?;
            answered.await.unwrap_or_else(|_| Err(closed()))
        };
        let timeout = |_| QmpError::Timeout {
            command: command.to_owned(),
            limit: QMP_TIMEOUT,
        };
        tokio::time::timeout(QMP_TIMEOUT, exchange)
            .await
            .map_err(timeout)?
    }
}

/// Reads all of QEMU's output, to keep the pipe from filling, and assigns the answers.
async fn serve(mut input: Sender, output: Receiver, mut calls: mpsc::Receiver<Call>) {
    let (lines, mut said) = mpsc::channel(16);
    let reading = tokio::spawn(read(output, lines));
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let session = since.unwrap_or(Duration::ZERO).as_nanos();
    let mut pending: HashMap<String, Call> = HashMap::new();
    let mut number = 0_u64;
    loop {
        tokio::select! {
            call = calls.recv() => {
                let Some(call) = call else { break };
                pending.retain(|_, call| !call.answer.is_closed());
                // Unique ids keep answers to an earlier process apart.
                let id = format!("{session}-{number}");
                number += 1;
                let verb = call.verb;
                let line = json!({ verb: call.command, "arguments": call.arguments, "id": id });
                let line = format!("{line}\n");
                let sent = line.len() <= MAX_COMMAND && pending.len() < MAX_PENDING;
                if sent && input.write_all(line.as_bytes()).await.is_ok() {
                    pending.insert(id, call);
                }
            }
            line = said.recv() => {
                let Some(line) = line else { break };
                // An earlier process may have read the beginning of the first line.
                let Ok(object) = serde_json::from_slice::<Value>(&line) else { continue };
                if let Some(call) = pending.remove(&text(&object, "id")) {
                    // The caller may have given up.
                    let _ = call.answer.send(match object.get("error") {
                        None => Ok(()),
                        Some(error) => Err(QmpError::Refused {
                            command: call.command.to_owned(),
                            description: text(error, "desc"),
                        }),
                    });
                }
            }
        }
    }
    reading.abort();
}

async fn read(output: Receiver, lines: mpsc::Sender<Vec<u8>>) {
    let mut output = BufReader::new(output);
    loop {
        let mut line = Vec::new();
        match (&mut output)
            .take(MAX_LINE)
            .read_until(b'\n', &mut line)
            .await
        {
            Ok(0) | Err(_) => return,
            Ok(_) if lines.send(line).await.is_err() => return,
            Ok(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Plays QEMU at its end of the pipes: reads a command and sends an answer.
    async fn answers(places: &Places, before: &str, answer: fn(&Value) -> String) {
        let mut options = OpenOptions::new();
        options.read_write(true);
        let input = options.open_receiver(places.spare_input()).expect("opens");
        let mut output = options.open_sender(places.spare_output()).expect("opens");
        output.write_all(before.as_bytes()).await.expect("writes");
        let mut line = String::new();
        BufReader::new(input)
            .read_line(&mut line)
            .await
            .expect("reads");
        let call = serde_json::from_str(&line).expect("JSON");
        let answer = answer(&call);
        output.write_all(answer.as_bytes()).await.expect("writes");
    }

    #[tokio::test]
    async fn a_session_that_another_process_began_is_taken_up() {
        let folder = tempfile::tempdir().expect("a folder");
        let places = Places {
            folder: folder.path().to_owned(),
        };
        make_pipes(&places, None).expect("pipes");
        make_pipes(&places, None).expect("again");
        let spare = Spare::open(&places).expect("opens");
        // The end of an event, and an answer to an earlier process.
        let before = "\"x\"}}\n{\"return\":{},\"id\":\"1-0\"}\n[]\n\n{\"event\":\"STOP\"}\n";
        let refused = |call: &Value| {
            assert_eq!(call["exec-oob"], "migrate-pause");
            let error = json!({ "error": { "desc": "no" }, "id": call["id"] });
            format!("{error}\n")
        };
        let (result, ()) = tokio::join!(
            spare.execute("migrate-pause", json!({})),
            answers(&places, before, refused)
        );
        let error = result.expect_err("refused").to_string();
        assert_eq!(error, "QEMU refused \"migrate-pause\": no");
        let done = |call: &Value| {
            assert_eq!(call["execute"], "qmp_capabilities");
            format!("{}\n", json!({ "return": {}, "id": call["id"] }))
        };
        let (result, ()) = tokio::join!(spare.begin(), answers(&places, "", done));
        result.expect("begins");
    }

    #[tokio::test]
    async fn without_pipes_there_is_none() {
        let folder = tempfile::tempdir().expect("a folder");
        let places = Places {
            folder: folder.path().to_owned(),
        };
        assert!(Spare::open(&places).is_err());
    }
}
