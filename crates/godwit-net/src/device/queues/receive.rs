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
    /// The guest has it.
    Taken,
    /// The guest has offered no room; it will tell when it does.
    NoRoom,
    /// No room that the guest offers is large enough.
    TooLarge,
    /// The guest's memory is lost.
    Lost,
}

/// A buffer that the guest offers: its chain, and where it is.
struct Buffer {
    taken: Taken,
    segments: Vec<Segment>,
    bytes: usize,
}

/// Puts a packet into the guest's buffers. Its header is changed to say into how many.
pub(in crate::device) fn give(
    ring: &mut NetRing,
    guest: Guest<'_>,
    chain: &mut Chain,
    packet: &mut [u8],
) -> Result<Given, Broken> {
    let header = header_bytes(guest.features);
    let total = packet.len() - HEADER + header;
    let mergeable = guest.features & MERGEABLE != 0;
    let mut buffers: Vec<Buffer> = Vec::with_capacity(1);
    let mut room = 0;
    while room < total {
        let most = usize::from(ring.split.layout().size);
        let full = buffers.len() == most || !mergeable && !buffers.is_empty();
        let next = match full {
            true => None,
            false => ring.take(guest, chain, None)?,
        };
        let Some(taken) = next else {
            let all: Vec<Taken> = buffers.iter().map(|buffer| buffer.taken).collect();
            ring.put_back(&all);
            if full {
                return Ok(Given::TooLarge);
            }
            if ring.rest(guest)? {
                buffers.clear();
                room = 0;
                continue;
            }
            return Ok(Given::NoRoom);
        };
        let bytes = chain
            .writable
            .iter()
            .map(|segment| segment.length as usize)
            .sum();
        room += bytes;
        buffers.push(Buffer {
            taken,
            segments: std::mem::take(&mut chain.writable),
            bytes,
        });
    }
    ring.split.ignore(guest.ram.memory(), guest.log)?;
    let count = buffers.len() as u16;
    packet[BUFFERS_AT..HEADER].copy_from_slice(&count.to_le_bytes());
    let shortened;
    let mut rest: &[u8] = if header == HEADER {
        packet
    } else {
        shortened = [&packet[..header], &packet[HEADER..]].concat();
        &shortened
    };
    for buffer in &mut buffers {
        let (here, after) = rest.split_at(rest.len().min(buffer.bytes));
        rest = after;
        shorten(&mut buffer.segments, here.len());
        if !guest.ram.scatter(here, &buffer.segments) {
            return Err(Broken::Buffer);
        }
        if let Some(log) = guest.log {
            log.mark_all(&buffer.segments)?;
        }
        ring.answer(buffer.taken, here.len() as u32);
    }
    if guest.ram.arrival().is_lost() {
        return Ok(Given::Lost);
    }
    Ok(Given::Taken)
}

/// Leaves so many bytes of the segments.
fn shorten(segments: &mut Vec<Segment>, mut bytes: usize) {
    segments.retain_mut(|segment| {
        segment.length = segment.length.min(bytes as u32);
        bytes -= segment.length as usize;
        segment.length > 0
    });
}
