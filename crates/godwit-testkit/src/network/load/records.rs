//! A client that stores numbered records on one connection, and knows which ones must be there.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::super::{Namespace, inside};
use super::answers::{Service, Shared};
use super::beats::Beats;
use super::requests::{AGAIN, PATIENCE};
use crate::random::mix;

/// A connection to a server that stores records.
pub(super) trait Store: Sized {
    fn open(server: SocketAddr) -> io::Result<Self>;

    /// Stores the record of this number, new or again. Returns once the server says that the record is stored.
    fn put(&mut self, number: u64, value: &str) -> io::Result<()>;

    /// Returns the records, at least those with a number of at most `last`.
    fn read(&mut self, last: u64) -> io::Result<Vec<(u64, String)>>;
}

/// The records at the server beside those that the server has promised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    /// Records with an answer.
    pub answered: u64,
    /// Records with an answer that are missing.
    pub lost: u64,
    /// Records with another value, or that were never sent.
    pub wrong: u64,
}

type Check = Sender<io::Result<Stored>>;

/// A running client. A broken connection is counted, and replaced.
#[derive(Debug)]
pub struct Records {
    shared: Arc<Shared>,
    checks: Sender<Check>,
    _thread: JoinHandle<io::Result<()>>,
}

impl Records {
    /// Starts a client inside a namespace that stores a record at this interval, or as often as the server answers if less.
    pub(super) fn start<S: Store>(from: &Namespace, server: SocketAddr, every: Duration) -> Self {
        let shared = Arc::new(Shared::default());
        let (checks, asked) = channel();
        let thread = inside(from, {
            let shared = Arc::clone(&shared);
            move || {
                store::<S>(server, every, &shared, &asked);
                Ok(())
            }
        });
        Self {
            shared,
            checks,
            _thread: thread,
        }
    }

    /// Returns the number of broken connections so far.
    pub fn broken(&self) -> u32 {
        self.shared.broken()
    }

    /// Returns the client's view between two moments in the past.
    pub fn between(&self, from: Instant, to: Instant) -> Service {
        self.shared.between(from, to)
    }

    /// Reads all records back, on the client's connection.
    pub fn check(&self) -> io::Result<Stored> {
        let (answer, stored) = channel();
        let gone = |_| io::Error::other("the client of records has ended");
        self.checks
            .send(answer)
            .map_err(|error| gone(error.to_string()))?;
        let stored = stored.recv_timeout(2 * PATIENCE);
        stored.map_err(|error| gone(error.to_string()))?
    }
}

impl Drop for Records {
    fn drop(&mut self) {
        self.shared.stop();
    }
}

fn store<S: Store>(server: SocketAddr, every: Duration, shared: &Shared, checks: &Receiver<Check>) {
    let mut store: Option<S> = None;
    let mut answered = 0;
    let mut beats = Beats::new(every);
    while !shared.stopped() {
        let asked = Instant::now();
        let outcome = match &mut store {
            None => S::open(server).map(|new| store = Some(new)),
            Some(open) => match checks.try_recv() {
                Ok(check) => {
                    let records = open.read(answered + 1);
                    let failed = records.as_ref().err().map(io::Error::kind);
                    let _ = check.send(records.map(|records| compare(answered, &records)));
                    failed.map_or(Ok(()), |kind| Err(kind.into()))
                }
                Err(_) => open.put(answered + 1, &value(answered + 1)).map(|()| {
                    answered += 1;
                    shared.answered(asked);
                }),
            },
        };
        if outcome.is_ok() {
            beats.wait();
            continue;
        }
        if store.take().is_some() {
            shared.broke();
        }
        std::thread::sleep(AGAIN);
    }
}

fn value(number: u64) -> String {
    format!("{:016x}", mix(number))
}

/// Compares the records at the server with the promised ones. The record after the last promised one may be there: its
/// connection can break before the answer.
fn compare(answered: u64, records: &[(u64, String)]) -> Stored {
    let right = |(number, found): &&(u64, String)| {
        (1..=answered + 1).contains(number) && *found == value(*number)
    };
    let wrong = records.len() - records.iter().filter(right).count();
    let promised = records.iter().filter(|(number, _)| *number <= answered);
    Stored {
        answered,
        lost: answered.saturating_sub(promised.count() as u64),
        wrong: wrong as u64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_promised_record_is_missed_and_an_unsent_one_noticed() {
        let record = |number| (number, value(number));
        let stored = |lost, wrong| Stored {
            answered: 3,
            lost,
            wrong,
        };
        let all = [1, 2, 3].map(record);
        assert_eq!(compare(3, &all), stored(0, 0));
        assert_eq!(compare(3, &[1, 2, 3, 4].map(record)), stored(0, 0));
        assert_eq!(compare(3, &all[..2]), stored(1, 0));
        assert_eq!(compare(3, &[1, 2, 3, 5].map(record)), stored(0, 1));
        let other = [record(1), record(2), (3, value(2))];
        assert_eq!(compare(3, &other), stored(0, 1));
    }
}
