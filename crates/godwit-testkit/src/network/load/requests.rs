//! Clients of a web server, with requests at a steady rate over persistent connections. Every answer is remembered.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::super::{Namespace, inside};
use super::beats::Beats;

/// Longest wait for an answer: a move takes less.
const PATIENCE: Duration = Duration::from_secs(30);
/// Time until a client whose connection broke tries again.
const AGAIN: Duration = Duration::from_millis(20);
/// Longest accepted answer in bytes.
const LONGEST: usize = 1 << 20;

#[derive(Clone, Copy, Debug)]
pub struct Answer {
    /// Time at which the request left.
    pub asked: Instant,
    /// Time at which the whole answer had arrived.
    pub came: Instant,
}

/// Running clients.
#[derive(Debug)]
pub struct Requests {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<io::Result<()>>>,
}

#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    broken: AtomicU32,
    answers: Mutex<Vec<Answer>>,
}

/// The clients' view of a window of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Service {
    /// The longest time without an answer to any client.
    pub gap: Duration,
    /// The longest wait of one client for one answer.
    pub longest_wait: Duration,
    pub answers: usize,
}

impl Requests {
    /// Starts `clients` clients inside a namespace. Each asks `server` for `/` `per_second` times a second, or as often
    /// as the server answers if less.
    pub fn start(from: &Namespace, server: SocketAddr, clients: u32, per_second: u32) -> Self {
        let shared = Arc::new(Shared::default());
        let every = Duration::from_secs(1) / per_second.max(1);
        let client = |number: u32| {
            let shared = Arc::clone(&shared);
            // Clients take turns, so that answers come evenly.
            let later = every * number / clients;
            inside(from, move || shared.ask(server, every, later))
        };
        let threads = (0..clients).map(client).collect();
        Self { shared, threads }
    }

    /// Returns the number of broken connections so far.
    pub fn broken(&self) -> u32 {
        self.shared.broken.load(Ordering::Relaxed)
    }

    /// Returns the clients' view between two moments in the past.
    pub fn between(&self, from: Instant, to: Instant) -> Service {
        let answers = self.shared.answers.lock();
        let answers = answers.unwrap_or_else(PoisonError::into_inner);
        service(&answers, from, to)
    }

    /// Ends the clients.
    pub fn finish(mut self) -> io::Result<()> {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.threads.drain(..).try_for_each(|thread| {
            let ended = thread.join();
            ended.unwrap_or_else(|_| Err(io::Error::other("a client panicked")))
        })
    }
}

impl Drop for Requests {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
    }
}

impl Shared {
    fn ask(&self, server: SocketAddr, every: Duration, later: Duration) -> io::Result<()> {
        std::thread::sleep(later);
        let mut connection: Option<BufReader<TcpStream>> = None;
        let mut beats = Beats::new(every);
        while !self.stop.load(Ordering::Relaxed) {
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
                    self.broken.fetch_add(1, Ordering::Relaxed);
                }
                std::thread::sleep(AGAIN);
                continue;
            }
            let came = Instant::now();
            let answers = self.answers.lock();
            answers
                .unwrap_or_else(PoisonError::into_inner)
                .push(Answer { asked, came });
            beats.wait();
        }
        Ok(())
    }
}

fn connect(server: SocketAddr) -> io::Result<BufReader<TcpStream>> {
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

fn service(answers: &[Answer], from: Instant, to: Instant) -> Service {
    let within = || {
        answers
            .iter()
            .filter(|answer| (from..=to).contains(&answer.came))
    };
    let mut came: Vec<Instant> = within().map(|answer| answer.came).collect();
    came.sort_unstable();
    // The ends of the window count: a server that has not come back has a gap until the end.
    came.insert(0, from);
    came.push(to);
    let gaps = came.windows(2).map(|pair| pair[1] - pair[0]);
    let waits = within().map(|answer| answer.came - answer.asked);
    Service {
        gap: gaps.max().unwrap_or_default(),
        longest_wait: waits.max().unwrap_or_default(),
        answers: came.len() - 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_is_nobodys_answer_and_a_wait_is_one_clients() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let answer = |asked, came| Answer {
            asked: at(asked),
            came: at(came),
        };
        // Two clients: the first hears nothing for 300 ms, the second for 200 ms of these.
        let answers = [
            answer(100, 101),
            answer(110, 111),
            answer(150, 350),
            answer(120, 420),
            answer(5, 6),
        ];
        let seen = service(&answers, at(90), at(430));
        assert_eq!(seen.gap, Duration::from_millis(239));
        assert_eq!(seen.longest_wait, Duration::from_millis(300));
        assert_eq!(seen.answers, 4);
        // A server that never comes back has a gap to the end.
        let seen = service(&answers, at(90), at(1420));
        assert_eq!(seen.gap, Duration::from_secs(1));
        assert_eq!(service(&[], at(0), at(7)).gap, Duration::from_millis(7));
    }
}
