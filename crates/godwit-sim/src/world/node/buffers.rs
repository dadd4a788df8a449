//! The buffers of a process: tags with their holders, and data on the way.

use std::collections::HashMap;

use godwit_core::action::{DiskTag, PULL_SLOTS, PullSlot, SourceSlot};
use godwit_core::request::RequestTag;
use godwit_core::wire::PayloadBuffer;

use crate::disk::Data;
use crate::history::WriteNumber;
use crate::world::wires::network::Way;

/// The holder of a tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holder {
    Nobody,
    /// A place in the guest's queue.
    Client(usize),
    /// A client that has hung up; `told` once the controller knows.
    Gone {
        told: bool,
    },
    /// The other node, which forwarded a request.
    Peer {
        session: usize,
        theirs: RequestTag,
        number: u32,
        read: bool,
        /// The forwarded write, if it brought data.
        write: Option<WriteNumber>,
    },
    /// A frame of the migration.
    Replica,
}

#[derive(Debug)]
pub(crate) struct Buffers {
    free: Vec<RequestTag>,
    holders: Vec<Holder>,
    /// Data by tag.
    requests: Vec<Data>,
    sources: HashMap<SourceSlot, Data>,
    /// Pulled data by slot.
    pulled: Vec<Data>,
    /// Connections whose next frame waits for a tag.
    blocked: Vec<Way>,
}

impl Buffers {
    /// Returns the empty buffers of a process with this number of tags.
    pub(crate) fn new(tags: u32) -> Self {
        Self {
            free: (0..tags).rev().map(RequestTag).collect(),
            holders: vec![Holder::Nobody; tags as usize],
            requests: vec![None; tags as usize],
            sources: HashMap::new(),
            pulled: vec![None; usize::from(PULL_SLOTS)],
            blocked: Vec::new(),
        }
    }

    /// Takes a free tag and puts the data into its buffer.
    pub(crate) fn take(&mut self, holder: Holder, data: Data) -> Option<RequestTag> {
        let tag = self.free.pop()?;
        self.holders[tag.0 as usize] = holder;
        self.requests[tag.0 as usize] = data;
        Some(tag)
    }

    /// Frees a tag. Returns its holder and its data.
    pub(crate) fn free(&mut self, tag: RequestTag) -> (Holder, Data) {
        self.free.push(tag);
        let holder = std::mem::replace(&mut self.holders[tag.0 as usize], Holder::Nobody);
        (holder, self.requests[tag.0 as usize].take())
    }

    /// Notes that the next frame on this way waits for a tag.
    pub(crate) fn block(&mut self, way: Way) {
        if !self.blocked.contains(&way) {
            self.blocked.push(way);
        }
    }

    /// Returns the ways that waited for a tag.
    pub(crate) fn unblock(&mut self) -> Vec<Way> {
        std::mem::take(&mut self.blocked)
    }

    pub(crate) fn free_tags(&self) -> usize {
        self.free.len()
    }

    pub(crate) fn all_free(&self) -> bool {
        self.free.len() == self.holders.len()
    }

    pub(crate) fn holder(&self, tag: RequestTag) -> Holder {
        self.holders[tag.0 as usize]
    }

    /// Returns the number of requests of clients and of the other node.
    pub(crate) fn held(&self) -> usize {
        let held = self.holders.iter();
        held.filter(|holder| !matches!(holder, Holder::Nobody | Holder::Replica))
            .count()
    }

    /// Returns true if requests are left that the other node forwarded on an older session.
    pub(crate) fn has_of_older(&self, session: usize) -> bool {
        self.holders.iter().any(
            |holder| matches!(holder, Holder::Peer { session: other, .. } if *other != session),
        )
    }

    /// Makes all clients hang up.
    pub(crate) fn desert(&mut self) {
        for holder in &mut self.holders {
            if matches!(holder, Holder::Client(_)) {
                *holder = Holder::Gone { told: false };
            }
        }
    }

    /// Returns the tags of clients that have hung up since the last call.
    pub(crate) fn hang_ups(&mut self) -> Vec<RequestTag> {
        let mut tags = Vec::new();
        for (tag, holder) in (0..).zip(&mut self.holders) {
            if let Holder::Gone { told: told @ false } = holder {
                *told = true;
                tags.push(RequestTag(tag));
            }
        }
        tags
    }

    /// Returns the data of a frame to send.
    pub(crate) fn payload(&self, of: Option<PayloadBuffer>) -> Data {
        match of? {
            PayloadBuffer::Request(tag) => self.requests[tag.0 as usize].clone(),
            PayloadBuffer::Source(slot) => self.sources.get(&slot).cloned().flatten(),
        }
    }

    /// Returns the data of a write to the disk.
    pub(crate) fn to_write(&self, tag: DiskTag) -> Data {
        match tag {
            DiskTag::Request(tag) | DiskTag::Replica(tag) => self.requests[tag.0 as usize].clone(),
            DiskTag::Pulled(slot) => self.pulled[usize::from(slot.0)].clone(),
            _ => None,
        }
    }

    /// Keeps data read from the disk.
    pub(crate) fn keep_read(&mut self, tag: DiskTag, data: Data) {
        if let DiskTag::Request(tag) | DiskTag::Replica(tag) = tag {
            self.keep_reply(tag, data);
        } else if let Some(slot) = tag.source_slot() {
            self.sources.insert(slot, data);
        }
    }

    /// Keeps the answer to a forwarded read.
    pub(crate) fn keep_reply(&mut self, tag: RequestTag, data: Data) {
        self.requests[tag.0 as usize] = data;
    }

    pub(crate) fn keep_pulled(&mut self, slot: PullSlot, data: Data) {
        self.pulled[usize::from(slot.0)] = data;
    }
}
