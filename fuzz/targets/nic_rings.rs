//! A guest that lays out anything in the rings of its NIC: descriptors, tables of them, and what it says to have offered.
//! The NIC's thread goes on, nothing leaves that is no packet, and the next guest is served.

#![no_main]

use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::sync::mpsc::channel;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use godwit_net::device::handle::NetDevice;
use godwit_net::device::uplink::Uplink;
use godwit_net::frame::packet::{LARGEST, SMALLEST};
use godwit_net::mac::Mac;
use godwit_net::state::nic::Nic;
use godwit_vhost::memory::GuestRam;
use godwit_vhost::protocol::device::Device;
use godwit_vhost::protocol::session::{FrontEndCommand, FrontEndError, RingSetup};
use godwit_vhost::rings::split::RingLayout;
use libfuzzer_sys::fuzz_target;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, memfd_create};
use vhost::vhost_user::message::VhostUserMemoryRegion;
use vm_memory::{Bytes, GuestAddress};

/// Bytes of the guest's memory; the rings lie at its start, which is what is fuzzed.
const MEMORY: u64 = 0x10000;
/// Descriptors of each ring.
const SIZE: u16 = 16;
/// How far apart the rings are.
const RING: u64 = 0x200;
/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(4);
/// The features that a driver may take here: version 1, mergeable buffers, checksums, an event index.
const FEATURES: [u64; 4] = [1 << 32, 1 << 15, 1 << 1, 1 << 29];

/// Pairs of queues.
const PAIRS: u16 = 2;
/// Their rings.
const RINGS: u16 = 2 * PAIRS;

struct Bed {
    device: NetDevice,
    networks: Vec<UnixDatagram>,
}

static BED: LazyLock<Bed> = LazyLock::new(|| {
    let pair = |_| {
        let (queue, network) = UnixDatagram::pair().expect("sockets");
        for socket in [&queue, &network] {
            socket.set_nonblocking(true).expect("does not block");
        }
        (OwnedFd::from(queue), network)
    };
    let (queues, networks): (Vec<OwnedFd>, _) = (0..PAIRS).map(pair).unzip();
    let uplink = Uplink::from_packets(queues);
    let nic = Nic::new(Mac([2, 0, 0, 0, 0, 1]));
    let (device, _) = NetDevice::spawn("fuzz", nic, uplink).expect("a thread");
    Bed { device, networks }
});

impl Bed {
    /// A step of the protocol, once it has taken effect.
    fn step(&self, command: FrontEndCommand) -> Result<u16, FrontEndError> {
        let (reply, answer) = channel();
        self.device.front_end(
            command,
            Box::new(move |answered| {
                let _ = reply.send(answered);
            }),
        );
        answer
            .recv_timeout(PATIENCE)
            .expect("the NIC's thread goes on")
    }

    /// What has left makes sense.
    fn check_sent(&self) {
        let mut packet = vec![0; LARGEST + 1];
        for network in &self.networks {
            loop {
                match network.recv(&mut packet) {
                    Ok(length) => assert!((SMALLEST..=LARGEST).contains(&length), "{length}"),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(error) => panic!("{error}"),
                }
            }
        }
    }
}

fn ram(content: &[u8]) -> GuestRam {
    let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).expect("a file"));
    file.set_len(MEMORY).expect("a size");
    let region = VhostUserMemoryRegion::new(0, MEMORY, 0, 0);
    let ram = GuestRam::new(&[region], vec![file], Arc::default()).expect("maps");
    let content = &content[..content.len().min(MEMORY as usize)];
    ram.memory()
        .write_slice(content, GuestAddress(0))
        .expect("memory");
    ram
}

fn setup(ring: u64, base: u16, event_index: bool) -> Box<RingSetup> {
    let kick = eventfd(1, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("a counter");
    Box::new(RingSetup {
        layout: RingLayout {
            size: SIZE,
            descriptors: GuestAddress(ring),
            available: GuestAddress(ring + 0x100),
            used: GuestAddress(ring + 0x140),
        },
        base,
        event_index,
        enabled: true,
        log: None,
        inflight: None,
        kick,
        call: None,
        error: None,
    })
}

fuzz_target!(|data: &[u8]| {
    let Some((&[taken, packets, length, base], content)) = data.split_first_chunk() else {
        return;
    };
    let bed = &*BED;
    let (socket, _theirs) = UnixStream::pair().expect("sockets");
    bed.step(FrontEndCommand::Attach { socket })
        .expect("nobody else is attached");
    let offered = FEATURES.iter().enumerate();
    let features = offered.filter(|(place, _)| taken & (1 << place) != 0);
    let features = features.map(|(_, feature)| feature).sum();
    let _ = bed.step(FrontEndCommand::Features { features });
    let ram = Arc::new(ram(content));
    let _ = bed.step(FrontEndCommand::Memory { ram });
    for ring in 0..RINGS {
        let setup = setup(u64::from(ring) * RING, u16::from(base), taken & 8 != 0);
        let _ = bed.step(FrontEndCommand::Start { ring, setup });
    }
    let packet = vec![7; SMALLEST + usize::from(length) * 16];
    for number in 0..usize::from(packets % 8) {
        // The NIC may leave them where they are until the socket takes no more.
        let _ = bed.networks[number % 2].send(&packet);
    }
    for _ in 0..3 {
        // Between two answers the thread looks at each ring.
        let _ = bed.step(FrontEndCommand::Enable {
            ring: 0,
            enabled: true,
        });
    }
    // A driver that uses a pair no more, or uses it again.
    for enabled in [packets & 16 == 0, packets & 32 == 0] {
        let _ = bed.step(FrontEndCommand::Enable { ring: 2, enabled });
    }
    for ring in 0..RINGS {
        let _ = bed.step(FrontEndCommand::Stop { ring });
    }
    bed.step(FrontEndCommand::Detach).expect("leaves");
    bed.check_sent();
});
