//! What the rest of the process asks of a NIC's thread.

use std::io;
use std::net::IpAddr;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use godwit_vhost::protocol::device::{Device, FrontEndReply};
use godwit_vhost::protocol::session::FrontEndCommand;

use crate::clone::State;
use crate::device::queues::features;
use crate::device::uplink::Uplink;
use crate::device::wake::Wake;
use crate::device::worker::Worker;
use crate::mac::Mac;
use crate::state::counters::Counters;
use crate::state::held::{MOST_BYTES, MOST_PACKETS, Packet};
use crate::state::nic::{Mode, Nic, RestoreError};

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
    /// What happened.
    pub counters: Counters,
    /// Packets that wait for the guest.
    pub waiting: usize,
    /// Addresses that the guest used lately, the last first.
    pub addresses: Vec<IpAddr>,
}

/// What the thread and its handles share.
pub(super) struct Shared {
    pub(super) name: String,
    pub(super) wake: Wake,
    /// Late packets that the thread has not taken yet.
    pub(super) unread: Unread,
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
    /// Serves a NIC over an uplink. `name` is for logs.
    ///
    /// # Errors
    /// When the kernel refuses a thread or what it waits with.
    pub fn spawn(name: &str, nic: Nic, uplink: Uplink) -> io::Result<(Self, NetThread)> {
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
                counters: Counters::default(),
                waiting: 0,
                addresses: Vec::new(),
            }),
        });
        let worker = Worker::new(Arc::clone(&shared), inbox, nic, uplink)?;
        // Thread names hold 15 bytes.
        let thread_name = format!("net {name}").chars().take(15).collect();
        let thread = thread::Builder::new()
            .name(thread_name)
            .spawn(move || worker.run())?;
        Ok((Self { shared, commands }, NetThread(thread)))
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
        features::OFFERED
    }

    fn queues(&self) -> u64 {
        1
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
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::{UnixDatagram, UnixStream};
    use std::sync::mpsc;
    use std::thread::sleep;
    use std::time::Instant;

    use godwit_vhost::protocol::session::RingSetup;

    use super::*;
    use crate::device::queues::features::{MERGEABLE, VERSION_1};
    use crate::device::session::RECEIVE;
    use crate::device::test_guest::TestGuest;
    use crate::frame::announce::{Token, rarp};
    use crate::frame::packet::{HEADER, SMALLEST};
    use crate::state::pace::MOST_AHEAD;

    const MAC: Mac = Mac([2, 0, 0, 0, 0, 1]);
    /// Longer than the first time after which a place is announced again.
    const WHILE: Duration = Duration::from_millis(120);

    /// The answer to a question.
    fn ask<T: Send + 'static>(question: impl FnOnce(Reply<T>)) -> T {
        let (reply, answer) = mpsc::channel();
        question(Box::new(move |answered| {
            let _ = reply.send(answered);
        }));
        let answer = answer.recv_timeout(Duration::from_secs(10));
        answer.expect("the thread answers")
    }

    /// Announcements that leave within a while.
    fn announced(network: &UnixDatagram) -> usize {
        network.set_read_timeout(Some(WHILE)).expect("a limit");
        let mut packet = [0; 2048];
        let mut count = 0;
        while let Ok(length) = network.recv(&mut packet) {
            let frame = &packet[HEADER..length];
            assert_eq!(frame[..42], rarp(MAC, Token::default())[..42]);
            count += 1;
        }
        count
    }

    /// Packets that wait for the guest when it runs, and buffers of its ring.
    const BURST: u16 = 200;
    const SIZE: u16 = 256;

    /// A NIC that has a burst for a guest which has just been attached.
    struct Burst {
        nic: NetDevice,
        thread: NetThread,
        guest: TestGuest,
        kick: Wake,
        _network: UnixDatagram,
        _front_end: UnixStream,
    }

    impl Burst {
        fn new() -> Self {
            let (uplink, network) = UnixDatagram::pair().expect("a pair");
            uplink.set_nonblocking(true).expect("does not block");
            let uplink = Uplink::from_packets(uplink.into());
            let (nic, thread) = NetDevice::spawn("web/0", Nic::new(MAC), uplink).expect("a thread");
            ask(|reply| nic.freeze(reply));
            for _ in 0..BURST {
                network.send(&[7; SMALLEST]).expect("is taken");
            }
            let all_wait = || nic.snapshot().waiting == usize::from(BURST);
            assert!(within(Duration::from_secs(10), all_wait));
            let guest = TestGuest::new(SIZE);
            guest.offer(SIZE);
            let (socket, front_end) = UnixStream::pair().expect("a pair");
            let kick = Wake::new().expect("a counter");
            let setup = Box::new(RingSetup {
                layout: guest.layout(),
                base: 0,
                event_index: true,
                enabled: true,
                log: None,
                inflight: None,
                kick: kick.as_fd().try_clone_to_owned().expect("another"),
                call: None,
                error: None,
            });
            for command in [
                FrontEndCommand::Attach { socket },
                FrontEndCommand::Features {
                    features: VERSION_1 | MERGEABLE,
                },
                FrontEndCommand::Memory {
                    ram: guest.ram.clone(),
                },
                FrontEndCommand::Start {
                    ring: RECEIVE as u16,
                    setup,
                },
            ] {
                let answer = ask(|reply| nic.front_end(command, reply));
                answer.expect("is done");
            }
            nic.release();
            Self {
                nic,
                thread,
                guest,
                kick,
                _network: network,
                _front_end: front_end,
            }
        }

        /// The guest gets so many buffers, and within a while no more.
        fn gets(&self, count: u16) {
            within(Duration::from_secs(10), || self.guest.used() >= count);
            sleep(WHILE);
            assert_eq!(self.guest.used(), count);
        }

        fn end(self) {
            self.nic.end();
            assert!(self.thread.join_within(Duration::from_secs(10)));
        }
    }

    /// Whether it becomes so.
    fn within(limit: Duration, mut is_so: impl FnMut() -> bool) -> bool {
        let began = Instant::now();
        while !is_so() {
            if began.elapsed() > limit {
                return false;
            }
            sleep(Duration::from_millis(1));
        }
        true
    }

    #[test]
    fn a_burst_reaches_the_guest_at_the_pace_at_which_it_comes_to_it() {
        let burst = Burst::new();
        let most = MOST_AHEAD as u16;
        burst.gets(most);
        for again in [1, 10] {
            burst.guest.offer(SIZE + again);
            burst.kick.signal();
            burst.gets(most + again);
        }
        burst.end();
    }

    #[test]
    fn a_guest_that_offers_its_buffers_again_late_waits_no_longer_than_it_takes_to_come_to_all() {
        let burst = Burst::new();
        let most = MOST_AHEAD as u16;
        burst.gets(most);
        burst.guest.came_to(most - 1);
        burst.gets(most);
        burst.guest.came_to(most);
        let gets_all = || burst.guest.used() == BURST;
        assert!(within(Duration::from_millis(300), gets_all));
        burst.end();
    }

    #[test]
    fn late_packets_for_a_thread_that_does_not_take_them_are_bounded() {
        let unread = Unread::default();
        let packets = vec![Packet::from([0; 100]); MOST_PACKETS];
        assert_eq!(unread.add(&packets[..10]), 10);
        assert_eq!(unread.add(&packets), MOST_PACKETS - 10);
        assert_eq!(unread.add(&packets[..1]), 0);
        unread.remove(&packets[..3]);
        assert_eq!(unread.add(&packets[..10]), 3);
        unread.remove(&packets);
        let large = Packet::from(vec![0; MOST_BYTES]);
        assert_eq!(unread.add(&[large.clone(), large]), 1);
    }

    #[test]
    fn a_machine_that_moves_on_is_announced_here_no_more_unless_it_stays() {
        let (uplink, network) = UnixDatagram::pair().expect("a pair");
        uplink.set_nonblocking(true).expect("does not block");
        let uplink = Uplink::from_packets(uplink.into());
        let (nic, thread) =
            NetDevice::spawn("web/0", Nic::arriving(MAC), uplink).expect("a thread");
        ask(|reply| nic.take_over(false, reply));
        ask(|reply| nic.freeze(reply));
        assert_eq!(announced(&network), 1, "the first alone");
        nic.release();
        assert!(announced(&network) > 0, "the machine stays after all");
        nic.end();
        assert!(thread.join_within(Duration::from_secs(10)));
    }
}
