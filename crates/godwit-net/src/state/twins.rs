//! Packets for many, which a move may bring to both nodes. The guest gets each packet as often as the node with more
//! copies.

use std::collections::HashMap;
use std::time::Duration;

use crate::frame::packet::{destination, finished_frame_of, frame_of};
use crate::state::held::MOST_PACKETS;

/// Most time between the two copies of a packet. A station that repeats a packet does so less often.
const WITHIN: Duration = Duration::from_millis(500);

/// The receiver of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CameTo {
    /// The destination.
    New,
    /// The source.
    Former,
}

/// Recent packets at either node.
#[derive(Clone, Debug, Default)]
pub struct Twins(HashMap<[u8; 16], Seen>);

#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    /// Copies that the guest got from the destination, minus copies from the source.
    ahead: i32,
    /// Copies left to the source by the destination.
    left: u32,
    /// Time of the last change since the NIC was made.
    at: Duration,
}

impl Twins {
    /// Records a packet left to the source, because the VM does not belong to the destination yet.
    pub fn leave(&mut self, packet: &[u8], now: Duration) {
        if let Some(seen) = self.seen(packet, now) {
            seen.left += 1;
        }
    }

    /// Returns true if the guest already has this packet from the other node. Otherwise the guest gets the packet.
    pub fn is_one(&mut self, packet: &[u8], to: CameTo, now: Duration) -> bool {
        let Some(seen) = self.seen(packet, now) else {
            return false;
        };
        let (was_ahead, change) = match to {
            CameTo::New => (seen.ahead < 0, 1),
            CameTo::Former if seen.left > 0 => {
                seen.left -= 1;
                return false;
            }
            CameTo::Former => (seen.ahead > 0, -1),
        };
        seen.ahead += change;
        was_ahead
    }

    /// Takes back the record of a packet lost for want of room.
    pub fn was_lost(&mut self, packet: &[u8], came_to: CameTo, now: Duration) {
        if let Some(seen) = self.seen(packet, now) {
            seen.ahead -= match came_to {
                CameTo::New => 1,
                CameTo::Former => -1,
            };
        }
    }

    /// Returns the record of a packet for many. Returns `None` for other packets, and for a new packet beyond
    /// [`MOST_PACKETS`].
    fn seen(&mut self, packet: &[u8], now: Duration) -> Option<&mut Seen> {
        destination(frame_of(packet)?).filter(|to| to.is_group())?;
        // A tap computes checksums until the front end allows packets without. At the destination, the front end does
        // so only once the VM runs there.
        let name = *blake3::hash(&finished_frame_of(packet)?)
            .as_bytes()
            .first_chunk()?;
        if self.0.len() >= MOST_PACKETS && !self.0.contains_key(&name) {
            return None;
        }
        let seen = self.0.entry(name).or_default();
        if now.saturating_sub(seen.at) > WITHIN {
            *seen = Seen::default();
        }
        seen.at = now;
        Some(seen)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::packet::HEADER;
    use crate::mac::Mac;

    fn packet(to: Mac) -> Vec<u8> {
        [&[0; HEADER][..], &to.0, &[2, 0, 0, 0, 0, 1, 8, 0, 7]].concat()
    }

    #[test]
    fn a_packet_for_many_is_given_as_often_as_it_came_to_one_place() {
        use CameTo::{Former, New};
        let (many, now) = (packet(Mac::ALL), Duration::ZERO);
        for (order, given) in [
            (&[New, Former, Former, New, New][..], 3),
            (&[Former, Former, New], 2),
        ] {
            let mut twins = Twins::default();
            let given_now = order.iter().filter(|to| !twins.is_one(&many, **to, now));
            assert_eq!(given_now.count(), given, "{order:?}");
        }
        let mut twins = Twins::default();
        let own = packet(Mac([2, 0, 0, 0, 0, 2]));
        assert!([New, Former].iter().all(|to| !twins.is_one(&own, *to, now)));
    }

    #[test]
    fn what_was_left_to_the_former_place_or_lost_has_no_twin() {
        let (many, now) = (packet(Mac::ALL), Duration::ZERO);
        let mut twins = Twins::default();
        twins.leave(&many, now);
        assert!(!twins.is_one(&many, CameTo::Former, now));
        assert!(!twins.is_one(&many, CameTo::New, now), "it is said again");
        let mut twins = Twins::default();
        assert!(!twins.is_one(&many, CameTo::Former, now));
        twins.was_lost(&many, CameTo::Former, now);
        assert!(!twins.is_one(&many, CameTo::New, now));
    }

    #[test]
    fn a_packet_whose_checksum_one_place_has_not_made_is_the_same() {
        let checksum = |header: u8, made: [u8; 2]| {
            let ethernet = [
                &[header][..],
                &[0; 5],
                &[14, 0, 0, 0, 0, 0],
                &Mac::ALL.0,
                &[2; 8],
            ];
            [&ethernet.concat()[..], &made, &[0x12, 0x34]].concat()
        };
        let mut twins = Twins::default();
        let unfinished = checksum(1, [0, 1]);
        assert!(!twins.is_one(&unfinished, CameTo::Former, Duration::ZERO));
        let finished = checksum(0, (!0x1235_u16).to_be_bytes());
        assert!(twins.is_one(&finished, CameTo::New, Duration::ZERO));
    }

    #[test]
    fn what_is_said_again_later_is_no_twin() {
        let many = packet(Mac::ALL);
        let mut twins = Twins::default();
        assert!(!twins.is_one(&many, CameTo::Former, Duration::ZERO));
        let later = Duration::from_secs(1);
        assert!(!twins.is_one(&many, CameTo::New, later));
    }

    #[test]
    fn no_more_is_kept_than_can_be_held() {
        let mut twins = Twins::default();
        for number in 0..2 * MOST_PACKETS as u32 {
            let packet = [&packet(Mac::ALL)[..], &number.to_le_bytes()].concat();
            assert!(!twins.is_one(&packet, CameTo::Former, Duration::ZERO));
        }
        assert_eq!(twins.0.len(), MOST_PACKETS);
    }
}
