//! Sending and receiving until the end, with every completion checked.

use std::io;

use godwit_verbs::abi::*;

use super::Arguments;
use super::device::{Device, SENDS, Slot};
use super::exchange::{Reach, meet_all};
use super::ledger::{self, InOrder, Note, Operation};
use super::receives::Receives;
use super::rounds::{self, Load};

/// Completions that are polled at a time.
pub(crate) const BATCH: usize = 16;

struct Traffic {
    device: Device,
    /// Each has as many queue pairs, one after the other.
    peers: Vec<Reach>,
    /// 0 for the server, 1 for the client.
    side: u8,
    pairs: Vec<Pair>,
    receives: Receives,
    ending: bool,
}

#[derive(Default)]
struct Pair {
    operations: InOrder,
    received: u64,
    last_sent: bool,
    last_received: bool,
}

/// Talks with the peer until the end; says what was checked.
pub(crate) fn run(arguments: &Arguments) -> io::Result<String> {
    let device = Device::open(arguments)?;
    let (mut connections, mut peers) = (Vec::new(), Vec::new());
    for met in meet_all(arguments, &device)? {
        device.connect(met.share, &met.reach)?;
        connections.push(met.connection);
        peers.push(met.reach);
    }
    let pairs = device.pairs.len();
    let mut traffic = Traffic {
        receives: Receives::fill(&device)?,
        device,
        peers,
        side: u8::from(arguments.server.is_some()),
        pairs: (0..pairs).map(|_| Pair::default()).collect(),
        ending: false,
    };
    rounds::work(&mut traffic, &mut connections, &arguments.until)?;
    let total = |count: fn(&Pair) -> u64| traffic.pairs.iter().map(count).sum::<u64>();
    Ok(format!(
        "{} operations completed and {} messages received on {pairs} queue pairs",
        total(|pair| pair.operations.completed()),
        total(|pair| pair.received)
    ))
}

impl Load for Traffic {
    fn pairs(&self) -> usize {
        self.pairs.len()
    }

    fn is_over(&self) -> bool {
        self.pairs
            .iter()
            .all(|pair| pair.last_sent && pair.last_received && pair.operations.outstanding() == 0)
    }

    fn end(&mut self) {
        self.ending = true;
    }

    /// Fills the queue pair's send queue.
    fn send(&mut self, pair: usize) -> io::Result<()> {
        let (peer, place) = self.at_peer(pair);
        let (remote_addr, rkey) = (Device::landing(peer, place), peer.key);
        while !self.pairs[pair].last_sent && self.pairs[pair].operations.outstanding() < SENDS {
            let number = self.pairs[pair].operations.post();
            // SAFETY: integers, null pointers and a union of both.
            let mut request: ibv_send_wr = unsafe { std::mem::zeroed() };
            request.wr_id = wr_id(pair, number);
            request.send_flags = IBV_SEND_SIGNALED;
            request.num_sge = 1;
            request.wr.rdma = ibv_rdma { remote_addr, rkey };
            let mut slot = Slot::Send(pair, number);
            let bytes = self.device.bytes(slot);
            match ledger::operation(number) {
                Operation::Send(message) => {
                    let note = Note {
                        last: self.ending,
                        seen: 0,
                    };
                    ledger::fill(bytes, self.side, place, message, note);
                    self.pairs[pair].last_sent = self.ending;
                    request.opcode = IBV_WR_SEND;
                }
                Operation::Write(message) => {
                    ledger::fill(bytes, self.side, place, message, Note::default());
                    request.opcode = IBV_WR_RDMA_WRITE;
                }
                Operation::ReadBack(_) => {
                    slot = Slot::ReadBack(pair);
                    self.device.bytes(slot).fill(0);
                    request.opcode = IBV_WR_RDMA_READ;
                }
            }
            let mut piece = self.device.piece(slot);
            request.sg_list = &raw mut piece;
            self.device.post_send(pair, &mut request)?;
        }
        Ok(())
    }

    /// Checks what has completed; waits for something if nothing has and there is a channel.
    fn take_completions(&mut self) -> io::Result<()> {
        let mut completions = [ibv_wc::default(); BATCH];
        for completion in self.device.take(&mut completions, None)? {
            self.check(completion).map_err(io::Error::other)?;
        }
        Ok(())
    }
}

impl Traffic {
    /// Whose queue pair this is, and the place that it has among this peer's.
    fn at_peer(&self, pair: usize) -> (&Reach, usize) {
        let each = self.pairs.len() / self.peers.len();
        (&self.peers[pair / each], pair % each)
    }

    fn check(&mut self, completion: &ibv_wc) -> Result<(), String> {
        let pair = self.device.succeeded(completion)?;
        if completion.opcode & IBV_WC_RECV != 0 {
            self.check_received(pair, completion)
        } else {
            self.check_done(pair, completion)
        }
    }

    fn check_done(&mut self, pair: usize, completion: &ibv_wc) -> Result<(), String> {
        let number = completion.wr_id & NUMBER;
        if completion.wr_id != wr_id(pair, number) {
            return Err(format!(
                "queue pair {pair} has a completion of request {:#x}",
                completion.wr_id
            ));
        }
        self.pairs[pair]
            .operations
            .complete(number)
            .map_err(|error| format!("queue pair {pair}: {error}"))?;
        if let Operation::ReadBack(message) = ledger::operation(number) {
            let read = self.device.bytes(Slot::ReadBack(pair));
            ledger::check(read, self.side, self.at_peer(pair).1, message)
                .map_err(|error| format!("what was read back: {error}"))?;
        }
        Ok(())
    }

    fn check_received(&mut self, pair: usize, completion: &ibv_wc) -> Result<(), String> {
        let slot = self.receives.complete(pair, completion.wr_id)?;
        let message = self.device.received(slot);
        let place = self.at_peer(pair).1;
        let number = self.pairs[pair].received;
        let last = ledger::check(message, 1 - self.side, place, number)?.last;
        // What was received must not be taken for a later message.
        message.fill(0xee);
        self.pairs[pair].received += 1;
        self.pairs[pair].last_received |= last;
        // One side's end is the other's.
        self.ending |= last;
        self.receives
            .post(&self.device, pair, completion.wr_id)
            .map_err(|error| error.to_string())
    }
}

/// A request's number, with its queue pair above.
pub(crate) const NUMBER: u64 = (1 << 48) - 1;

pub(crate) fn wr_id(pair: usize, number: u64) -> u64 {
    (pair as u64 + 1) << 48 | number & NUMBER
}
