//! A monitor of a QEMU whose memory follows that outlives the node.
//!
//! A guest that waits for a page of its memory may hold the lock that QEMU's main loop needs, and then
//! QEMU answers nothing until the page arrives. When the connection breaks then, only a monitor whose
//! session allows commands past the main loop can make QEMU take another connection; and to begin such
//! a session takes the main loop. So the node begins one before the guest runs, and over two named
//! pipes that QEMU itself keeps open: they know nothing of who uses them, so the session is there for
//! the node's next process, too.

use std::collections::HashMap;
use std::io;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{CWD, FileType, Mode};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::unix::pipe::{OpenOptions, Receiver, Sender};
use tokio::sync::{mpsc, oneshot};

use crate::machine::Places;
use crate::monitor::qmp::{QMP_TIMEOUT, QmpError, text};
use crate::user::QemuUser;

/// Longest line from QEMU in bytes that is understood: answers and events are shorter.
const MAX_LINE: u64 = 64 << 10;

/// Longest command in bytes: as much as a pipe takes as a whole or not at all, so that a node that
/// dies leaves no half of one.
const MAX_COMMAND: usize = 4096;

/// Commands that wait for their answer at once.
const MAX_PENDING: usize = 8;

/// QEMU's arguments for it.
pub fn arguments(places: &Places) -> [String; 4] {
    let path = places.spare().display().to_string().replace(',', ",,");
    [
        String::from("-chardev"),
        format!("pipe,id=godwit-spare,path={path}"),
        String::from("-mon"),
        String::from("chardev=godwit-spare,mode=control"),
    ]
}

/// Makes the pipes that QEMU opens.
///
/// # Errors
/// What the system says.
pub fn make_pipes(places: &Places, user: Option<&QemuUser>) -> io::Result<()> {
    for path in [places.spare_input(), places.spare_output()] {
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
        if let Some(user) = user {
            user.own(&path)?;
        }
    }
    Ok(())
}

/// The monitor. Clones share it. As long as there is one, what QEMU says there is read.
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
    /// Takes up the session at these pipes, whoever began it.
    ///
    /// # Errors
    /// There are none, or the system refuses.
    pub fn open(places: &Places) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        // So a pipe always has a reader and a writer, and nothing ends with QEMU's process or another.
        options.read_write(true);
        let input = options.open_sender(places.spare_input())?;
        let output = options.open_receiver(places.spare_output())?;
        let (calls, incoming) = mpsc::channel(MAX_PENDING);
        tokio::spawn(serve(input, output, incoming));
        Ok(Self { calls })
    }

    /// Begins the session. QEMU's main loop must be well.
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

/// Reads all that QEMU says, so that the pipe never fills, and finds the answers.
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
                // Answers to an earlier process must not be taken for answers to this one.
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
                // The beginning of what comes first may have gone to an earlier process.
                let Ok(object) = serde_json::from_slice::<Value>(&line) else { continue };
                if let Some(call) = pending.remove(&text(&object, "id")) {
                    // Whoever asked may have given up.
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

    /// What a QEMU would do with its end of the pipes: reads a command, and says this.
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
        // The end of an event, and what answers an earlier process.
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
