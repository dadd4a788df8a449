//! The handle through which the rest of the process commands a NIC's thread.

use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use godwit_vhost::memory::written::WrittenPages;
use godwit_vhost::protocol::device::{Device, FrontEndReply};
use godwit_vhost::protocol::session::FrontEndCommand;

use crate::clone::{MOST_PAIRS, State};
use crate::device::queues::features;
use crate::device::uplink::Uplink;
use crate::device::wake::Wake;
use crate::device::worker::Worker;
use crate::mac::Mac;
use crate::state::counters::Counters;
use crate::state::held::{MOST_BYTES, MOST_PACKETS, Packet};
use crate::state::nic::{Mode, Nic, RestoreError};
use crate::state::stations::Station;

/// Receives the thread's answer; dropped without a call if the thread has ended.
pub type Reply<T> = Box<dyn FnOnce(T) + Send>;

/// Packets at the source since the last request for late packets.
#[derive(Debug)]
pub struct LatePackets {
    /// The packets, in order.
    pub packets: Vec<Packet>,
    /// True if the network brings no more packets for the VM to the source.
    pub is_all: bool,
}

/// A request to the thread.
pub(super) enum Command {
    FrontEnd(FrontEndCommand, FrontEndReply),
    Freeze(Reply<State>),
    Release,
    CopyLate(Reply<LatePackets>),
    Restore(Box<State>, Reply<Result<(), RestoreError>>),
    TakeOver { awaits_late: bool, reply: Reply<()> },
    Late { packets: Vec<Packet>, lost: u64 },
    LateEnded,
    Uplink(Uplink),
    LogWrites(Option<Arc<WrittenPages>>, Reply<()>),
    Hold(Hold),
    End,
}

/// A request about packets that wait for a checkpoint.
pub(super) enum Hold {
    Begin(Reply<()>),
    EndEpoch(u64, Reply<()>),
    Release(u64),
    End(Reply<()>),
}

/// The status of a NIC, for callers outside the thread.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// MAC address of the NIC.
    pub mac: Mac,
    /// Current mode of the NIC.
    pub mode: Mode,
    /// True while a VM is attached.
    pub attached: bool,
    /// True if a ring is out of service because the guest put invalid entries into the ring. The ring stays so until
    /// the guest resets the device.
    pub broken: bool,
    /// True if the VM was disconnected because [memory that it shared was lost](godwit_vhost::memory::LOST_PAGES), and
    /// no VM has shared memory since.
    pub lost_pages: bool,
    /// Counters since the VM was started.
    pub counters: Counters,
    /// Number of packets waiting for the guest.
    pub waiting: usize,
    /// Number of packets of the guest that wait for a checkpoint; `None` unless [`NetDevice::hold_back`] was called.
    pub held_back: Option<usize>,
    /// Stations from which the guest sent lately, the most recent first.
    pub stations: Vec<Station>,
    /// Status of each queue pair.
    pub queues: Vec<QueueSeen>,
}

/// The status of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueSeen {
    /// True while the guest uses the pair.
    pub is_used: bool,
    /// Packets received by the guest through the pair since this thread serves the NIC.
    pub received_packets: u64,
    /// Packets sent by the guest through the pair since this thread serves the NIC, including refused packets.
    pub sent_packets: u64,
}

/// State shared by the thread and the handles.
pub(super) struct Shared {
    pub(super) name: String,
    pub(super) wake: Wake,
    /// Late packets that the thread has not taken yet.
    pub(super) unread: Unread,
    /// Number of queue pairs.
    pairs: u16,
    snapshot: Mutex<Snapshot>,
}

impl Shared {
    pub(super) fn publish(&self, change: impl FnOnce(&mut Snapshot)) {
        change(&mut self.lock());
    }

    fn lock(&self) -> MutexGuard<'_, Snapshot> {
        self.snapshot.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Number and bytes of packets on their way to the thread. The limits are the limits of the thread's own held packets,
/// so that a slow thread cannot make the queue grow without bound.
#[derive(Debug, Default)]
pub(super) struct Unread(Mutex<(usize, usize)>);

impl Unread {
    /// Reserves room for as many leading packets as fit, and returns their number.
    fn add(&self, packets: &[Packet]) -> usize {
        let mut unread = self.lock();
        for (place, packet) in packets.iter().enumerate() {
            let (count, bytes) = *unread;
            if count >= MOST_PACKETS || bytes + packet.len() > MOST_BYTES {
                return place;
            }
            *unread = (count + 1, bytes + packet.len());
        }
        packets.len()
    }

    /// Gives back the room of packets that the thread has taken.
    pub(super) fn remove(&self, packets: &[Packet]) {
        let bytes: usize = packets.iter().map(|packet| packet.len()).sum();
        let mut unread = self.lock();
        *unread = (unread.0 - packets.len(), unread.1 - bytes);
    }

    fn lock(&self) -> MutexGuard<'_, (usize, usize)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A NIC that a thread serves until [`NetDevice::end`] is called.
#[derive(Clone)]
pub struct NetDevice {
    shared: Arc<Shared>,
    commands: Sender<Command>,
}

impl std::fmt::Debug for NetDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NetDevice")
            .field("name", &self.shared.name)
            .finish_non_exhaustive()
    }
}

/// The thread of a NIC.
#[derive(Debug)]
pub struct NetThread(JoinHandle<()>);

impl NetThread {
    /// Waits until the thread has ended and its uplink is closed. Returns false if `limit` passes first, or if the
    /// thread panicked.
    pub fn join_within(self, limit: Duration) -> bool {
        let step = Duration::from_millis(1);
        let mut waited = Duration::ZERO;
        while !self.0.is_finished() {
            if waited >= limit {
                return false;
            }
            thread::sleep(step);
            waited += step;
        }
        self.0.join().is_ok()
    }
}

impl NetDevice {
    /// Serves a NIC with one queue pair for each queue of the uplink, 1 to [`MOST_PAIRS`]. `name` is for logs.
    ///
    /// # Errors
    /// If the number of queues is out of range, or the kernel refuses a thread, an eventfd or an epoll instance.
    pub fn spawn(name: &str, nic: Nic, uplink: Uplink) -> io::Result<(Self, NetThread)> {
        let (device, worker) = Self::with_worker(name, nic, uplink)?;
        // Thread names hold 15 bytes.
        let thread_name = format!("net {name}").chars().take(15).collect();
        let thread = thread::Builder::new()
            .name(thread_name)
            .spawn(move || worker.run())?;
        Ok((device, NetThread(thread)))
    }

    /// Builds the NIC and the worker of its thread.
    pub(super) fn with_worker(name: &str, nic: Nic, uplink: Uplink) -> io::Result<(Self, Worker)> {
        if !(1..=MOST_PAIRS).contains(&uplink.count()) {
            let why = format!("a NIC has 1 to {MOST_PAIRS} pairs of queues");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        let (commands, inbox): (_, Receiver<Command>) = channel();
        let shared = Arc::new(Shared {
            name: name.to_owned(),
            wake: Wake::new()?,
            unread: Unread::default(),
            snapshot: Mutex::new(Snapshot {
                mac: nic.mac(),
                mode: nic.mode(),
                attached: false,
                broken: false,
                lost_pages: false,
                counters: Counters::default(),
                waiting: 0,
                held_back: None,
                stations: Vec::new(),
                queues: Vec::new(),
            }),
            pairs: uplink.count() as u16,
        });
        let worker = Worker::new(Arc::clone(&shared), inbox, nic, uplink)?;
        Ok((Self { shared, commands }, worker))
    }

    /// Returns the current status of the NIC.
    pub fn snapshot(&self) -> Snapshot {
        self.shared.lock().clone()
    }

    /// Source, once the guest is paused: starts to hold packets back, and replies with the complete state, including
    /// the packets held so far.
    pub fn freeze(&self, reply: Reply<State>) {
        self.tell(Command::Freeze(reply));
    }

    /// Source, if the VM stays: delivers all held packets in order, and lets packets pass again.
    pub fn release(&self) {
        self.tell(Command::Release);
    }

    /// Source, once the VM belongs to the destination: replies with the packets that came since the last request or
    /// since [`Self::freeze`].
    pub fn copy_late(&self, reply: Reply<LatePackets>) {
        self.tell(Command::CopyLate(reply));
    }

    /// Destination: takes over the state of the source's NIC.
    pub fn restore(&self, state: State, reply: Reply<Result<(), RestoreError>>) {
        self.tell(Command::Restore(Box::new(state), reply));
    }

    /// Destination, once the VM belongs to this node: announces the VM, and lets packets pass. The reply comes when the
    /// announcements have left; the guest should not run before. `awaits_late` is true if [`Self::late_ended`] will be
    /// called; the wait for that call is bounded.
    pub fn take_over(&self, awaits_late: bool, reply: Reply<()>) {
        self.tell(Command::TakeOver { awaits_late, reply });
    }

    /// Destination: adds packets that reached the source. Packets for which the thread has no room are lost and
    /// counted.
    pub fn late(&self, mut packets: Vec<Packet>) {
        let fit = self.shared.unread.add(&packets);
        let lost = (packets.len() - fit) as u64;
        packets.truncate(fit);
        self.tell(Command::Late { packets, lost });
    }

    /// Destination: declares that no more packets come from the source.
    pub fn late_ended(&self) {
        self.tell(Command::LateEnded);
    }

    /// Replaces the uplink. The new uplink must have as many queues as the old one.
    pub fn replace_uplink(&self, uplink: Uplink) {
        self.tell(Command::Uplink(uplink));
    }

    /// Logs the pages of guest memory that the thread writes, or stops logging. After the reply, every write is logged
    /// that had not ended before.
    pub fn log_writes(&self, pages: Option<Arc<WrittenPages>>, reply: Reply<()>) {
        self.tell(Command::LogWrites(pages, reply));
    }

    /// Protected machine: leaves the guest's packets in its rings until their checkpoint is acknowledged. Packets for the
    /// guest pass as before, and so do the announcements of the node. A second call begins a new series of checkpoints.
    pub fn hold_back(&self, reply: Reply<()>) {
        self.tell(Command::Hold(Hold::Begin(reply)));
    }

    /// Protected machine, after its stop for a checkpoint and before it goes on: the packets that the guest has offered
    /// belong to this checkpoint or to earlier ones. Numbers grow. A ring that did not stop has no packets in the
    /// checkpoint.
    pub fn end_checkpoint(&self, number: u64, reply: Reply<()>) {
        self.tell(Command::Hold(Hold::EndEpoch(number, reply)));
    }

    /// Protected machine, once a checkpoint is acknowledged: sends its packets and those of earlier checkpoints. The
    /// number of a checkpoint that has not ended releases nothing.
    pub fn release_checkpoint(&self, number: u64) {
        self.tell(Command::Hold(Hold::Release(number)));
    }

    /// Machine that goes on without a backup: sends all packets, now and from now on.
    pub fn stop_holding(&self, reply: Reply<()>) {
        self.tell(Command::Hold(Hold::End(reply)));
    }

    /// Ends the thread.
    pub fn end(&self) {
        self.tell(Command::End);
    }

    fn tell(&self, command: Command) {
        // An ended thread drops the command and its reply, which ends the caller's wait.
        if self.commands.send(command).is_ok() {
            self.shared.wake.signal();
        }
    }
}

impl Device for NetDevice {
    fn name(&self) -> &str {
        &self.shared.name
    }

    fn features(&self) -> u64 {
        match self.shared.pairs {
            1 => features::OFFERED,
            _ => features::OFFERED | features::SEVERAL_PAIRS,
        }
    }

    fn queues(&self) -> u64 {
        u64::from(self.shared.pairs)
    }

    fn announces(&self) -> bool {
        true
    }

    fn has_configuration(&self) -> bool {
        // QEMU, the front end, tells the guest the MAC address and the link state.
        false
    }

    fn configuration(&self, _: u32, _: u32) -> Option<Vec<u8>> {
        None
    }

    fn front_end(&self, command: FrontEndCommand, reply: FrontEndReply) {
        self.tell(Command::FrontEnd(command, reply));
    }
}

#[cfg(test)]
#[path = "handle_tests.rs"]
mod tests;
