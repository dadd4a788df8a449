//! Packets from the guest's transmit ring.

use godwit_vhost::rings::chain::Chain;

use crate::device::queues::features::VERSION_1;
use crate::device::queues::receive::Buffers;
use crate::device::queues::ring::{Broken, Guest, NetRing};
use crate::device::uplink::Uplink;
use crate::frame::packet::{HEADER, LARGEST, SHORT_HEADER, SMALLEST, TELLS_SENDER};
use crate::state::nic::Nic;

/// Packets taken in one turn.
const TURN: usize = 256;

/// Returns the header's size in bytes for a driver with these features.
pub(in crate::device) const fn header_bytes(features: u64) -> usize {
    if features & (VERSION_1 | super::features::MERGEABLE) != 0 {
        HEADER
    } else {
        SHORT_HEADER
    }
}

/// Addresses of a packet's pieces in this process.
struct Places(Vec<libc::iovec>);

// SAFETY: only the thread that has just found the addresses uses them, for the packet that it sends.
unsafe impl Send for Places {}

/// Scratch space that is reused for each packet.
pub(in crate::device) struct Space {
    pub(in crate::device) chain: Chain,
    pub(in crate::device) packet: Box<[u8]>,
    pub(in crate::device) buffers: Buffers,
    places: Places,
}

impl Space {
    pub(in crate::device) fn new() -> Self {
        Self {
            chain: Chain::default(),
            packet: vec![0; LARGEST].into(),
            buffers: Buffers::default(),
            places: Places(Vec::new()),
        }
    }
}

#[derive(Clone, Copy)]
pub(in crate::device) struct Way<'a> {
    pub(in crate::device) uplink: &'a Uplink,
    pub(in crate::device) queue: usize,
}

/// Takes the guest's packets, as far as the mode and the gate allow: they leave, or wait in the gate. Without `way`, packets are dropped. Returns true if
/// more may be left for another turn.
pub(in crate::device) fn transmit(
    ring: &mut NetRing,
    guest: Guest<'_>,
    nic: &mut Nic,
    way: Option<Way<'_>>,
    space: &mut Space,
) -> Result<bool, Broken> {
    let memory = guest.ram.memory();
    for _ in 0..TURN {
        if !nic.may_transmit() {
            return Ok(false);
        }
        if !nic.gate().has_room() {
            ring.ignore_waiting(guest)?;
            return Ok(false);
        }
        let Some(taken) = ring.take(guest, &mut space.chain)? else {
            if ring.rest(guest)? {
                continue;
            }
            return Ok(false);
        };
        ring.split.ignore(memory, guest.log)?;
        match way {
            Some(way) => send(guest, nic, way, space)?,
            None => nic.refused(),
        }
        ring.answer(taken, 0);
    }
    Ok(true)
}

fn send(guest: Guest<'_>, nic: &mut Nic, way: Way<'_>, space: &mut Space) -> Result<(), Broken> {
    let Way { uplink, queue } = way;
    let segments = &space.chain.readable;
    let total: u64 = segments
        .iter()
        .map(|segment| u64::from(segment.length))
        .sum();
    let header = header_bytes(guest.features);
    let fits = (SMALLEST - HEADER + header..=LARGEST - HEADER + header).contains(&(total as usize));
    if space.chain.malformed || !space.chain.writable.is_empty() || !fits {
        nic.refused();
        return Ok(());
    }
    let total = total as usize;
    // Packets that wait, packets in memory that may still be lost, packets with a short header, and packets with more
    // pieces than the kernel takes at once are copied. All other packets are sent in place.
    let waits = nic.gate().holds();
    let mut copies = waits || header != HEADER || guest.ram.arrival().is_under_way();
    let Places(places) = &mut space.places;
    if !copies {
        places.clear();
        if !guest.ram.locate(segments, places) {
            return Err(Broken::Buffer);
        }
        copies = places.len() > Uplink::MOST_PLACES;
    }
    let known = if copies {
        total
    } else {
        total.min(header + TELLS_SENDER)
    };
    let copy = &mut space.packet[HEADER - header..HEADER - header + known];
    if !guest.ram.gather(segments, copy) {
        return Err(Broken::Buffer);
    }
    if guest.ram.is_lost() {
        return Ok(());
    }
    if copies && header != HEADER {
        // The driver's short header was read to an offset; the header moves to the front.
        space.packet.copy_within(HEADER - header..HEADER, 0);
        space.packet[SHORT_HEADER..HEADER].fill(0);
    }
    if waits {
        let packet = &space.packet[..HEADER - header + total];
        nic.gate_mut().keep(queue, packet.into());
        return Ok(());
    }
    let sent = if copies {
        uplink.write(queue, &space.packet[..HEADER - header + total])
    } else {
        // SAFETY: the places are in the guest's memory, which stays mapped as long as `guest` is borrowed.
        unsafe { uplink.write_from(queue, places) }
    };
    match sent {
        Ok(()) => {
            let end = (HEADER - header + known).min(HEADER + TELLS_SENDER);
            nic.sent(&space.packet[HEADER..end], total - header);
        }
        Err(error) => {
            if error.raw_os_error() == Some(libc::EFAULT) {
                guest.ram.lose_pages();
            }
            nic.refused();
        }
    }
    Ok(())
}
