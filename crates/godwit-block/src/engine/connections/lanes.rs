//! The lane of each connection, beside the common tags and memory: one request at a time.

use std::io;

use godwit_core::request::RequestTag;

use crate::engine::connections::shares::{Account, Shares};
use godwit_io::page_buffers::{LARGEST, Mapping};

/// Longest data in a lane, in bytes. A client's longer requests are carried out in pieces of this length.
pub(in crate::engine) const LANE: usize = 1 << 20;

/// The lanes of one class: tags, each with memory of its own. An account uses at most one lane, so every account gets
/// one while there are as many lanes as accounts.
pub(in crate::engine) struct Lanes {
    /// Address space, committed on use.
    memory: Mapping,
    /// Lane of the guest's rings, whose requests may have any length.
    for_rings: Option<RequestTag>,
    free: Vec<RequestTag>,
    /// Tags of all lanes.
    tags: std::ops::Range<u32>,
}

impl Lanes {
    /// Returns lanes with these tags, which must be consecutive and descending. The last tag is the rings' lane if
    /// `for_rings` is true.
    pub(in crate::engine) fn new(mut tags: Vec<RequestTag>, for_rings: bool) -> io::Result<Self> {
        let first = tags.last().map_or(0, |tag| tag.0);
        let count = tags.len();
        let rings = if for_rings { LARGEST - LANE } else { 0 };
        Ok(Self {
            memory: Mapping::new(rings + count * LANE)?,
            for_rings: for_rings.then(|| tags.pop()).flatten(),
            free: tags,
            tags: first..first + count as u32,
        })
    }

    /// Takes the account's lane for a request with `length` bytes, unless in use. Requests without an account are a
    /// migration's, which may use all lanes.
    pub(in crate::engine) fn take(
        &mut self,
        length: u32,
        account: Option<Account>,
        shares: &mut Shares,
    ) -> Option<RequestTag> {
        if account.is_some_and(|account| !shares.lane_is_free(account)) {
            return None;
        }
        let tag = match (account, self.for_rings) {
            (Some(Account::RINGS), Some(tag)) => tag,
            (None, _) if length as usize > LANE => return None,
            (Some(account), _) if Self::never_take(length, account) => return None,
            _ => self.free.pop()?,
        };
        if let Some(account) = account {
            shares.use_lane(account, true);
        }
        Some(tag)
    }

    /// Returns true if the account's lane is too short for `length` bytes.
    pub(in crate::engine) fn never_take(length: u32, account: Account) -> bool {
        length as usize > LANE && account != Account::RINGS
    }

    /// Frees a lane. Returns false if the tag is not a lane.
    pub(in crate::engine) fn free(
        &mut self,
        tag: RequestTag,
        account: Option<Account>,
        shares: &mut Shares,
    ) -> bool {
        if !self.tags.contains(&tag.0) {
            return false;
        }
        if let Some(account) = account {
            shares.use_lane(account, false);
        }
        if self.for_rings != Some(tag) {
            self.free.push(tag);
        }
        true
    }

    /// Returns address and length of the lane's memory; `None` if the tag is not a lane.
    pub(in crate::engine) fn buffer(&self, tag: RequestTag) -> Option<(*mut u8, usize)> {
        let number = self
            .tags
            .contains(&tag.0)
            .then(|| tag.0 - self.tags.start)? as usize;
        if self.for_rings.is_none() {
            return Some((self.memory.at(number * LANE), LANE));
        }
        Some(match number.checked_sub(1) {
            None => (self.memory.at(0), LARGEST),
            Some(number) => (self.memory.at(LARGEST + number * LANE), LANE),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lanes(count: u32, for_rings: bool) -> Lanes {
        let tags = (10..10 + count).rev().map(RequestTag).collect();
        Lanes::new(tags, for_rings).expect("memory")
    }

    #[test]
    fn an_account_has_one_lane_whatever_others_do() {
        let (mut lanes, mut shares) = (lanes(4, true), Shares::new());
        let accounts = [shares.open(), shares.open(), shares.open()];
        for account in accounts {
            let long = LANE as u32;
            assert!(lanes.take(long + 1, Some(account), &mut shares).is_none());
            let tag = lanes
                .take(long, Some(account), &mut shares)
                .expect("a lane");
            assert!(lanes.take(0, Some(account), &mut shares).is_none());
            assert!(lanes.free(tag, Some(account), &mut shares));
            assert!(lanes.take(0, Some(account), &mut shares).is_some());
        }
        let rings = Some(Account::RINGS);
        let tag = lanes.take(LARGEST as u32, rings, &mut shares);
        assert_eq!(tag, Some(RequestTag(10)));
        assert!(lanes.take(0, rings, &mut shares).is_none());
        assert!(!lanes.free(RequestTag(9), rings, &mut shares));
    }

    #[test]
    fn no_lane_reaches_into_another() {
        for for_rings in [false, true] {
            let lanes = lanes(5, for_rings);
            let buffers: Vec<_> = (10..15)
                .map(|tag| lanes.buffer(RequestTag(tag)).expect("a lane"))
                .map(|(start, length)| (start as usize, start as usize + length))
                .collect();
            assert!(buffers.is_sorted_by(|one, next| one.1 <= next.0));
            let last = lanes.memory.at(lanes.memory.length()) as usize;
            assert_eq!(buffers[4].1, last);
            assert!(lanes.buffer(RequestTag(9)).is_none());
            assert!(lanes.buffer(RequestTag(15)).is_none());
        }
    }
}
