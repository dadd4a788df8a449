//! Clients of a web server, with requests at a steady rate over persistent connections. Every answer is remembered.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::super::{Namespace, inside};
use super::answers::{Service, Shared};
use super::beats::Beats;

/// Longest wait for an answer: a move takes less.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);
/// Time until a client whose connection broke tries again.
pub(super) const AGAIN: Duration = Duration::from_millis(20);
/// Longest accepted answer in bytes.
const LONGEST: usize = 1 << 20;

/// Running clients.
#[derive(Debug)]
pub struct Requests {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<io::Result<()>>>,
}

impl Requests {
    /// Starts `clients` clients inside a namespace. Each asks `server` for `/` at this interval, or as often as the
    /// server answers if less.
    pub fn start(from: &Namespace, server: SocketAddr, clients: u32, every: Duration) -> Self {
        let shared = Arc::new(Shared::default());
        let client = |number: u32| {
            let shared = Arc::clone(&shared);
            // Clients take turns, so that answers come evenly.
            let later = every * number / clients;
            inside(from, move || ask(&shared, server, every, later))
        };
        let threads = (0..clients).map(client).collect();
        Self { shared, threads }
    }

    /// Returns the number of broken connections so far.
    pub fn broken(&self) -> u32 {
        self.shared.broken()
    }

    /// Returns the clients' view between two moments in the past.
    pub fn between(&self, from: Instant, to: Instant) -> Service {
        self.shared.between(from, to)
    }

    /// Ends the clients.
    pub fn finish(mut self) -> io::Result<()> {
        self.shared.stop();
        self.threads.drain(..).try_for_each(|thread| {
            let ended = thread.join();
            ended.unwrap_or_else(|_| Err(io::Error::other("a client panicked")))
        })
    }
}

impl Drop for Requests {
    fn drop(&mut self) {
        self.shared.stop();
    }
}

fn ask(shared: &Shared, server: SocketAddr, every: Duration, later: Duration) -> io::Result<()> {
    std::thread::sleep(later);
    let mut connection: Option<BufReader<TcpStream>> = None;
    let mut beats = Beats::new(every);
    while !shared.stopped() {
        let asked = Instant::now();
        let answer = match &mut connection {
            Some(connection) => ask_once(connection),
            None => match connect(server) {
                Ok(new) => {
                    connection = Some(new);
                    continue;
                }
                Err(error) => Err(error),
            },
        };
        if answer.is_err() {
            if connection.take().is_some() {
                shared.broke();
            }
            std::thread::sleep(AGAIN);
            continue;
        }
        shared.answered(asked);
        beats.wait();
    }
    Ok(())
}

/// Connects with the patience of a client whose server moves.
pub(super) fn connect(server: SocketAddr) -> io::Result<BufReader<TcpStream>> {
    let stream = TcpStream::connect_timeout(&server, Duration::from_secs(1))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(BufReader::new(stream))
}

/// Sends one request and reads the whole answer.
fn ask_once(connection: &mut BufReader<TcpStream>) -> io::Result<()> {
    connection
        .get_mut()
        .write_all(b"GET / HTTP/1.1\r\nHost: guest\r\n\r\n")?;
    let mut length = None;
    let mut line = String::new();
    loop {
        line.clear();
        if connection.by_ref().take(8192).read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let line = line.trim().to_ascii_lowercase();
        if let Some(value) = line.strip_prefix("content-length:") {
            length = value.trim().parse::<usize>().ok();
        }
        if line.is_empty() {
            break;
        }
    }
    let length = length.filter(|length| *length <= LONGEST);
    let length = length.ok_or_else(|| io::Error::other("an answer without a length"))?;
    let mut body = vec![0; length];
    connection.read_exact(&mut body)
}
