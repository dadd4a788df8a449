//! A TCP conversation with an echo server, of which every byte is checked.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::super::{Namespace, inside};

/// Bytes sent at once.
const BLOCK: usize = 16 << 10;
/// Longest wait for anything: a move takes less, and so does TCP's next retry after a node was away.
const PATIENCE: Duration = Duration::from_secs(60);

/// The outcome of a conversation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Talked {
    /// Bytes that came back, right or wrong.
    pub bytes: u64,
    /// Bytes that came back different.
    pub wrong: u64,
    /// True if the connection broke.
    pub reset: bool,
}

/// A conversation under way.
#[derive(Debug)]
pub struct Talk {
    shared: Arc<Shared>,
    thread: JoinHandle<io::Result<Talked>>,
}

#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    bytes: AtomicU64,
}

impl Talk {
    /// Connects to a server from inside a namespace and sends at this rate.
    pub fn start(from: &Namespace, to: SocketAddr, bytes_per_second: u64) -> Self {
        let shared = Arc::new(Shared::default());
        let thread = inside(from, {
            let shared = Arc::clone(&shared);
            move || talk(to, bytes_per_second, &shared)
        });
        Self { shared, thread }
    }

    /// Returns the bytes received back so far.
    pub fn bytes(&self) -> u64 {
        self.shared.bytes.load(Ordering::Relaxed)
    }

    /// Returns true if the conversation has ended by itself, as on a broken connection.
    pub fn has_ended(&self) -> bool {
        self.thread.is_finished()
    }

    /// Ends the conversation.
    pub fn finish(self) -> io::Result<Talked> {
        self.shared.stop.store(true, Ordering::Relaxed);
        let ended = self.thread.join();
        ended.map_err(|_| io::Error::other("the conversation panicked"))?
    }
}

fn talk(to: SocketAddr, bytes_per_second: u64, shared: &Shared) -> io::Result<Talked> {
    let mut stream = connect(to)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.set_nodelay(true)?;
    let mut talked = Talked::default();
    let mut answer = vec![0; BLOCK];
    let every = Duration::from_secs_f64(BLOCK as f64 / bytes_per_second.max(1) as f64);
    while !shared.stop.load(Ordering::Relaxed) {
        let began = Instant::now();
        let block = content(talked.bytes);
        if stream
            .write_all(&block)
            .and_then(|()| stream.read_exact(&mut answer))
            .is_err()
        {
            talked.reset = true;
            return Ok(talked);
        }
        talked.wrong += block
            .iter()
            .zip(&answer)
            .filter(|(sent, back)| sent != back)
            .count() as u64;
        talked.bytes += BLOCK as u64;
        shared.bytes.store(talked.bytes, Ordering::Relaxed);
        std::thread::sleep(every.saturating_sub(began.elapsed()));
    }
    Ok(talked)
}

/// Connects, with retries: the server may need a while to start.
fn connect(to: SocketAddr) -> io::Result<TcpStream> {
    let until = Instant::now() + PATIENCE;
    loop {
        match TcpStream::connect_timeout(&to, Duration::from_secs(1)) {
            Ok(stream) => return Ok(stream),
            Err(error) if Instant::now() >= until => return Err(error),
            Err(_) => std::thread::sleep(Duration::from_millis(100)),
        }
    }
}

/// Returns the block to send at this offset of the conversation.
fn content(offset: u64) -> Vec<u8> {
    let word = |place: u64| {
        (offset + place * 8)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .to_le_bytes()
    };
    (0..BLOCK as u64 / 8).flat_map(word).collect()
}
