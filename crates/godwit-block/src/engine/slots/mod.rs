//! Request slots: the request behind each tag of the controller, and the buffer of its data.

pub(super) mod buffers;
pub(super) mod chunks;
pub(super) mod memory;

use std::collections::VecDeque;
use std::io;

use godwit_core::request::{Operation, RequestTag};
use godwit_core::units::{Bytes, Time};

use crate::engine::connections::ConnectionKey;
use crate::engine::connections::lanes::Lanes;
use crate::engine::connections::shares::{Account, Shares};
use crate::engine::front_ends::nbd::parts::Part;
use crate::engine::slots::buffers::Buffers;
use crate::nbd::{Extents, RequestHeader};
use godwit_io::page_buffers::{Block, LARGEST};
use godwit_io::stream::{Keep, Payload};

/// A kind of requests with tags and memory of its own, so that no kind starves another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// Requests of this node's clients.
    Client,
    /// Double writes and forwarded requests of peers.
    Sync,
    /// Copies and verifications of peers.
    Copy,
}

const CLASSES: usize = 3;

/// Memory of double writes in use, unless they are very long or many.
const DOUBLE_WRITES: usize = 2 << 20;

/// Bytes of each class's memory that rest between two uses.
const CLIENTS_REST: usize = 1 << 20;
const DOUBLE_WRITES_REST: usize = 1 << 20;
const COPIES_REST: usize = 8 << 20;

/// The receiver of a request's answer.
#[derive(Clone, Copy, Debug)]
pub(super) enum Owner {
    /// No receiver: the slot is free, or its request was abandoned.
    None,
    /// An NBD client.
    Client {
        connection: ConnectionKey,
        request: RequestHeader,
        operation: Operation,
        /// Rest of a range longer than one request.
        rest: Option<Rest>,
        /// Part of the client's range that this request covers.
        part: Part,
    },
    /// A ring of the guest; the engine's table of such requests has the rest.
    Ring { operation: Operation },
    /// A frame of a migration, which the controller answers.
    Replica,
    /// A request that a peer forwarded.
    Forwarded {
        connection: ConnectionKey,
        /// The peer's own tag.
        tag: RequestTag,
        /// Number of the request among the peer's.
        number: u32,
        operation: Operation,
    },
}

/// The rest of a range that is zeroed in pieces.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rest {
    pub(super) extents: Extents,
    pub(super) fua: bool,
    pub(super) unmap: bool,
}

impl Rest {
    /// Returns the operation on the next piece, and the rest after it.
    pub(super) fn next(mut self) -> Option<(Operation, Option<Self>)> {
        let extent = self.extents.next()?;
        let Self { fua, unmap, .. } = self;
        let operation = Operation::WriteZeroes { extent, fua, unmap };
        Some((operation, (self.extents.len() > 0).then_some(self)))
    }
}

/// A party that waits for a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waiter {
    /// A connection that has received a request.
    Connection(ConnectionKey),
    /// A ring of the guest that has a request.
    Ring(u16),
}

struct Slot {
    class: Class,
    block: Option<Block>,
    /// Account charged for the slot; none for a migration's.
    account: Option<Account>,
    /// True while the controller, or the connection that receives into the slot, uses the slot.
    busy: bool,
    /// Operations of the kernel and queued frames that use the buffer.
    holds: u32,
    owner: Owner,
    arrived: Time,
}

struct Pool {
    buffers: Buffers,
    free: Vec<RequestTag>,
    /// Tags and memory reserved for accounts, one for each, beside the common ones.
    lanes: Lanes,
    /// Waiters for a tag or memory, in order.
    waiting: VecDeque<Waiter>,
    /// True if a waiter needs so much that others must leave it whatever becomes free.
    reserved: bool,
}

pub(super) struct Slots {
    slots: Box<[Slot]>,
    pools: [Pool; CLASSES],
    shares: Shares,
    used: u32,
}

impl Slots {
    /// Maps `requests` slots (at least 64) and `memory` bytes (at least 96 MiB), shared out between the classes.
    /// Clients get half of the slots, each other class a quarter. Each other class gets a fifth of the memory, and at
    /// least 32 MiB; clients get the rest. The lanes of `clients` clients and of `peers` nodes are additional.
    pub(super) fn new(
        requests: u32,
        memory: usize,
        clients: usize,
        peers: usize,
    ) -> io::Result<Self> {
        let quarter = requests / 4;
        let share = (memory / 5).max(LARGEST);
        let pool = |tags: std::ops::Range<u32>,
                    lanes: (usize, bool),
                    bytes: usize,
                    rest: usize|
         -> io::Result<Pool> {
            let mut free: Vec<_> = tags.rev().map(RequestTag).collect();
            let (lanes, for_rings) = lanes;
            let lanes = free.split_off(free.len() - lanes.min(free.len() / 2));
            Ok(Pool {
                buffers: Buffers::new(bytes, rest)?,
                free,
                lanes: Lanes::new(lanes, for_rings)?,
                waiting: VecDeque::with_capacity(64),
                reserved: false,
            })
        };
        let slot = |tag| Slot {
            class: match tag {
                tag if tag < quarter => Class::Copy,
                tag if tag < 2 * quarter => Class::Sync,
                _ => Class::Client,
            },
            block: None,
            account: None,
            busy: false,
            holds: 0,
            owner: Owner::None,
            arrived: Time(0),
        };
        let rest = memory.saturating_sub(2 * share).max(LARGEST);
        let client_lanes = (clients + 1, true);
        Ok(Self {
            slots: (0..requests).map(slot).collect(),
            pools: [
                pool(2 * quarter..requests, client_lanes, rest, CLIENTS_REST)?,
                pool(
                    quarter..2 * quarter,
                    (peers, false),
                    share,
                    DOUBLE_WRITES_REST,
                )?,
                pool(0..quarter, (0, false), share, COPIES_REST)?,
            ],
            shares: Shares::new(),
            used: 0,
        })
    }

    /// Opens an account for a new connection.
    pub(super) fn open_account(&mut self) -> Account {
        self.shares.open()
    }

    /// Closes the account of a connection that is gone.
    pub(super) fn close_account(&mut self, account: Account) {
        self.shares.close(account);
    }

    /// Commits, in the background, the memory for double writes and for copies of a disk of `capacity` bytes.
    pub(super) fn commit_for_replicas(&mut self, capacity: Bytes) {
        let copies = usize::try_from(capacity.0).unwrap_or(usize::MAX);
        for (class, most) in [(Class::Sync, DOUBLE_WRITES), (Class::Copy, copies)] {
            self.pools[class as usize]
                .buffers
                .commit_in_background(most);
        }
    }

    /// Returns the memory of copies and double writes to the system, unless some are still being written.
    pub(super) fn decommit_replicas(&mut self) {
        for class in [Class::Sync, Class::Copy] {
            self.pools[class as usize].buffers.decommit();
        }
    }

    /// Takes a slot with a buffer of `length` bytes (none if zero), busy from now on. Returns `None` if the account
    /// (without one: the class) has no tag or memory left, or if others wait already and `waited` is false.
    pub(super) fn take(
        &mut self,
        class: Class,
        length: u32,
        owner: Owner,
        account: Option<Account>,
        waited: bool,
    ) -> Option<RequestTag> {
        let pool = &mut self.pools[class as usize];
        if !waited && !pool.waiting.is_empty() {
            return None;
        }
        let taken = match pool.take(length, account, &self.shares) {
            Some((tag, block)) => {
                if let Some(account) = account {
                    self.shares
                        .take(account, block.as_ref().map_or(0, Block::length));
                }
                Some((tag, block))
            }
            None => {
                let tag = pool.lanes.take(length, account, &mut self.shares);
                tag.map(|tag| (tag, None))
            }
        };
        let Some((tag, block)) = taken else {
            // A request too long for a lane would never get a turn if others took everything freed.
            let needs_more = account.is_none_or(|account| {
                Lanes::never_take(length, account) && self.shares.is_empty(account)
            });
            pool.reserved |= waited && needs_more;
            return None;
        };
        self.used += 1;
        let slot = &mut self.slots[tag.0 as usize];
        debug_assert!(!slot.busy && slot.holds == 0 && slot.class == class);
        slot.block = block;
        slot.account = account;
        slot.busy = true;
        slot.owner = owner;
        Some(tag)
    }

    /// Queues a waiter until the class has something free again.
    pub(super) fn wait(&mut self, class: Class, waiter: Waiter) {
        self.pools[class as usize].waiting.push_back(waiter);
    }

    /// Returns the number of waiters for the class. Each is to be tried once: see [`Slots::next_waiting`].
    pub(super) fn waiting(&mut self, class: Class) -> usize {
        let pool = &mut self.pools[class as usize];
        pool.reserved = false;
        pool.waiting.len()
    }

    /// Removes and returns the first waiter for the class. Without success the waiter has to [wait](Slots::wait) again.
    pub(super) fn next_waiting(&mut self, class: Class) -> Option<Waiter> {
        self.pools[class as usize].waiting.pop_front()
    }

    /// Returns true if a waiter other than this connection waits for the class.
    pub(super) fn is_short_for_others(&self, class: Class, connection: ConnectionKey) -> bool {
        let others = |waiter: &Waiter| *waiter != Waiter::Connection(connection);
        self.pools[class as usize].waiting.iter().any(others)
    }

    /// Ends the controller's use of the slot. The slot is free once no hold is left.
    pub(super) fn finish(&mut self, tag: RequestTag) {
        let slot = &mut self.slots[tag.0 as usize];
        debug_assert!(slot.busy, "{tag:?} is finished twice");
        slot.busy = false;
        slot.owner = Owner::None;
        self.free_if_unused(tag);
    }

    /// Keeps the slot's buffer in place until [`Slots::release`].
    pub(super) fn hold(&mut self, tag: RequestTag) {
        self.slots[tag.0 as usize].holds += 1;
    }

    /// Ends a hold.
    pub(super) fn release(&mut self, tag: RequestTag) {
        self.slots[tag.0 as usize].holds -= 1;
        self.free_if_unused(tag);
    }

    fn free_if_unused(&mut self, tag: RequestTag) {
        let slot = &mut self.slots[tag.0 as usize];
        if slot.busy || slot.holds > 0 {
            return;
        }
        let pool = &mut self.pools[slot.class as usize];
        let (block, account) = (slot.block.take(), slot.account.take());
        self.used -= 1;
        if pool.lanes.free(tag, account, &mut self.shares) {
            return;
        }
        if let Some(account) = account {
            let bytes = block.as_ref().map_or(0, Block::length);
            self.shares.give_back(account, bytes);
        }
        if let Some(block) = block {
            pool.buffers.free(block);
        }
        pool.free.push(tag);
    }

    pub(super) const fn used(&self) -> u32 {
        self.used
    }

    /// Returns the requests whose owners satisfy `is_its`.
    pub(super) fn owned_by(&self, is_its: impl Fn(Owner) -> bool) -> Vec<RequestTag> {
        (0u32..)
            .zip(&self.slots)
            .filter(|(_, slot)| slot.busy && is_its(slot.owner))
            .map(|(tag, _)| RequestTag(tag))
            .collect()
    }

    /// Returns true if a forwarded request is unanswered and came by a connection not in `current`.
    pub(super) fn serves_others_than(&self, current: &[ConnectionKey]) -> bool {
        self.slots.iter().any(|slot| {
            matches!(slot.owner, Owner::Forwarded { connection, .. }
                if !current.contains(&connection))
        })
    }

    /// Returns true if a frame of a migration is being applied.
    pub(super) fn applies(&self) -> bool {
        self.slots
            .iter()
            .any(|slot| matches!(slot.owner, Owner::Replica))
    }

    pub(super) fn owner(&self, tag: RequestTag) -> Owner {
        self.slots[tag.0 as usize].owner
    }

    pub(super) fn set_owner(&mut self, tag: RequestTag, owner: Owner) {
        self.slots[tag.0 as usize].owner = owner;
    }

    pub(super) fn arrived(&self, tag: RequestTag) -> Time {
        self.slots[tag.0 as usize].arrived
    }

    pub(super) fn set_arrived(&mut self, tag: RequestTag, now: Time) {
        self.slots[tag.0 as usize].arrived = now;
    }

    /// Returns the address of the byte at `offset` of the slot's buffer, and the bytes from there to the end; `None` if
    /// the slot has no buffer or the buffer is shorter.
    pub(super) fn address(&self, tag: RequestTag, offset: usize) -> Option<(*mut u8, usize)> {
        let slot = self.slots.get(tag.0 as usize)?;
        let pool = &self.pools[slot.class as usize];
        let (base, length) = match &slot.block {
            Some(block) => (pool.buffers.address(block), block.length()),
            None => pool.lanes.buffer(tag)?,
        };
        let length = length.checked_sub(offset)?;
        // SAFETY: `offset` is at most the buffer's length, as the subtraction shows.
        Some((unsafe { base.add(offset) }, length))
    }

    /// Returns a part of the slot's buffer, for this thread to fill while no operation of the kernel uses the buffer.
    pub(super) fn bytes_mut(
        &mut self,
        tag: RequestTag,
        range: std::ops::Range<usize>,
    ) -> &mut [u8] {
        match self.address(tag, range.start) {
            Some((pointer, length)) => {
                let wanted = range.end.saturating_sub(range.start).min(length);
                // SAFETY: the block holds `length` initialised bytes from `pointer`; `&mut self` keeps other slices
                // away. The engine receives into a slot before other operations on the buffer start, so the kernel does
                // not use the bytes.
                unsafe { std::slice::from_raw_parts_mut(pointer, wanted) }
            }
            None => &mut [],
        }
    }

    /// Takes a hold. Returns the first `length` bytes of the slot's buffer as the payload of a frame.
    pub(super) fn payload(&mut self, tag: RequestTag, length: usize) -> Option<Payload> {
        let (pointer, available) = self.address(tag, 0)?;
        let length = length.min(available);
        self.hold(tag);
        // SAFETY: the hold keeps the block allocated until the payload is released. The controller changes nothing in a
        // buffer after the action to send it.
        Some(unsafe { Payload::new(pointer, length, Keep::Slot(tag)) })
    }
}

impl Pool {
    /// Takes a common tag and common memory.
    fn take(
        &mut self,
        length: u32,
        account: Option<Account>,
        shares: &Shares,
    ) -> Option<(RequestTag, Option<Block>)> {
        if self.reserved {
            return None;
        }
        let length = length as usize;
        let tag = *self.free.last()?;
        if let Some(account) = account {
            let left = (
                self.free.len() - 1,
                self.buffers.unused().saturating_sub(length),
            );
            if !shares.allows(account, length, left) {
                return None;
            }
        }
        let block = match length {
            0 => None,
            length => Some(self.buffers.allocate(length)?),
        };
        self.free.pop();
        Some((tag, block))
    }
}
