//! Sending and receiving until the end, with every completion checked.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::io;

use godwit_verbs::abi::*;

use super::Arguments;
use super::content::ledger::{self, InOrder, Note, Operation};
use super::content::memory::Memory;
use super::content::old_keys;
use super::content::windows::PairWindows;
use super::device::{Device, SENDS, Slot};
use super::exchange::{Reach, meet_all};
use super::handover::Told;
use super::receives::Receives;
use super::rounds::{self, Load};

/// Completions polled at a time.
pub(crate) const BATCH: usize = 16;

pub(super) struct Traffic {
    pub(super) device: Device,
    /// The peers; each has as many queue pairs, one after the other.
    peers: Vec<Reach>,
    /// 0 for the server, 1 for the client.
    pub(super) side: u8,
    pub(super) pairs: Vec<Pair>,
    receives: Receives,
    memory: Memory,
    ending: bool,
}

#[derive(Default)]
pub(super) struct Pair {
    /// All requests.
    pub(super) operations: InOrder,
    /// Requests still to complete.
    under_way: VecDeque<Step>,
    /// Number of regular requests.
    regular: u64,
    windows: Option<PairWindows>,
    received: u64,
    last_sent: bool,
    last_received: bool,
}

/// The action of a request.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    Regular(Operation),
    /// Invalidates this one of the queue pair's two windows.
    Invalidate(usize),
    /// Binds this window.
    Bind(usize),
}

impl Step {
    /// Returns the operation in the request's completion (`IBV_WC_*`).
    fn completes_as(self) -> c_int {
        match self {
            Step::Regular(Operation::Send(_)) => 0,
            Step::Regular(Operation::Write(_)) => 1,
            Step::Regular(Operation::ReadBack(_)) => 2,
            Step::Bind(_) => 5,
            Step::Invalidate(_) => 6,
        }
    }
}

impl Pair {
    /// Returns the next step to post; `None` if a message or a completion has to come first.
    fn next_step(&mut self, device: &Device) -> Option<Step> {
        let operation = ledger::operation(self.regular);
        let Some(windows) = &mut self.windows else {
            return Some(Step::Regular(operation));
        };
        if ledger::begins_round(self.regular)
            && let Some(window) = windows.offered.next()
        {
            if windows.to_invalidate(device, window).is_some() {
                return Some(Step::Invalidate(window));
            }
            // A binding may follow nothing but an invalidation, which waits for all earlier requests to complete. When
            // soft-RoCE repeats a lost request, it also repeats bindings behind it, and gets stuck.
            let last = self.under_way.back();
            return matches!(last, None | Some(Step::Invalidate(_))).then_some(Step::Bind(window));
        }
        if matches!(operation, Operation::Write(_)) {
            windows.used.newest()?;
        }
        Some(Step::Regular(operation))
    }

    /// Returns a message's fields about windows, and the key that the message invalidates.
    fn tell(&mut self, device: &Device) -> (u64, Option<u32>) {
        let Some(windows) = &mut self.windows else {
            return (0, None);
        };
        let (adopted, old) = windows.used.adopt(self.operations.completed());
        let key = windows.newest();
        let told = Told { key, adopted };
        (told.word(), old.filter(|_| device.windows == IBV_MW_TYPE_2))
    }

    fn bindings(&self) -> u64 {
        let windows = self.windows.as_ref();
        windows.map_or(0, |windows| u64::from(windows.offered.bindings()))
    }

    /// Returns a window of the peer's, and a former key of the window.
    pub(super) fn old_key(&self) -> Option<(usize, u32)> {
        self.windows.as_ref()?.used.stale()
    }
}

/// Talks with the peer until the end; returns a summary of the checks.
pub(crate) fn run(arguments: &Arguments) -> io::Result<String> {
    let device = Device::open(arguments)?;
    let (mut connections, mut peers) = (Vec::new(), Vec::new());
    for met in meet_all(arguments, &device)? {
        device.connect(met.share, &met.reach)?;
        connections.push(met.connection);
        peers.push(met.reach);
    }
    let mut pairs = Vec::new();
    for _ in &device.pairs {
        let windows = arguments.windows.map(|_| PairWindows::alloc(&device));
        pairs.push(Pair {
            windows: windows.transpose()?,
            ..Pair::default()
        });
    }
    let mut traffic = Traffic {
        receives: Receives::fill(&device)?,
        device,
        peers,
        side: u8::from(arguments.server.is_some()),
        pairs,
        memory: Memory::new(arguments.memory),
        ending: false,
    };
    rounds::work(&mut traffic, &mut connections, &arguments.until)?;
    let total = |count: fn(&Pair) -> u64| traffic.pairs.iter().map(count).sum::<u64>();
    let mut checked = format!(
        "{} operations completed and {} messages received on {} queue pairs",
        total(|pair| pair.operations.completed()),
        total(|pair| pair.received),
        traffic.pairs.len(),
    );
    if arguments.windows.is_some() {
        let bindings = total(Pair::bindings);
        let refused = old_keys::try_all(&mut traffic, &mut connections)?;
        let windows = traffic.pairs.iter_mut();
        for windows in windows.filter_map(|pair| pair.windows.take()) {
            windows.dealloc()?;
        }
        checked += &format!("; {bindings} bindings of windows, and {refused} old keys refused");
    }
    if arguments.memory > 0 {
        let written = traffic.memory.check()?;
        checked += &format!("; {written} pages written");
    }
    Ok(checked)
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
        while !self.pairs[pair].last_sent && self.pairs[pair].operations.outstanding() < SENDS {
            let Some(step) = self.pairs[pair].next_step(&self.device) else {
                return Ok(());
            };
            let one = &mut self.pairs[pair];
            let number = one.operations.post();
            one.under_way.push_back(step);
            let wr_id = wr_id(pair, number);
            match (step, &mut one.windows) {
                (Step::Regular(operation), _) => {
                    one.regular += 1;
                    self.post(pair, number, operation)?;
                }
                (Step::Invalidate(window), Some(windows)) => {
                    windows.invalidate(&self.device, pair, window, wr_id)?;
                }
                (Step::Bind(window), Some(windows)) => {
                    windows.bind(&self.device, pair, window, wr_id)?;
                }
                (_, None) => {}
            }
        }
        Ok(())
    }

    /// Checks completions; with a channel, waits for one if there are none.
    fn take_completions(&mut self) -> io::Result<()> {
        self.memory.write_sometimes();
        let mut completions = [ibv_wc::default(); BATCH];
        for completion in self.device.take(&mut completions, None)? {
            self.check(completion).map_err(io::Error::other)?;
        }
        Ok(())
    }
}

impl Traffic {
    /// Returns the peer of this queue pair, and the pair's place among this peer's.
    pub(super) fn at_peer(&self, pair: usize) -> (&Reach, usize) {
        let each = self.pairs.len() / self.peers.len();
        (&self.peers[pair / each], pair % each)
    }

    /// Posts a regular request.
    fn post(&mut self, pair: usize, number: u64, operation: Operation) -> io::Result<()> {
        let (_, place) = self.at_peer(pair);
        // SAFETY: integers, null pointers and a union of both.
        let mut request: ibv_send_wr = unsafe { std::mem::zeroed() };
        request.wr_id = wr_id(pair, number);
        request.send_flags = IBV_SEND_SIGNALED;
        request.num_sge = 1;
        let mut slot = Slot::Send(pair, number);
        let bytes = self.device.bytes(slot);
        match operation {
            Operation::Send(message) => {
                let (more, old_key) = self.pairs[pair].tell(&self.device);
                let note = Note {
                    last: self.ending,
                    more,
                };
                ledger::fill(bytes, self.side, place, message, note);
                self.pairs[pair].last_sent = self.ending;
                request.opcode = old_key.map_or(IBV_WR_SEND, |_| IBV_WR_SEND_WITH_INV);
                request.imm_data = old_key.unwrap_or(0);
            }
            Operation::Write(message) => {
                ledger::fill(bytes, self.side, place, message, Note::default());
                request.opcode = IBV_WR_RDMA_WRITE;
                request.wr.rdma = self.remote(pair, number);
            }
            Operation::ReadBack(_) => {
                slot = Slot::ReadBack(pair);
                self.device.bytes(slot).fill(0);
                request.opcode = IBV_WR_RDMA_READ;
                request.wr.rdma = self.remote(pair, number);
            }
        }
        let mut piece = self.device.piece(slot);
        request.sg_list = &raw mut piece;
        self.device.post_send(pair, &mut request)
    }

    /// Returns the remote address and key of request `number` of the queue pair.
    fn remote(&mut self, pair: usize, number: u64) -> ibv_rdma {
        let used = self.pairs[pair].windows.as_mut().map(|own| &mut own.used);
        let through = used.and_then(|used| {
            used.used_by(number);
            used.current()
        });
        let (peer, place) = self.at_peer(pair);
        let (window, rkey) = through.unwrap_or((0, peer.key));
        ibv_rdma {
            remote_addr: Device::landing(peer, place, window),
            rkey,
        }
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
        let step = self.pairs[pair].under_way.pop_front();
        if step.is_none_or(|step| step.completes_as() != completion.opcode) {
            return Err(format!(
                "queue pair {pair}: request {number} completed as {}",
                completion.opcode
            ));
        }
        if let Some(Step::Regular(Operation::ReadBack(message))) = step {
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
        let note = ledger::check(message, 1 - self.side, place, number)?;
        // A received message must not be taken for a later one.
        message.fill(0xee);
        let one = &mut self.pairs[pair];
        if let Some(windows) = &mut one.windows {
            let told = Told::of(note.more);
            windows
                .used
                .hear(told.key)
                .and_then(|()| windows.hear(&self.device, told.adopted, completion))
                .map_err(|error| format!("queue pair {pair}: {error}"))?;
        }
        one.received += 1;
        one.last_received |= note.last;
        // The end of one side is the end of the other.
        self.ending |= note.last;
        self.receives
            .post(&self.device, pair, completion.wr_id)
            .map_err(|error| error.to_string())
    }
}

/// Mask of a request's number in a work-request id; the queue pair is above.
pub(crate) const NUMBER: u64 = (1 << 48) - 1;

pub(crate) fn wr_id(pair: usize, number: u64) -> u64 {
    (pair as u64 + 1) << 48 | number & NUMBER
}
