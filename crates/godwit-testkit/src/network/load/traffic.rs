//! Competing traffic on a link: the network traffic of virtual machines.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::super::{Link, inside};

/// Port of the sink in the right namespace.
const PORT: u16 = 9000;
/// Longest wait for the sink to take a message.
const PATIENCE: Duration = Duration::from_secs(30);

/// The priority mark of the traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// Like everything else.
    Equal,
    /// Before everything else.
    Urgent,
}

impl Priority {
    /// Returns the type of service, which selects the queue.
    const fn type_of_service(self) -> u8 {
        match self {
            Self::Equal => 0,
            // "Minimize delay": the first band.
            Self::Urgent => 0x10,
        }
    }
}

/// Messages over a link from left to right at an adjustable rate.
#[derive(Debug)]
pub struct Traffic {
    shared: Arc<Shared>,
    sender: Option<JoinHandle<io::Result<()>>>,
}

#[derive(Debug)]
struct Shared {
    bytes_per_second: AtomicU64,
    sent: AtomicU64,
    stop: AtomicBool,
}

impl Traffic {
    /// Starts to send messages of `message` bytes at `bytes_per_second`.
    pub fn start(
        link: &Link,
        bytes_per_second: u64,
        message: usize,
        priority: Priority,
    ) -> io::Result<Self> {
        let address = SocketAddr::from((link.right().address(), PORT));
        let (ready, started) = channel();
        inside(link.right(), {
            let ready = ready.clone();
            move || sink(address, &ready)
        });
        await_start(&started)?;
        let shared = Arc::new(Shared {
            bytes_per_second: AtomicU64::new(bytes_per_second),
            sent: AtomicU64::new(0),
            stop: AtomicBool::new(false),
        });
        let sender = inside(link.left(), {
            let shared = Arc::clone(&shared);
            move || shared.send(address, message, priority, &ready)
        });
        await_start(&started)?;
        Ok(Self {
            shared,
            sender: Some(sender),
        })
    }

    pub fn set_rate(&self, bytes_per_second: u64) {
        self.shared
            .bytes_per_second
            .store(bytes_per_second, Ordering::Relaxed);
    }

    /// Returns the bytes sent so far.
    pub fn sent(&self) -> u64 {
        self.shared.sent.load(Ordering::Relaxed)
    }

    /// Ends the traffic.
    pub fn stop(mut self) -> io::Result<()> {
        self.shared.stop.store(true, Ordering::Relaxed);
        match self.sender.take().map(JoinHandle::join) {
            Some(Ok(result)) => result,
            _ => Err(io::Error::other("the sender of the traffic panicked")),
        }
    }
}

impl Drop for Traffic {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
    }
}

impl Shared {
    fn send(
        &self,
        address: SocketAddr,
        message: usize,
        priority: Priority,
        ready: &Sender<io::Result<()>>,
    ) -> io::Result<()> {
        let connect = || -> io::Result<TcpStream> {
            let stream = TcpStream::connect(address)?;
            rustix::net::sockopt::set_ip_tos(&stream, priority.type_of_service())?;
            stream.set_write_timeout(Some(PATIENCE))?;
            Ok(stream)
        };
        let mut stream = match connect() {
            Ok(stream) => stream,
            Err(error) => {
                let _ = ready.send(Err(error));
                return Ok(());
            }
        };
        let _ = ready.send(Ok(()));
        let content = vec![0x5a; message];
        let mut due = Instant::now();
        while !self.stop.load(Ordering::Relaxed) {
            stream.write_all(&content)?;
            self.sent.fetch_add(message as u64, Ordering::Relaxed);
            let rate = self.bytes_per_second.load(Ordering::Relaxed).max(1);
            due += Duration::from_secs_f64(message as f64 / rate as f64);
            let now = Instant::now();
            if due > now {
                std::thread::sleep(due - now);
            } else if now - due > Duration::from_millis(100) {
                // Bytes that the link did not take are not made up for: the link would see a burst.
                due = now;
            }
        }
        Ok(())
    }
}

fn await_start(started: &std::sync::mpsc::Receiver<io::Result<()>>) -> io::Result<()> {
    started
        .recv_timeout(PATIENCE)
        .unwrap_or_else(|_| Err(io::Error::other("the traffic does not start")))
}

/// Takes the messages of one sender.
fn sink(address: SocketAddr, ready: &Sender<io::Result<()>>) -> io::Result<()> {
    let listener = match TcpListener::bind(address) {
        Ok(listener) => listener,
        Err(error) => {
            let _ = ready.send(Err(error));
            return Ok(());
        }
    };
    let _ = ready.send(Ok(()));
    let (mut stream, _) = listener.accept()?;
    let mut buffer = vec![0; 1 << 20];
    while stream.read(&mut buffer)? > 0 {}
    Ok(())
}
