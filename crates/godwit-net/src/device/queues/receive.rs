//! What the guest gets.

use godwit_vhost::memory::Segment;
use godwit_vhost::rings::chain::Chain;

use crate::device::queues::features::MERGEABLE;
use crate::device::queues::ring::{Broken, Guest, NetRing, Taken};
use crate::device::queues::transmit::header_bytes;
use crate::frame::packet::{BUFFERS_AT, HEADER};

/// What became of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::device) enum Given {
    /// The guest has it, in so many buffers.
    Taken(u16),
    /// The guest has offered no room; it will tell when it does.
    NoRoom,
    /// No room that the guest offers is large enough.
    TooLarge,
    /// The guest's memory is lost.
    Lost,
}

/// A buffer that the guest offers: its chain, and where it is.
#[derive(Clone, Copy)]
struct Buffer {
    taken: Taken,
    /// How many of the segments are its.
    segments: usize,
    bytes: usize,
}

/// The buffers of one packet, whose space is used again for the next.
#[derive(Default)]
pub(in crate::device) struct Buffers {
    chain: Chain,
    all: Vec<Buffer>,
    segments: Vec<Segment>,
    taken: Vec<Taken>,
    /// A packet with the short header.
    shortened: Vec<u8>,
}

/// Puts a packet into the guest's buffers. Its header is changed to say into how many.
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
            // The guest is asked before the buffers are put back, so that it tells of what comes after them. Asked
            // after that, the ring would always seem to have more.
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
        if let Some(log) = guest.log {
            log.mark_all(own)?;
        }
        ring.answer(buffer.taken, here.len() as u32);
    }
    if guest.ram.is_lost() {
        return Ok(Given::Lost);
    }
    Ok(Given::Taken(count))
}

/// Leaves so many bytes of the segments.
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
        // A device that looks again and again never comes back.
        thread::spawn(move || {
            let driver = TestGuest::new(8);
            let mut ring = ring(&driver);
            let guest = Guest {
                ram: &driver.ram,
                log: None,
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
