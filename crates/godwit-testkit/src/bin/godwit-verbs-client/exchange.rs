//! The exchange of both sides over TCP before they talk over RDMA.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::ops::Range;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::Arguments;
use super::device::Device;

const PORT: u16 = 18600;
const LONGEST: u64 = 64 << 10;

/// The addresses and keys of a side.
#[derive(Serialize, Deserialize)]
pub(crate) struct Reach {
    pub(crate) gid: [u8; 16],
    pub(crate) pairs: Vec<u32>,
    /// Address for the peer's writes: two messages for each queue pair.
    pub(crate) landing: u64,
    pub(crate) key: u32,
}

/// Meets all others, and sends each the addresses of a share of this side's queue pairs. Returns each with the answer
/// and the share.
pub(crate) fn meet_all(arguments: &Arguments, device: &Device) -> io::Result<Vec<Met>> {
    let each = usize::from(arguments.pairs);
    let connections = Peer::meet(arguments.server.as_deref(), arguments.peers())?;
    let meet = |(number, mut connection): (usize, Peer)| {
        let share = number * each..(number + 1) * each;
        let reach = connection.exchange(&device.reach(share.clone()))?;
        if reach.pairs.len() != each {
            return Err(io::Error::other(
                "the peer has another number of queue pairs",
            ));
        }
        Ok(Met {
            connection,
            reach,
            share,
        })
    };
    connections.into_iter().enumerate().map(meet).collect()
}

/// Another side after the exchange.
pub(crate) struct Met {
    pub(crate) connection: Peer,
    pub(crate) reach: Reach,
    /// This side's queue pairs for the other side.
    pub(crate) share: Range<usize>,
}

/// The connection to the other side.
pub(crate) struct Peer(BufReader<TcpStream>);

impl Peer {
    /// Waits for `clients` clients, or connects to the server.
    fn meet(server: Option<&str>, clients: usize) -> io::Result<Vec<Self>> {
        let Some(address) = server else {
            let listener = TcpListener::bind(("0.0.0.0", PORT))?;
            return (0..clients)
                .map(|_| Ok(Self(BufReader::new(listener.accept()?.0))))
                .collect();
        };
        let began = Instant::now();
        let stream = loop {
            match TcpStream::connect((address, PORT)) {
                Ok(stream) => break stream,
                Err(error) if began.elapsed() > Duration::from_secs(10) => {
                    return Err(error);
                }
                Err(_) => std::thread::sleep(Duration::from_millis(100)),
            }
        };
        Ok(vec![Self(BufReader::new(stream))])
    }

    /// Sends `ours` and returns the other side's.
    fn exchange(&mut self, ours: &Reach) -> io::Result<Reach> {
        self.say(&serde_json::to_string(ours)?)?;
        Ok(serde_json::from_str(&self.hear()?)?)
    }

    /// Waits until the other side has reached the same point.
    pub(crate) fn barrier(&mut self, word: &str) -> io::Result<()> {
        self.say(word)?;
        let heard = self.hear()?;
        if heard.trim() == word {
            Ok(())
        } else {
            Err(io::Error::other(format!(
                "the peer said {heard:?} in place of {word:?}"
            )))
        }
    }

    fn say(&mut self, line: &str) -> io::Result<()> {
        self.0.get_mut().write_all(format!("{line}\n").as_bytes())
    }

    fn hear(&mut self) -> io::Result<String> {
        let mut line = String::new();
        self.0.by_ref().take(LONGEST).read_line(&mut line)?;
        Ok(line)
    }
}
