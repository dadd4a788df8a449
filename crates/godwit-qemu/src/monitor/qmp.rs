//! A client of QEMU's monitor (QMP) over a Unix socket.
//!
//! One task owns the socket. Commands carry an id and have a time limit; events go to all subscribers. The peer is not
//! trusted: lines are bounded, unintelligible data ends the connection, and every wait is limited.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value, json};
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::sync::{broadcast, mpsc, oneshot, watch};

/// Longest line from QEMU in bytes: the list of CPU models is the longest one.
const MAX_LINE: usize = 4 << 20;

/// Most commands waiting for their answer at once.
const MAX_PENDING: usize = 64;

/// Largest lag of a slow subscriber without loss, in events.
const EVENT_BACKLOG: usize = 256;

/// Longest wait for the greeting and for each ordinary command.
pub const QMP_TIMEOUT: Duration = Duration::from_secs(10);

/// The reasons for which a command failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QmpError {
    /// The connection cannot be made or has ended.
    #[error("QEMU's monitor is gone: {0}")]
    Closed(String),
    /// The answer took too long.
    #[error("QEMU did not answer {command:?} within {} seconds", .limit.as_secs())]
    Timeout {
        /// Command that was sent.
        command: String,
        /// Limit of the wait.
        limit: Duration,
    },
    /// QEMU refused the command.
    #[error("QEMU refused {command:?}: {description}")]
    Refused {
        /// Command that was sent.
        command: String,
        /// QEMU's reason.
        description: String,
    },
    /// The peer is not a QEMU monitor, or violates the protocol.
    #[error("what answers is not QEMU's monitor as it is known: {0}")]
    Unexpected(String),
}

/// An unsolicited event of QEMU.
#[derive(Clone, Debug, PartialEq)]
pub struct QmpEvent {
    /// Name of the event, such as `STOP`.
    pub name: String,
    /// Data of the event.
    pub data: Value,
    /// QEMU's time of the event, in microseconds of its host's clock.
    pub at_us: u64,
}

/// A connection to one QEMU, shared by its clones. The connection ends with the last clone.
#[derive(Clone, Debug)]
pub struct Qmp {
    calls: mpsc::Sender<Call>,
    events: broadcast::Sender<QmpEvent>,
    closed: watch::Receiver<Option<String>>,
    version: Arc<QemuVersion>,
    pid: Option<u32>,
    /// True if QEMU takes commands past a hanging main loop.
    out_of_band: bool,
}

/// The version of a QEMU.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct QemuVersion {
    /// Major version.
    pub major: u64,
    /// Minor version.
    pub minor: u64,
    /// Micro version.
    pub micro: u64,
}

impl std::fmt::Display for QemuVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.micro)
    }
}

#[derive(Debug)]
struct Call {
    command: String,
    arguments: Value,
    out_of_band: bool,
    answer: oneshot::Sender<Result<Value, QmpError>>,
}

impl Qmp {
    /// Connects to the monitor at this socket and negotiates.
    ///
    /// # Errors
    /// [`QmpError`]; a monitor in use by another program shows as a timeout.
    pub async fn connect(path: &Path) -> Result<Self, QmpError> {
        let socket = UnixStream::connect(path)
            .await
            .map_err(|error| closed(&error))?;
        Self::negotiate(socket).await
    }

    /// Negotiates on a connected socket.
    ///
    /// # Errors
    /// [`QmpError`].
    pub async fn negotiate(socket: UnixStream) -> Result<Self, QmpError> {
        let pid = socket.peer_cred().ok().and_then(|peer| peer.pid());
        let (reader, writer) = socket.into_split();
        let mut reader = BufReader::new(reader);
        let greeting = tokio::time::timeout(QMP_TIMEOUT, read_object(&mut reader))
            .await
            .map_err(|_| QmpError::Timeout {
                command: String::from("the connection: is another program using this monitor?"),
                limit: QMP_TIMEOUT,
            })??;
        let version = greeting
            .get("QMP")
            .map(version)
            .ok_or_else(|| QmpError::Unexpected(String::from("it did not greet")))?;
        let out_of_band = offers_out_of_band(&greeting);
        let (calls, incoming) = mpsc::channel(MAX_PENDING);
        let (events, _) = broadcast::channel(EVENT_BACKLOG);
        let (end, closed) = watch::channel(None);
        let task = Task {
            writer,
            pending: HashMap::new(),
            next_id: 0,
            events: events.clone(),
        };
        tokio::spawn(async move {
            let why = task.run(reader, incoming).await;
            end.send_replace(Some(why));
        });
        let qmp = Self {
            calls,
            events,
            closed,
            version: Arc::new(version),
            pid: pid.and_then(|pid| u32::try_from(pid).ok()),
            out_of_band,
        };
        let wanted = if out_of_band {
            json!({ "enable": ["oob"] })
        } else {
            json!({})
        };
        qmp.execute("qmp_capabilities", wanted).await?;
        Ok(qmp)
    }

    /// Returns QEMU's version.
    pub fn version(&self) -> &QemuVersion {
        &self.version
    }

    /// Returns the process that listens at the socket.
    pub fn pid(&self) -> Option<u32> {
        self.pid
    }

    /// Runs a command and returns the result.
    ///
    /// # Errors
    /// [`QmpError`].
    pub async fn execute(&self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        self.execute_within(command, arguments, QMP_TIMEOUT).await
    }

    /// Runs a command with a time limit.
    ///
    /// # Errors
    /// [`QmpError`].
    pub async fn execute_within(
        &self,
        command: &str,
        arguments: Value,
        limit: Duration,
    ) -> Result<Value, QmpError> {
        self.call(command, arguments, limit, false).await
    }

    /// Runs a command past a hanging main loop, if this QEMU can. Only some commands support this.
    ///
    /// # Errors
    /// [`QmpError`].
    pub async fn execute_out_of_band(
        &self,
        command: &str,
        arguments: Value,
    ) -> Result<Value, QmpError> {
        self.call(command, arguments, QMP_TIMEOUT, self.out_of_band)
            .await
    }

    async fn call(
        &self,
        command: &str,
        arguments: Value,
        limit: Duration,
        out_of_band: bool,
    ) -> Result<Value, QmpError> {
        let (answer, answered) = oneshot::channel();
        let call = Call {
            command: command.to_owned(),
            arguments,
            out_of_band,
            answer,
        };
        let exchange = async {
            if self.calls.send(call).await.is_err() {
                return Err(self.why_closed());
            }
            answered.await.unwrap_or_else(|_| Err(self.why_closed()))
        };
        tokio::time::timeout(limit, exchange)
            .await
            .unwrap_or_else(|_| {
                Err(QmpError::Timeout {
                    command: command.to_owned(),
                    limit,
                })
            })
    }

    /// Returns the events from now on. A subscriber that falls behind misses the oldest.
    pub fn events(&self) -> broadcast::Receiver<QmpEvent> {
        self.events.subscribe()
    }

    /// Waits until the connection has ended.
    pub async fn closed(&self) {
        // The sender is dropped only after setting the reason, or together with the task.
        let _ = self.closed.clone().wait_for(Option::is_some).await;
    }

    #[cfg(test)]
    /// Returns true if the connection has ended.
    pub fn is_closed(&self) -> bool {
        self.calls.is_closed()
    }

    fn why_closed(&self) -> QmpError {
        let why = self.closed.borrow().clone();
        QmpError::Closed(why.unwrap_or_else(|| String::from("the connection has ended")))
    }
}

/// The task that owns the socket.
struct Task {
    writer: tokio::net::unix::OwnedWriteHalf,
    pending: HashMap<u64, Call>,
    next_id: u64,
    events: broadcast::Sender<QmpEvent>,
}

impl Task {
    /// Runs until the connection ends or is no longer needed, and returns the reason.
    async fn run(
        mut self,
        reader: BufReader<tokio::net::unix::OwnedReadHalf>,
        mut calls: mpsc::Receiver<Call>,
    ) -> String {
        // A separate task reads: a call in between must not lose a partial line.
        let (lines, mut arrivals) = mpsc::channel(16);
        let reading = tokio::spawn(read_all(reader, lines));
        let why = loop {
            tokio::select! {
                call = calls.recv(), if self.pending.len() < MAX_PENDING => {
                    let Some(call) = call else {
                        break String::from("it is not needed any more");
                    };
                    if let Err(error) = self.send(call).await {
                        break error.to_string();
                    }
                }
                arrival = arrivals.recv() => match arrival {
                    Some(Ok(object)) => self.take(object),
                    Some(Err(error)) => break error.to_string(),
                    None => break String::from("the connection has ended"),
                },
            }
        };
        reading.abort();
        calls.close();
        for (_, call) in self.pending.drain() {
            // The caller may have given up.
            let _ = call.answer.send(Err(QmpError::Closed(why.clone())));
        }
        why
    }

    async fn send(&mut self, call: Call) -> io::Result<()> {
        // Drops calls whose time is up.
        self.pending.retain(|_, call| !call.answer.is_closed());
        let id = self.next_id;
        self.next_id += 1;
        let execute = if call.out_of_band {
            "exec-oob"
        } else {
            "execute"
        };
        let line = json!({ execute: call.command, "arguments": call.arguments, "id": id });
        let mut line = line.to_string();
        line.push('\n');
        self.pending.insert(id, call);
        tokio::time::timeout(QMP_TIMEOUT, self.writer.write_all(line.as_bytes()))
            .await
            .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }

    fn take(&mut self, mut object: Map<String, Value>) {
        if let Some(name) = object.get("event").and_then(Value::as_str) {
            let event = QmpEvent {
                name: name.to_owned(),
                at_us: timestamp(object.get("timestamp")),
                data: object.remove("data").unwrap_or_default(),
            };
            // There may be no subscribers.
            let _ = self.events.send(event);
            return;
        }
        let id = object.get("id").and_then(Value::as_u64);
        let Some(call) = id.and_then(|id| self.pending.remove(&id)) else {
            return;
        };
        let result = match (object.remove("return"), object.get("error")) {
            (Some(value), _) => Ok(value),
            (None, Some(error)) => Err(QmpError::Refused {
                command: call.command,
                description: text(error, "desc"),
            }),
            (None, None) => Err(QmpError::Unexpected(String::from(
                "an answer has neither a result nor an error",
            ))),
        };
        let _ = call.answer.send(result);
    }
}

async fn read_all(
    mut reader: BufReader<tokio::net::unix::OwnedReadHalf>,
    lines: mpsc::Sender<Result<Map<String, Value>, QmpError>>,
) {
    loop {
        let object = read_object(&mut reader).await;
        let last = object.is_err();
        if lines.send(object).await.is_err() || last {
            return;
        }
    }
}

/// Reads one line, which must be a JSON object.
async fn read_object(
    reader: &mut (impl AsyncBufRead + Unpin),
) -> Result<Map<String, Value>, QmpError> {
    let mut line = Vec::new();
    loop {
        let bytes = reader.fill_buf().await.map_err(|error| closed(&error))?;
        if bytes.is_empty() {
            return Err(QmpError::Closed(String::from("QEMU closed the connection")));
        }
        let end = bytes.iter().position(|&byte| byte == b'\n');
        let taken = end.map_or(bytes.len(), |end| end + 1);
        if line.len() + taken > MAX_LINE {
            return Err(QmpError::Unexpected(format!(
                "a line is longer than {MAX_LINE} bytes"
            )));
        }
        line.extend_from_slice(&bytes[..taken]);
        reader.consume(taken);
        if end.is_some() {
            break;
        }
    }
    match serde_json::from_slice(&line) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err(QmpError::Unexpected(String::from("a line is no object"))),
        Err(error) => Err(QmpError::Unexpected(format!("a line is no JSON: {error}"))),
    }
}

fn offers_out_of_band(greeting: &Map<String, Value>) -> bool {
    let offered = greeting
        .get("QMP")
        .and_then(|qmp| qmp.get("capabilities")?.as_array());
    offered.is_some_and(|offered| offered.iter().any(|offer| offer == "oob"))
}

fn version(greeting: &Value) -> QemuVersion {
    let number = |name: &str| {
        greeting
            .pointer(&format!("/version/qemu/{name}"))
            .and_then(Value::as_u64)
            .unwrap_or(0)
    };
    QemuVersion {
        major: number("major"),
        minor: number("minor"),
        micro: number("micro"),
    }
}

fn timestamp(value: Option<&Value>) -> u64 {
    let part = |name: &str| {
        value
            .and_then(|value| value.get(name))
            .and_then(Value::as_u64)
            .unwrap_or(0)
    };
    part("seconds")
        .saturating_mul(1_000_000)
        .saturating_add(part("microseconds"))
}

/// Returns a text field of an object, or an empty text.
pub fn text(object: &Value, field: &str) -> String {
    let text = object.get(field).and_then(Value::as_str);
    text.unwrap_or_default().to_owned()
}

fn closed(error: &io::Error) -> QmpError {
    QmpError::Closed(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncReadExt;

    const GREETING: &str = concat!(
        r#"{"QMP":{"version":{"qemu":{"micro":2,"minor":0,"major":10},"package":""},"#,
        r#""capabilities":["oob"]}}"#,
        "\n"
    );

    /// Returns a connection to a peer sending this script and reading everything.
    async fn facing(script: &[u8]) -> Result<Qmp, QmpError> {
        let (here, mut there) = UnixStream::pair().expect("a pair");
        let script = script.to_vec();
        tokio::spawn(async move {
            let _ = there.write_all(&script).await;
            let mut sink = Vec::new();
            let _ = there.read_to_end(&mut sink).await;
        });
        Qmp::negotiate(here).await
    }

    fn after_greeting(rest: &str) -> Vec<u8> {
        format!("{GREETING}{{\"return\":{{}},\"id\":0}}\n{rest}").into_bytes()
    }

    #[tokio::test]
    async fn answers_find_their_commands_and_events_their_subscribers() {
        let (here, there) = UnixStream::pair().expect("a pair");
        let server = tokio::spawn(async move {
            let (reader, mut writer) = there.into_split();
            let mut lines = BufReader::new(reader).lines();
            writer.write_all(GREETING.as_bytes()).await.expect("writes");
            let mut asked = Vec::new();
            for _ in 0..3 {
                let line = lines.next_line().await.expect("reads").expect("a line");
                let call: Value = serde_json::from_str(&line).expect("JSON");
                asked.push(call["execute"].as_str().expect("a command").to_owned());
                if asked.len() == 1 {
                    writer
                        .write_all(b"{\"return\":{},\"id\":0}\n")
                        .await
                        .expect("writes");
                }
            }
            // In reverse order, with an event and a stray answer in between.
            let answers = concat!(
                r#"{"error":{"class":"GenericError","desc":"no"},"id":2}"#,
                "\n",
                r#"{"event":"STOP","timestamp":{"seconds":3,"microseconds":7},"data":{"a":1}}"#,
                "\n",
                r#"{"return":5,"id":99}"#,
                "\n",
                r#"{"return":{"status":"running"},"id":1}"#,
                "\n"
            );
            writer.write_all(answers.as_bytes()).await.expect("writes");
            (asked, writer)
        });
        let qmp = Qmp::negotiate(here).await.expect("negotiates");
        assert_eq!(qmp.version().to_string(), "10.0.2");
        let mut events = qmp.events();
        let (first, second) = tokio::join!(
            qmp.execute("query-status", json!({})),
            qmp.execute("cont", json!({}))
        );
        assert_eq!(first.expect("an answer")["status"], "running");
        let error = second.expect_err("refused").to_string();
        assert_eq!(error, "QEMU refused \"cont\": no");
        let event = events.recv().await.expect("an event");
        assert_eq!((event.name.as_str(), event.at_us), ("STOP", 3_000_007));
        assert_eq!(event.data["a"], 1);
        let (asked, _writer) = server.await.expect("ends");
        assert_eq!(asked, ["qmp_capabilities", "query-status", "cont"]);
    }

    #[tokio::test]
    async fn garbage_in_place_of_a_greeting_is_an_error() {
        let long = vec![b'x'; MAX_LINE + 2];
        let deep = format!("{}\n", "[".repeat(100_000));
        for script in [
            b"HTTP/1.1 400 Bad Request\r\n".as_slice(),
            b"\n",
            b"[]\n",
            b"{}\n",
            b"\xff\xfe\n",
            b"{\"QMP\":",
            &long,
            deep.as_bytes(),
        ] {
            let shown = String::from_utf8_lossy(&script[..script.len().min(30)]).into_owned();
            let (here, mut there) = UnixStream::pair().expect("a pair");
            let script = script.to_vec();
            tokio::spawn(async move {
                let _ = there.write_all(&script).await;
            });
            Qmp::negotiate(here).await.expect_err(&shown);
        }
    }

    #[tokio::test]
    async fn garbage_later_ends_the_connection_and_whoever_waits() {
        let endless = "y".repeat(MAX_LINE + 1);
        for rest in ["nonsense\n", "3\n", "{\"return\"\n", endless.as_str()] {
            let qmp = facing(&after_greeting(rest)).await.expect("negotiates");
            let error = qmp.execute("query-status", json!({})).await;
            assert!(matches!(error, Err(QmpError::Closed(_))), "{error:?}");
            qmp.closed().await;
            assert!(qmp.is_closed());
        }
    }

    #[tokio::test]
    async fn odd_but_whole_lines_do_no_harm() {
        let rest = concat!(
            "{}\n",
            r#"{"id":"x","return":1}"#,
            "\n",
            r#"{"event":7}"#,
            "\n",
            r#"{"event":"X","timestamp":{"seconds":18446744073709551615,"microseconds":-1}}"#,
            "\n",
            r#"{"id":1}"#,
            "\n"
        );
        let qmp = facing(&after_greeting(rest)).await.expect("negotiates");
        let limit = Duration::from_millis(200);
        let error = qmp.execute_within("query-status", json!({}), limit).await;
        // The line `{"id":1}` may come before the command was sent: then the command stays without an answer.
        let limited = matches!(
            error,
            Err(QmpError::Unexpected(_) | QmpError::Timeout { .. })
        );
        assert!(limited, "{error:?}");
    }

    #[tokio::test]
    async fn a_command_that_nobody_answers_times_out() {
        let qmp = facing(&after_greeting("")).await.expect("negotiates");
        let limit = Duration::from_millis(20);
        let error = qmp.execute_within("query-status", json!({}), limit).await;
        assert!(matches!(error, Err(QmpError::Timeout { .. })), "{error:?}");
    }
}
