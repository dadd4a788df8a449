//! Pings at a steady rate, each of which is remembered.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrV4, SocketType, ipproto, sockopt,
};

use super::super::{Namespace, inside};
use super::beats::Beats;

/// Bytes of the ICMP message.
const MESSAGE: usize = 32;
const REQUEST: u8 = 8;
const REPLY: u8 = 0;
/// Time between two checks for the end of the receiver.
const TURN: Duration = Duration::from_millis(100);

#[derive(Clone, Copy, Debug)]
pub struct Ping {
    /// Time at which the ping left.
    pub sent: Instant,
    /// Time of the first answer.
    pub answered: Option<Instant>,
    pub answers: u32,
}

/// A sender that pings an address until it is stopped.
#[derive(Debug)]
pub struct Pinger {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<io::Result<()>>>,
}

#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    silent: AtomicBool,
    pings: Mutex<Vec<Ping>>,
}

impl Shared {
    fn pings(&self) -> MutexGuard<'_, Vec<Ping>> {
        self.pings.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pinger {
    /// Starts to ping `to` from inside a namespace.
    pub fn start(from: &Namespace, to: Ipv4Addr, every: Duration) -> io::Result<Self> {
        let socket = inside(from, || {
            let socket =
                rustix::net::socket(AddressFamily::INET, SocketType::RAW, Some(ipproto::ICMP))?;
            sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(TURN))?;
            sockopt::set_socket_recv_buffer_size_force(&socket, 8 << 20)?;
            Ok(socket)
        });
        let socket = socket.join().map_err(|_| io::Error::other("no socket"))??;
        let shared = Arc::new(Shared::default());
        let receiving = {
            let (socket, shared) = (socket.try_clone()?, Arc::clone(&shared));
            std::thread::spawn(move || receive(&socket, &shared, to))
        };
        let sending = {
            let shared = Arc::clone(&shared);
            std::thread::spawn(move || send(&socket, &shared, to, every))
        };
        Ok(Self {
            shared,
            threads: vec![sending, receiving],
        })
    }

    pub fn sent(&self) -> usize {
        self.shared.pings().len()
    }

    /// Returns all pings so far, in the order in which they left.
    pub fn pings(&self) -> Vec<Ping> {
        self.shared.pings().clone()
    }

    /// Sends no more, waits for outstanding answers, and returns all pings.
    pub fn finish(mut self, patience: Duration) -> io::Result<Vec<Ping>> {
        self.shared.silent.store(true, Ordering::Relaxed);
        let until = Instant::now() + patience;
        while Instant::now() < until && self.pings().iter().any(|ping| ping.answered.is_none()) {
            std::thread::sleep(TURN);
        }
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            thread
                .join()
                .map_err(|_| io::Error::other("a thread of the pings panicked"))??;
        }
        Ok(self.pings())
    }
}

impl Drop for Pinger {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
    }
}

fn send(socket: &OwnedFd, shared: &Shared, to: Ipv4Addr, every: Duration) -> io::Result<()> {
    let to = SocketAddrV4::new(to, 0);
    let mut beats = Beats::new(every);
    while !shared.stop.load(Ordering::Relaxed) && !shared.silent.load(Ordering::Relaxed) {
        let index = {
            let mut pings = shared.pings();
            pings.push(Ping {
                sent: Instant::now(),
                answered: None,
                answers: 0,
            });
            pings.len() - 1
        };
        rustix::net::sendto(socket, &request(index as u64), SendFlags::empty(), &to)?;
        beats.wait();
    }
    Ok(())
}

fn request(index: u64) -> [u8; MESSAGE] {
    let mut message = [0; MESSAGE];
    message[0] = REQUEST;
    message[4..6].copy_from_slice(&(std::process::id() as u16).to_be_bytes());
    message[6..8].copy_from_slice(&(index as u16).to_be_bytes());
    message[8..16].copy_from_slice(&index.to_be_bytes());
    let words = message
        .chunks(2)
        .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    message[2..4].copy_from_slice(&(!(sum as u16)).to_be_bytes());
    message
}

fn receive(socket: &OwnedFd, shared: &Shared, from: Ipv4Addr) -> io::Result<()> {
    let mut packet = [0; 1024];
    while !shared.stop.load(Ordering::Relaxed) {
        let length = match rustix::net::recv(socket, &mut packet, RecvFlags::empty()) {
            Ok((length, _)) => length,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        };
        let now = Instant::now();
        if let Some(index) = answered(&packet[..length], from)
            && let Some(ping) = shared.pings().get_mut(index)
        {
            ping.answered.get_or_insert(now);
            ping.answers += 1;
        }
    }
    Ok(())
}

/// Returns the index of the ping that an IP packet from this address answers.
fn answered(packet: &[u8], from: Ipv4Addr) -> Option<usize> {
    let header = usize::from(packet.first()? & 0xf) * 4;
    let message = packet.get(header..)?;
    let own = message.get(4..6)? == (std::process::id() as u16).to_be_bytes();
    let theirs = packet.get(12..16)? == from.octets() && message.first() == Some(&REPLY);
    let index = u64::from_be_bytes(*message.get(8..)?.first_chunk()?);
    (own && theirs).then_some(index as usize)
}
