//! A client of Redis.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use super::super::Namespace;
use super::records::{Records, Store};
use super::requests::connect;

/// Values read with one request.
const AT_ONCE: u64 = 500;
/// Longest accepted value in bytes.
const LONGEST: usize = 4096;

/// A connection to Redis.
#[derive(Debug)]
pub struct Redis(BufReader<TcpStream>);

impl Redis {
    /// Starts a client inside a namespace that sets a key at this interval.
    pub fn start(from: &Namespace, server: SocketAddr, every: Duration) -> Records {
        Records::start::<Self>(from, server, every)
    }

    fn ask(&mut self, words: &[String]) -> io::Result<()> {
        self.0.get_mut().write_all(&request(words))
    }
}

impl Store for Redis {
    fn open(server: SocketAddr) -> io::Result<Self> {
        connect(server).map(Self)
    }

    fn put(&mut self, number: u64, value: &str) -> io::Result<()> {
        self.ask(&["SET".to_owned(), key(number), value.to_owned()])?;
        match line(&mut self.0)?.as_str() {
            "+OK" => Ok(()),
            other => Err(unexpected(other)),
        }
    }

    fn read(&mut self, last: u64) -> io::Result<Vec<(u64, String)>> {
        let mut records = Vec::new();
        for first in (1..=last).step_by(AT_ONCE as usize) {
            let numbers = first..=last.min(first + AT_ONCE - 1);
            let keys = numbers.clone().map(key);
            self.ask(
                &std::iter::once("MGET".to_owned())
                    .chain(keys)
                    .collect::<Vec<_>>(),
            )?;
            let count = line(&mut self.0)?;
            if count != format!("*{}", numbers.clone().count()) {
                return Err(unexpected(&count));
            }
            for number in numbers {
                records.extend(bulk(&mut self.0)?.map(|value| (number, value)));
            }
        }
        Ok(records)
    }
}

fn key(number: u64) -> String {
    format!("record:{number}")
}

fn request(words: &[String]) -> Vec<u8> {
    let words = words
        .iter()
        .map(|word| format!("${}\r\n{word}\r\n", word.len()));
    let words: Vec<String> = words.collect();
    format!("*{}\r\n{}", words.len(), words.concat()).into_bytes()
}

/// Reads a line without its end.
fn line(from: &mut impl BufRead) -> io::Result<String> {
    let mut line = String::new();
    from.take(LONGEST as u64).read_line(&mut line)?;
    let whole = line.strip_suffix("\r\n");
    whole
        .map(str::to_owned)
        .ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

/// Reads a value; `None` for a missing one.
fn bulk(from: &mut impl BufRead) -> io::Result<Option<String>> {
    let length = line(from)?;
    if length == "$-1" {
        return Ok(None);
    }
    let bytes = length
        .strip_prefix('$')
        .and_then(|length| length.parse().ok());
    let bytes: usize = bytes
        .filter(|bytes| *bytes <= LONGEST)
        .ok_or_else(|| unexpected(&length))?;
    let mut value = vec![0; bytes + 2];
    from.read_exact(&mut value)?;
    value.truncate(bytes);
    String::from_utf8(value).map_err(io::Error::other).map(Some)
}

fn unexpected(answer: &str) -> io::Error {
    io::Error::other(format!("Redis answers {answer}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_answers() {
        let words = ["GET", "a1"].map(str::to_owned);
        assert_eq!(request(&words), b"*2\r\n$3\r\nGET\r\n$2\r\na1\r\n");
        let mut answers = &b"+OK\r\n$2\r\nok\r\n$-1\r\n$9999\r\n$3\r\nx"[..];
        assert_eq!(line(&mut answers).unwrap(), "+OK");
        assert_eq!(bulk(&mut answers).unwrap().as_deref(), Some("ok"));
        assert_eq!(bulk(&mut answers).unwrap(), None);
        assert!(bulk(&mut answers).is_err(), "too long");
        assert!(bulk(&mut answers).is_err(), "cut off");
    }
}
