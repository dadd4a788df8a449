//! Datagrams until the end. Each has a number and acknowledges the datagrams from the other side. No side thus sends
//! more than the other can receive, and the next datagram to arrive reveals a loss.

use std::io;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use godwit_verbs::abi::*;

use super::Arguments;
use super::content::ledger::{self, AtMostOnce, InOrder, Note, Window};
use super::device::{DATAGRAM_KEY, Device, SENDS, Slot};
use super::exchange::meet_all;
use super::receives::Receives;
use super::rounds::{self, Load};
use super::traffic::{BATCH, NUMBER, wr_id};

/// Longest wait for an event: the datagram behind the event may be lost.
const PATIENCE: Duration = Duration::from_millis(50);

struct Datagrams {
    device: Device,
    /// 0 for the server, 1 for the client.
    side: u8,
    pairs: Vec<Pair>,
    receives: Receives,
    ending: bool,
    /// File during whose existence datagrams may be lost.
    losses_while: PathBuf,
}

struct Pair {
    /// Address of the peer's queue pair.
    to: ibv_ud,
    /// Place among the queue pairs of the same peer.
    place: usize,
    sent: InOrder,
    window: Window,
    came: AtMostOnce,
    received: u64,
    last_sent: bool,
    last_received: bool,
}

/// Talks with the peer until the end; returns a summary of the checks.
pub(crate) fn run(arguments: &Arguments) -> io::Result<String> {
    let device = Device::open(arguments)?;
    let (mut connections, mut pairs) = (Vec::new(), Vec::new());
    for met in meet_all(arguments, &device)? {
        let handle = device.open_to(met.share, &met.reach)?;
        let numbers = met.reach.pairs.iter().enumerate();
        pairs.extend(numbers.map(|(place, number)| Pair {
            to: ibv_ud {
                ah: handle,
                remote_qpn: *number,
                remote_qkey: DATAGRAM_KEY,
            },
            place,
            sent: InOrder::default(),
            window: Window::default(),
            came: AtMostOnce::default(),
            received: 0,
            last_sent: false,
            last_received: false,
        }));
        connections.push(met.connection);
    }
    let mut datagrams = Datagrams {
        receives: Receives::fill(&device)?,
        device,
        side: u8::from(arguments.server.is_some()),
        pairs,
        ending: false,
        losses_while: arguments.losses_while.clone(),
    };
    rounds::work(&mut datagrams, &mut connections, &arguments.until)?;
    let total = |count: fn(&Pair) -> u64| datagrams.pairs.iter().map(count).sum::<u64>();
    Ok(format!(
        "{} datagrams sent and {} received on {} queue pairs, each once and whole; {} on their way here were lost, when they might be",
        total(|pair| pair.sent.completed()),
        total(|pair| pair.received),
        datagrams.pairs.len(),
        total(|pair| pair.came.missing()),
    ))
}

/// Returns the time since 1970: hosts differ less in this time than in their uptime.
fn now() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}

impl Load for Datagrams {
    fn pairs(&self) -> usize {
        self.pairs.len()
    }

    fn is_over(&self) -> bool {
        self.pairs
            .iter()
            .all(|pair| pair.last_sent && pair.last_received && pair.sent.outstanding() == 0)
    }

    fn end(&mut self) {
        self.ending = true;
    }

    /// Sends as much as the peer can receive.
    fn send(&mut self, pair: usize) -> io::Result<()> {
        let now = now();
        loop {
            let one = &mut self.pairs[pair];
            let number = one.sent.posted();
            if one.last_sent
                || one.sent.outstanding() == SENDS
                || !one.window.allows(number, SENDS, now)
            {
                return Ok(());
            }
            one.sent.post();
            one.last_sent = self.ending;
            let note = Note {
                last: self.ending,
                more: one.came.next(),
            };
            let slot = Slot::Send(pair, number);
            ledger::fill(self.device.bytes(slot), self.side, one.place, number, note);
            // SAFETY: integers, null pointers and a union of both.
            let mut request: ibv_send_wr = unsafe { std::mem::zeroed() };
            let mut piece = self.device.piece(slot);
            request.wr_id = wr_id(pair, number);
            request.opcode = IBV_WR_SEND;
            request.send_flags = IBV_SEND_SIGNALED;
            (request.sg_list, request.num_sge) = (&raw mut piece, 1);
            request.wr.ud = one.to;
            self.device.post_send(pair, &mut request)?;
        }
    }

    fn take_completions(&mut self) -> io::Result<()> {
        let mut completions = [ibv_wc::default(); BATCH];
        for completion in self.device.take(&mut completions, Some(PATIENCE))? {
            self.check(completion).map_err(io::Error::other)?;
        }
        Ok(())
    }
}

impl Datagrams {
    fn check(&mut self, completion: &ibv_wc) -> Result<(), String> {
        let pair = self.device.succeeded(completion)?;
        if completion.opcode & IBV_WC_RECV != 0 {
            return self.check_received(pair, completion);
        }
        let number = completion.wr_id & NUMBER;
        if completion.wr_id != wr_id(pair, number) {
            return Err(format!(
                "queue pair {pair} has a completion of request {:#x}",
                completion.wr_id
            ));
        }
        self.pairs[pair]
            .sent
            .complete(number)
            .map_err(|error| format!("queue pair {pair}: {error}"))
    }

    fn check_received(&mut self, pair: usize, completion: &ibv_wc) -> Result<(), String> {
        let in_words = |error: String| format!("queue pair {pair}: {error}");
        let slot = self.receives.complete(pair, completion.wr_id)?;
        let message = self.device.received(slot);
        let one = &mut self.pairs[pair];
        let number = ledger::number_of(message);
        let note = ledger::check(message, 1 - self.side, one.place, number)?;
        // A received message must not be taken for a later datagram.
        message.fill(0xee);
        let lost = one.came.arrive(number).map_err(in_words)?;
        if !lost.is_empty() && !self.losses_while.exists() {
            return Err(format!(
                "queue pair {pair}: datagrams {} to {} were lost while nothing moved",
                lost.start,
                lost.end - 1
            ));
        }
        let sent = one.sent.posted();
        one.window.hear(note.more, sent, now()).map_err(in_words)?;
        one.received += 1;
        one.last_received |= note.last;
        // The end of one side is the end of the other.
        self.ending |= note.last;
        self.receives
            .post(&self.device, pair, completion.wr_id)
            .map_err(|error| error.to_string())
    }
}
