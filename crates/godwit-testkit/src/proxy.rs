//! A TCP proxy that makes a bad link of a good one: slow, jittery, narrow, stalled, cut in the middle of a frame, or
//! gone.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::random::Random;

/// Most bytes that are read and passed on at once.
const PIECE: usize = 16 << 10;
/// Most pieces under way in one connection and direction.
const UNDER_WAY: usize = 64;
/// Receive buffer of the kernel for the proxy. A larger buffer would hide a narrow link from the sender.
const RECEIVE_BUFFER: usize = 64 << 10;
/// Timeout of a connection to the node behind the proxy.
const CONNECT: Duration = Duration::from_secs(5);

/// The behaviour of the link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Conditions {
    /// Delay of every byte, in either direction.
    pub delay: Duration,
    /// Largest random addition to the delay; the order of bytes is kept.
    pub jitter: Duration,
    /// Bytes per second and direction, all connections together.
    pub rate: Option<u64>,
    /// True while nothing passes. Neither side is told.
    pub stalled: bool,
    /// True while new connections end at once.
    pub refusing: bool,
}

impl Conditions {
    const GOOD: Self = Self {
        delay: Duration::ZERO,
        jitter: Duration::ZERO,
        rate: None,
        stalled: false,
        refusing: false,
    };
    /// Nothing passes.
    pub const STALLED: Self = Self {
        stalled: true,
        ..Self::GOOD
    };
    /// No new connection is made.
    pub const REFUSING: Self = Self {
        refusing: true,
        ..Self::GOOD
    };
}

/// A listening proxy in front of one address.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    behind: SocketAddr,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    conditions: Conditions,
    /// Bytes still to pass before everything is cut.
    cut_after: Option<u64>,
    connections: HashMap<u64, [TcpStream; 2]>,
    next: u64,
    /// Time at which the narrow link is free again, in each direction.
    free_at: [Instant; 2],
    passed: u64,
    /// Bytes to look for in each passing piece, each with true once found.
    watched: Vec<(Vec<u8>, bool)>,
    random: Random,
    stopping: bool,
}

impl Proxy {
    /// Listens on loopback for connections to `behind`. The jitter comes from the seed.
    pub fn start(behind: SocketAddr, seed: u64) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        rustix::net::sockopt::set_socket_recv_buffer_size(&listener, RECEIVE_BUFFER)?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            behind,
            state: Mutex::new(State {
                conditions: Conditions::default(),
                cut_after: None,
                connections: HashMap::new(),
                next: 0,
                free_at: [Instant::now(); 2],
                passed: 0,
                watched: Vec::new(),
                random: Random::new(seed),
                stopping: false,
            }),
            changed: Condvar::new(),
        });
        std::thread::spawn({
            let shared = Arc::clone(&shared);
            move || shared.accept_all(&listener)
        });
        Ok(Self { address, shared })
    }

    /// Returns the address at which the proxy listens.
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sets the behaviour of the link from now on.
    pub fn set(&self, conditions: Conditions) {
        self.shared.lock().conditions = conditions;
        self.shared.changed.notify_all();
    }

    /// Makes the link good again, and drops a scheduled cut.
    pub fn heal(&self) {
        self.shared.lock().cut_after = None;
        self.set(Conditions::default());
    }

    /// Cuts every connection now.
    pub fn cut(&self) {
        self.shared.lock().cut();
        self.shared.changed.notify_all();
    }

    /// Cuts every connection as soon as this many more bytes have passed, even in the middle of a frame.
    pub fn cut_after(&self, bytes: u64) {
        self.shared.lock().cut_after = Some(bytes);
    }

    /// Returns the bytes passed so far, both directions together.
    pub fn passed(&self) -> u64 {
        self.shared.lock().passed
    }

    /// Looks for these bytes in all traffic from now on. A match across the end of a piece is missed: look for frequent
    /// bytes.
    pub fn watch_for(&self, bytes: &[u8]) {
        assert!(!bytes.is_empty(), "there is nothing to look for");
        self.shared.lock().watched.push((bytes.to_vec(), false));
    }

    /// Returns true if the bytes are watched and have passed.
    pub fn has_seen(&self, bytes: &[u8]) -> bool {
        let state = self.shared.lock();
        state
            .watched
            .iter()
            .any(|(what, seen)| *seen && what == bytes)
    }

    pub fn connections(&self) -> usize {
        self.shared.lock().connections.len()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.stopping = true;
        state.cut();
        drop(state);
        self.shared.changed.notify_all();
        // The listener waits for a connection: here is the last one.
        let _ = TcpStream::connect(self.address);
    }
}

impl State {
    fn cut(&mut self) {
        self.cut_after = None;
        for (_, ends) in self.connections.drain() {
            for end in ends {
                let _ = end.shutdown(Shutdown::Both);
            }
        }
    }

    /// Returns the departure time of a piece with the arrival time `arrived`.
    fn due(&mut self, arrived: Instant, way: usize, bytes: usize) -> Instant {
        let jitter = self.conditions.jitter.as_micros() as u64;
        let jitter = Duration::from_micros(self.random.below(jitter + 1));
        let due = arrived + self.conditions.delay + jitter;
        let Some(rate) = self.conditions.rate else {
            return due;
        };
        let taken = Duration::from_secs_f64(bytes as f64 / rate.max(1) as f64);
        let start = due.max(self.free_at[way]);
        self.free_at[way] = start + taken;
        self.free_at[way]
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn accept_all(self: &Arc<Self>, listener: &TcpListener) {
        for near in listener.incoming() {
            let state = self.lock();
            if state.stopping {
                return;
            }
            let refusing = state.conditions.refusing;
            drop(state);
            if let Ok(near) = near
                && !refusing
            {
                let shared = Arc::clone(self);
                // If the node behind cannot be reached, the client's connection ends.
                std::thread::spawn(move || shared.join(near));
            }
        }
    }

    /// Passes data on in both directions until one of the ends closes.
    fn join(self: &Arc<Self>, near: TcpStream) -> io::Result<()> {
        let far = TcpStream::connect_timeout(&self.behind, CONNECT)?;
        for end in [&near, &far] {
            end.set_nodelay(true)?;
        }
        let ends = [near.try_clone()?, far.try_clone()?];
        let id = {
            let mut state = self.lock();
            if state.stopping {
                return Ok(());
            }
            let id = state.next;
            state.next += 1;
            state.connections.insert(id, ends);
            id
        };
        let threads = [(&near, &far), (&far, &near)].map(|(from, to)| {
            let (pieces, arriving) = sync_channel(UNDER_WAY);
            (from.try_clone(), to.try_clone(), pieces, arriving)
        });
        let mut writers = Vec::new();
        for (way, (from, to, pieces, arriving)) in threads.into_iter().enumerate() {
            let (from, to) = (from?, to?);
            std::thread::spawn(move || take(from, &pieces));
            let shared = Arc::clone(self);
            writers.push(std::thread::spawn(move || {
                // An end that is gone ends the connection; there is nothing more to report.
                let _ = shared.pass_on(&to, way, &arriving);
                let _ = to.shutdown(Shutdown::Write);
            }));
        }
        for writer in writers {
            let _ = writer.join();
        }
        self.lock().connections.remove(&id);
        for end in [near, far] {
            let _ = end.shutdown(Shutdown::Both);
        }
        Ok(())
    }

    fn pass_on(
        &self,
        mut to: &TcpStream,
        way: usize,
        arriving: &Receiver<(Instant, Vec<u8>)>,
    ) -> io::Result<()> {
        let mut last = Instant::now();
        for (arrived, piece) in arriving {
            let due = self.lock().due(arrived, way, piece.len()).max(last);
            last = due;
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            let mut state = self.lock();
            while state.conditions.stalled && !state.stopping {
                state = self
                    .changed
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
            }
            let left = state.cut_after.unwrap_or(u64::MAX);
            let now = piece.len().min(left as usize);
            state.cut_after = state.cut_after.map(|left| left - now as u64);
            state.passed += now as u64;
            for (what, seen) in &mut state.watched {
                *seen |= piece[..now].windows(what.len()).any(|part| part == what);
            }
            drop(state);
            to.write_all(&piece[..now])?;
            if now < piece.len() {
                self.lock().cut();
                return Ok(());
            }
        }
        Ok(())
    }
}

/// Reads arriving pieces and notes their times.
fn take(mut from: TcpStream, pieces: &SyncSender<(Instant, Vec<u8>)>) {
    loop {
        let mut piece = vec![0; PIECE];
        match from.read(&mut piece) {
            Ok(0) | Err(_) => return,
            Ok(bytes) => piece.truncate(bytes),
        }
        if pieces.send((Instant::now(), piece)).is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a proxy in front of an echo server.
    fn echo() -> (Proxy, TcpStream) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let proxy = Proxy::start(listener.local_addr().unwrap(), 1).unwrap();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                std::thread::spawn(move || {
                    let mut back = stream.try_clone().unwrap();
                    io::copy(&mut stream, &mut back)
                });
            }
        });
        let client = TcpStream::connect(proxy.address()).unwrap();
        client
            .set_read_timeout(Some(Duration::from_millis(300)))
            .unwrap();
        (proxy, client)
    }

    fn there_and_back(client: &mut TcpStream, bytes: &[u8]) -> io::Result<Vec<u8>> {
        client.write_all(bytes)?;
        let mut answer = vec![0; bytes.len()];
        client.read_exact(&mut answer)?;
        Ok(answer)
    }

    #[test]
    fn bytes_pass_unchanged_and_late() {
        let (proxy, mut client) = echo();
        assert_eq!(there_and_back(&mut client, b"quick").unwrap(), b"quick");
        proxy.set(Conditions {
            delay: Duration::from_millis(40),
            jitter: Duration::from_millis(5),
            ..Conditions::default()
        });
        let started = Instant::now();
        assert_eq!(there_and_back(&mut client, b"late").unwrap(), b"late");
        assert!(started.elapsed() >= Duration::from_millis(80));
        assert_eq!(proxy.passed(), 18);
    }

    #[test]
    fn what_passes_can_be_looked_for() {
        let (proxy, mut client) = echo();
        proxy.watch_for(b"needle");
        there_and_back(&mut client, b"a haystack with a needl").unwrap();
        assert!(!proxy.has_seen(b"needle"));
        there_and_back(&mut client, b"and one with a needle in it").unwrap();
        assert!(proxy.has_seen(b"needle") && !proxy.has_seen(b"haystack"));
    }

    #[test]
    fn a_stalled_link_says_nothing_and_then_everything() {
        let (proxy, mut client) = echo();
        assert_eq!(there_and_back(&mut client, b"a").unwrap(), b"a");
        proxy.set(Conditions::STALLED);
        let silence = there_and_back(&mut client, b"b").unwrap_err();
        assert_eq!(silence.kind(), io::ErrorKind::WouldBlock);
        proxy.set(Conditions::default());
        let mut answer = [0];
        client.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"b");
    }

    #[test]
    fn a_cut_comes_in_the_middle() {
        let (proxy, mut client) = echo();
        assert_eq!(there_and_back(&mut client, b"a").unwrap(), b"a");
        proxy.cut_after(3);
        let mut received = Vec::new();
        client.write_all(b"12345").unwrap();
        let _ = client.read_to_end(&mut received);
        assert!(received.len() < 5, "{received:?}");
        assert_eq!(proxy.connections(), 0);
    }

    #[test]
    fn who_is_refused_is_told_at_once() {
        let (proxy, _client) = echo();
        proxy.set(Conditions::REFUSING);
        let mut refused = TcpStream::connect(proxy.address()).unwrap();
        refused
            .set_read_timeout(Some(Duration::from_secs(5)))
            .unwrap();
        let answer = refused.read(&mut [0; 1]);
        assert!(
            !matches!(&answer, Err(error) if error.kind() == io::ErrorKind::WouldBlock),
            "{answer:?}"
        );
        assert!(!matches!(answer, Ok(1)));
    }

    #[test]
    fn a_narrow_link_takes_its_time() {
        let (proxy, mut client) = echo();
        client
            .set_read_timeout(Some(Duration::from_secs(5)))
            .unwrap();
        proxy.set(Conditions {
            rate: Some(1_000_000),
            ..Conditions::default()
        });
        let started = Instant::now();
        let sent = vec![7; 100_000];
        assert_eq!(there_and_back(&mut client, &sent).unwrap(), sent);
        assert!(started.elapsed() >= Duration::from_millis(100));
    }
}
