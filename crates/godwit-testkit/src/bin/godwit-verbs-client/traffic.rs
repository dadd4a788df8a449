//! Sending and receiving until the end, with every completion checked.

use std::io;

use godwit_verbs::abi::*;

use super::Arguments;
use super::device::{Device, RECEIVES, SENDS, Slot};
use super::exchange::{Peer, Reach};
use super::ledger::{self, InOrder, MESSAGE, Once, Operation};

/// Completions that are polled at a time.
const BATCH: usize = 16;

struct Traffic {
    device: Device,
    /// Each has as many queue pairs, one after the other.
    peers: Vec<Reach>,
    /// 0 for the server, 1 for the client.
    side: u8,
    pairs: Vec<Pair>,
    /// Receives of the shared queue, by their slot.
    shared: Once,
    ending: bool,
}

#[derive(Default)]
struct Pair {
    operations: InOrder,
    receives: InOrder,
    received: u64,
    last_sent: bool,
    last_received: bool,
}

/// Talks with the peer until the end; says what was checked.
pub(crate) fn run(arguments: &Arguments) -> io::Result<String> {
    let device = Device::open(arguments)?;
    let mut connections = Peer::meet(arguments.server.as_deref(), arguments.peers())?;
    let (pairs, each) = (device.pairs.len(), usize::from(arguments.pairs));
    let mut peers = Vec::new();
    for (number, connection) in connections.iter_mut().enumerate() {
        let own = number * each..(number + 1) * each;
        let peer = connection.exchange(&device.reach(own.clone()))?;
        if peer.pairs.len() != each {
            return Err(io::Error::other(
                "the peer has another number of queue pairs",
            ));
        }
        device.connect(own, &peer)?;
        peers.push(peer);
    }
    let mut traffic = Traffic {
        device,
        peers,
        side: u8::from(arguments.server.is_some()),
        pairs: (0..pairs).map(|_| Pair::default()).collect(),
        shared: Once::default(),
        ending: false,
    };
    for slot in 0..pairs as u64 * RECEIVES {
        traffic.post_receive((slot / RECEIVES) as usize, slot)?;
    }
    // Nobody sends before the other side can receive.
    for connection in &mut connections {
        connection.barrier("ready")?;
    }
    let mut rounds = 0u64;
    while !traffic.is_over() {
        if rounds.is_multiple_of(16) && arguments.until.exists() {
            traffic.ending = true;
        }
        rounds += 1;
        for pair in 0..pairs {
            traffic.send(pair)?;
        }
        traffic.take_completions()?;
    }
    for connection in &mut connections {
        connection.barrier("over")?;
    }
    let total = |count: fn(&Pair) -> u64| traffic.pairs.iter().map(count).sum::<u64>();
    Ok(format!(
        "{} operations completed and {} messages received on {pairs} queue pairs",
        total(|pair| pair.operations.completed()),
        total(|pair| pair.received)
    ))
}

impl Traffic {
    fn is_over(&self) -> bool {
        self.pairs
            .iter()
            .all(|pair| pair.last_sent && pair.last_received && pair.operations.outstanding() == 0)
    }

    /// Whose queue pair this is, and the place that it has among this peer's.
    fn at_peer(&self, pair: usize) -> (&Reach, usize) {
        let each = self.pairs.len() / self.peers.len();
        (&self.peers[pair / each], pair % each)
    }

    fn is_shared(&self) -> bool {
        !self.device.shared.is_null()
    }

    /// Posts the receive whose place in memory is `slot`.
    fn post_receive(&mut self, pair: usize, slot: u64) -> io::Result<()> {
        if self.is_shared() {
            self.shared.post(slot);
            self.device.post_receive(pair, slot, Slot::Receive(0, slot))
        } else {
            let number = self.pairs[pair].receives.post();
            let place = Slot::Receive(pair, number % RECEIVES);
            self.device.post_receive(pair, number, place)
        }
    }

    /// Fills the queue pair's send queue.
    fn send(&mut self, pair: usize) -> io::Result<()> {
        let (peer, place) = self.at_peer(pair);
        let (landing, rkey) = (peer.landing, peer.key);
        while !self.pairs[pair].last_sent && self.pairs[pair].operations.outstanding() < SENDS {
            let number = self.pairs[pair].operations.post();
            // SAFETY: integers, null pointers and a union of both.
            let mut request: ibv_send_wr = unsafe { std::mem::zeroed() };
            request.wr_id = wr_id(pair, number);
            request.send_flags = IBV_SEND_SIGNALED;
            request.num_sge = 1;
            request.wr.rdma = ibv_rdma {
                remote_addr: landing + (place * MESSAGE) as u64,
                rkey,
            };
            let mut slot = Slot::Send(pair, number);
            let bytes = self.device.bytes(slot);
            match ledger::operation(number) {
                Operation::Send(message) => {
                    let last = self.ending;
                    ledger::fill(bytes, self.side, place, message, last);
                    self.pairs[pair].last_sent = last;
                    request.opcode = IBV_WR_SEND;
                }
                Operation::Write(message) => {
                    ledger::fill(bytes, self.side, place, message, false);
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
        let mut count = self.device.poll(&mut completions)?;
        if count == 0 && self.device.has_events() {
            self.device.ask_for_event()?;
            count = self.device.poll(&mut completions)?;
            if count == 0 {
                self.device.wait_for_event()?;
                return Ok(());
            }
        }
        for completion in &completions[..count] {
            self.check(completion).map_err(io::Error::other)?;
        }
        Ok(())
    }

    fn check(&mut self, completion: &ibv_wc) -> Result<(), String> {
        if completion.status != IBV_WC_SUCCESS {
            return Err(format!(
                "request {:#x} failed with status {}",
                completion.wr_id, completion.status
            ));
        }
        let pair = self
            .device
            .pairs
            .iter()
            // SAFETY: the queue pairs live to the end.
            .position(|pair| unsafe { (**pair).qp_num } == completion.qp_num)
            .ok_or_else(|| format!("a completion of queue pair {:#x}", completion.qp_num))?;
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
        let number = completion.wr_id;
        let slot = if self.is_shared() {
            self.shared.complete(number)?;
            Slot::Receive(0, number)
        } else {
            self.pairs[pair]
                .receives
                .complete(number)
                .map_err(|error| format!("queue pair {pair}, receives: {error}"))?;
            Slot::Receive(pair, number % RECEIVES)
        };
        if completion.byte_len as usize != MESSAGE {
            return Err(format!("a message of {} bytes", completion.byte_len));
        }
        let message = self.device.bytes(slot);
        let place = self.at_peer(pair).1;
        let last = ledger::check(message, 1 - self.side, place, self.pairs[pair].received)?;
        // What was received must not be taken for a later message.
        message.fill(0xee);
        self.pairs[pair].received += 1;
        self.pairs[pair].last_received |= last;
        // One side's end is the other's.
        self.ending |= last;
        self.post_receive(pair, number)
            .map_err(|error| error.to_string())
    }
}

/// A request's number, with its queue pair above.
const NUMBER: u64 = (1 << 48) - 1;

fn wr_id(pair: usize, number: u64) -> u64 {
    (pair as u64 + 1) << 48 | number & NUMBER
}
