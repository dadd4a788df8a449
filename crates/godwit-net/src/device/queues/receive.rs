//! Packets into the guest's receive ring.

use godwit_vhost::memory::Segment;
use godwit_vhost::rings::chain::Chain;

use crate::device::queues::features::MERGEABLE;
use crate::device::queues::ring::{Broken, Guest, NetRing, Taken};
use crate::device::queues::transmit::header_bytes;
use crate::frame::packet::{BUFFERS_AT, HEADER};

/// The outcome of giving a packet to the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::device) enum Given {
    /// The guest has the packet, in this many buffers.
    Taken(u16),
    /// The guest has offered too little room so far, and will notify of more.
    NoRoom,
    /// The packet is too large for any room that the guest can offer.
    TooLarge,
    /// Pages of the guest's memory are lost.
    Lost,
}

/// A buffer offered by the guest: the chain and the segments.
#[derive(Clone, Copy)]
struct Buffer {
    taken: Taken,
    /// Number of segments that belong to the buffer.
    segments: usize,
    bytes: usize,
}

/// Scratch space for the buffers of a packet, reused for the next packet.
#[derive(Default)]
pub(in crate::device) struct Buffers {
    chain: Chain,
    all: Vec<Buffer>,
    segments: Vec<Segment>,
    taken: Vec<Taken>,
    /// The packet with the short header.
    shortened: Vec<u8>,
}

/// Puts a packet into the guest's buffers, and writes their number into the packet's header.
pub(in crate::device) fn give(
    ring: &mut NetRing,
    guest: Guest<'_>,
    buffers: &mut Buffers,
    packet: &mut [u8],
) -> Result<Given, Broken> {
    let Buffers {
        chain,
        all,
        segments,
        taken,
        shortened,
    } = buffers;
    all.clear();
    segments.clear();
    let header = header_bytes(guest.features);
    let total = packet.len() - HEADER + header;
    let mergeable = guest.features & MERGEABLE != 0;
    let mut room = 0;
    while room < total {
        let most = usize::from(ring.split.layout().size);
        let full = all.len() == most || !mergeable && !all.is_empty();
        let next = match full {
            true => None,
            false => ring.take(guest, chain)?,
        };
        let Some(next) = next else {
            // The notification request comes before the buffers are put back, so the guest notifies of buffers after
            // these. In the other order, the ring would always seem to have more.
            if !full && ring.rest(guest)? {
                continue;
            }
            taken.clear();
            taken.extend(all.iter().map(|buffer| buffer.taken));
            ring.put_back(taken);
            return Ok(if full { Given::TooLarge } else { Given::NoRoom });
        };
        let bytes = chain
            .writable
            .iter()
            .map(|segment| segment.length as usize)
            .sum();
        room += bytes;
        segments.extend_from_slice(&chain.writable);
        all.push(Buffer {
            taken: next,
            segments: chain.writable.len(),
            bytes,
        });
    }
    ring.split.ignore(guest.ram.memory(), guest.log)?;
    let count = all.len() as u16;
    packet[BUFFERS_AT..HEADER].copy_from_slice(&count.to_le_bytes());
    let mut rest: &[u8] = if header == HEADER {
        packet
    } else {
        shortened.clear();
        shortened.extend_from_slice(&packet[..header]);
        shortened.extend_from_slice(&packet[HEADER..]);
        shortened
    };
    let mut places: &mut [Segment] = segments;
    for buffer in all {
        let (here, after) = rest.split_at(rest.len().min(buffer.bytes));
        rest = after;
        let (own, others) = places.split_at_mut(buffer.segments);
        places = others;
        let own = shorten(own, here.len());
        if !guest.ram.scatter(here, own) {
            return Err(Broken::Buffer);
        }
        guest.log.mark_all(own)?;
        ring.answer(buffer.taken, here.len() as u32);
    }
    if guest.ram.is_lost() {
        return Ok(Given::Lost);
    }
    Ok(Given::Taken(count))
}

/// Cuts the segments to this many bytes in all.
fn shorten(segments: &mut [Segment], mut bytes: usize) -> &[Segment] {
    let mut count = 0;
    for segment in segments.iter_mut() {
        if bytes == 0 {
            break;
        }
        segment.length = segment.length.min(bytes as u32);
        bytes -= segment.length as usize;
        count += 1;
    }
    &segments[..count]
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use godwit_vhost::memory::dirty_log::WriteLog;
    use godwit_vhost::protocol::session::OpenedRing;
    use godwit_vhost::rings::split::SplitRing;

    use super::*;
    use crate::device::queues::features::VERSION_1;
    use crate::device::test_guest::TestGuest;
    use crate::device::wake::Wake;

    fn ring(guest: &TestGuest) -> NetRing {
        let split = SplitRing::new(guest.ram.memory(), guest.layout(), 0, true, None);
        let opened = OpenedRing {
            split: split.expect("a ring"),
            inflight: None,
            again: Vec::new(),
        };
        let kick = Wake::new().expect("a counter");
        NetRing::new(opened, true, [Some(kick), None, None]).expect("has a kick")
    }

    #[test]
    fn a_packet_for_which_only_a_part_of_the_room_is_there_waits_for_more() {
        let (done, is_done) = mpsc::channel();
        // A separate thread, since a device in an endless loop would never return.
        thread::spawn(move || {
            let driver = TestGuest::new(8);
            let mut ring = ring(&driver);
            let guest = Guest {
                ram: &driver.ram,
                log: WriteLog::OFF,
                features: VERSION_1 | MERGEABLE,
            };
            let mut buffers = Buffers::default();
            let mut packet = vec![7; 2500];
            driver.offer(2);
            let given = give(&mut ring, guest, &mut buffers, &mut packet);
            assert_eq!(given.expect("a ring"), Given::NoRoom);
            assert_eq!(driver.told_after(), 2, "the guest tells of the next buffer");
            driver.offer(3);
            let given = give(&mut ring, guest, &mut buffers, &mut packet);
            assert_eq!(given.expect("a ring"), Given::Taken(3));
            assert_eq!(packet[BUFFERS_AT..HEADER], [3, 0]);
            ring.publish(guest).expect("a ring");
            assert_eq!(driver.used(), 3);
            done.send(()).expect("is waited for");
        });
        let ended = is_done.recv_timeout(Duration::from_secs(10));
        ended.expect("the packet waits, and then has room");
    }
}
