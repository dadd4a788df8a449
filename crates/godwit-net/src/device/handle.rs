//! What the rest of the process asks of a NIC's thread.

use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

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

/// Gets an answer of the thread; dropped without one when the thread has ended.
pub type Reply<T> = Box<dyn FnOnce(T) + Send>;

/// What came to a machine's former place since it was last asked.
#[derive(Debug)]
pub struct LatePackets {
    /// The packets, in order.
    pub packets: Vec<Packet>,
    /// The network brings nothing more there.
    pub is_all: bool,
}

/// What the thread is told.
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
    End,
}

/// A NIC as others see it.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Its address.
    pub mac: Mac,
    /// What it does.
    pub mode: Mode,
    /// A virtual machine is attached.
    pub attached: bool,
    /// The guest put something into a ring that makes no sense; the ring rests until the guest resets the device.
    pub broken: bool,
    /// True if the virtual machine was disconnected because [memory that it shared was lost](godwit_vhost::memory::LOST_PAGES),
    /// and none has shared any since.
    pub lost_pages: bool,
    /// What happened.
    pub counters: Counters,
    /// Packets that wait for the guest.
    pub waiting: usize,
    /// As which stations the guest sent lately, the last first.
    pub stations: Vec<Station>,
    /// Its pairs of queues.
    pub queues: Vec<QueueSeen>,
}

/// A pair of queues as others see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueSeen {
    /// The guest uses it now.
    pub is_used: bool,
    /// Packets that the guest got by it since this thread serves the NIC.
    pub received_packets: u64,
    /// Packets that the guest sent by it since then, those that were refused among them.
    pub sent_packets: u64,
}

/// What the thread and its handles share.
pub(super) struct Shared {
    pub(super) name: String,
    pub(super) wake: Wake,
    /// Late packets that the thread has not taken yet.
    pub(super) unread: Unread,
    /// Pairs of queues.
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

/// How many packets are on their way to the thread, and how many bytes. No more than the thread itself would hold may
/// be, however slow it is.
#[derive(Debug, Default)]
pub(super) struct Unread(Mutex<(usize, usize)>);

impl Unread {
    /// Room for as many packets from the first on as fit.
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

    /// The thread has taken these.
    pub(super) fn remove(&self, packets: &[Packet]) {
        let bytes: usize = packets.iter().map(|packet| packet.len()).sum();
        let mut unread = self.lock();
        *unread = (unread.0 - packets.len(), unread.1 - bytes);
    }

    fn lock(&self) -> MutexGuard<'_, (usize, usize)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A NIC that a thread serves. It ends when [`NetDevice::end`] is called.
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
    /// Waits until the thread has ended and its uplink is closed, but not longer than this.
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
    /// Serves a NIC over an uplink, with a pair of queues for each of its queues: 1 to [`MOST_PAIRS`]. `name` is for logs.
    ///
    /// # Errors
    /// When there are too many or none, or the kernel refuses a thread or what it waits with.
    pub fn spawn(name: &str, nic: Nic, uplink: Uplink) -> io::Result<(Self, NetThread)> {
        let (device, worker) = Self::with_worker(name, nic, uplink)?;
        // Thread names hold 15 bytes.
        let thread_name = format!("net {name}").chars().take(15).collect();
        let thread = thread::Builder::new()
            .name(thread_name)
            .spawn(move || worker.run())?;
        Ok((device, NetThread(thread)))
    }

    /// The NIC with what its thread runs.
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
                stations: Vec::new(),
                queues: Vec::new(),
            }),
            pairs: uplink.count() as u16,
        });
        let worker = Worker::new(Arc::clone(&shared), inbox, nic, uplink)?;
        Ok((Self { shared, commands }, worker))
    }

    /// How it is now.
    pub fn snapshot(&self) -> Snapshot {
        self.shared.lock().clone()
    }

    /// Source, once the guest stands still: holds packets back from now on, and tells the whole state with what is
    /// held already.
    pub fn freeze(&self, reply: Reply<State>) {
        self.tell(Command::Freeze(reply));
    }

    /// Source, when the machine stays: everything that was held goes to the guest in order, and packets pass again.
    pub fn release(&self) {
        self.tell(Command::Release);
    }

    /// Source, once the machine is the other node's: what came here since this, or [`Self::freeze`], was last asked.
    pub fn copy_late(&self, reply: Reply<LatePackets>) {
        self.tell(Command::CopyLate(reply));
    }

    /// Destination: becomes what the source's NIC was.
    pub fn restore(&self, state: State, reply: Reply<Result<(), RestoreError>>) {
        self.tell(Command::Restore(Box::new(state), reply));
    }

    /// Destination, once the machine is this node's: announces it, and packets pass. The answer comes when the
    /// announcements have left, before which the guest should not run. `awaits_late` is whether
    /// [`Self::late_ended`] will be called; it is not waited for very long.
    pub fn take_over(&self, awaits_late: bool, reply: Reply<()>) {
        self.tell(Command::TakeOver { awaits_late, reply });
    }

    /// Destination: packets that came to the former place. Those that the thread has no room for are lost, and counted.
    pub fn late(&self, mut packets: Vec<Packet>) {
        let fit = self.shared.unread.add(&packets);
        let lost = (packets.len() - fit) as u64;
        packets.truncate(fit);
        self.tell(Command::Late { packets, lost });
    }

    /// Destination: nothing more comes from the former place.
    pub fn late_ended(&self) {
        self.tell(Command::LateEnded);
    }

    /// Its packets go another way from now on. The uplink has as many queues as the one before.
    pub fn replace_uplink(&self, uplink: Uplink) {
        self.tell(Command::Uplink(uplink));
    }

    /// Ends the thread.
    pub fn end(&self) {
        self.tell(Command::End);
    }

    fn tell(&self, command: Command) {
        // A thread that has ended drops the command, and whoever waits for its answer learns of it.
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
        // The front end itself tells the guest the MAC address and the link's state.
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
