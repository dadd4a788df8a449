//! A body for the controller that checks everything the controller tells it to do.

use core::time::Duration;

use godwit_core::action::{
    Action, Content, DiskOperation, DiskTag, Forwarder, PULL_SECTORS, PULL_SLOTS, PullSlot,
};
use godwit_core::authority::{AuthorityRecord, Ownership};
use godwit_core::event::{AbortReason, Event};
use godwit_core::request::{Operation, Origin, Request, RequestError, RequestTag};
use godwit_core::units::{Epoch, Extent, MigrationId, Sectors, Time};
use godwit_core::wire::{Message, PayloadBuffer, TrafficClass};
use godwit_core::{Admission, Controller, Limits, Missing};

use crate::input::Input;

pub const TIMEOUT: Duration = Duration::from_secs(1);

/// What a tag and its buffer are used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Free,
    Request,
    Replica,
}

pub struct Body {
    pub core: Controller,
    pub now: Time,
    limits: Limits,
    capacity: Sectors,
    tags: Vec<Use>,
    disk: Vec<(DiskTag, DiskOperation)>,
    storing: bool,
    storing_sharing: bool,
    storing_missing: bool,
    storing_activity: bool,
    /// Kept writes are being applied.
    applying: bool,
    /// What the controller has pulled on the connection that is there, and has not got.
    pulls: Vec<(PullSlot, Extent)>,
}

impl Body {
    pub fn new(input: &mut Input<'_>) -> Self {
        let limits = Limits {
            requests: u32::from(input.byte() % 16) + 1,
            window_chunks: u16::from(input.byte() % 4) + 1,
            delayed_chunks: u16::from(input.byte() % 3),
            delayed_ranges: u16::from(input.byte() % 8),
            hot_places: 4,
            area_sectors: 8,
            active_areas: 1,
        };
        let capacity = Sectors(u64::from(input.byte() % 128) + 1);
        let migration = MigrationId([input.byte() % 3; 16]);
        let ownership = match input.byte() % 8 {
            0 => Ownership::Vacant,
            1 => Ownership::Accepted { migration },
            2 => Ownership::Relinquished { migration },
            3 => Ownership::Departed { migration },
            _ => Ownership::Serving,
        };
        let in_part = ownership != Ownership::Vacant && input.one_in(4);
        let record = AuthorityRecord {
            epoch: Epoch(1),
            ownership,
            remainder: in_part.then_some(migration),
        };
        let mut core = Controller::new(limits, capacity, record);
        if in_part {
            let words = vec![input.number(); Missing::word_length(capacity)];
            let heat = vec![input.byte(); Missing::heat_length(capacity)];
            if let Some(missing) = Missing::from_parts(capacity, &words, &heat) {
                core.restore_missing(missing);
            }
        }
        Self {
            core,
            now: Time(0),
            limits,
            capacity,
            tags: vec![Use::Free; limits.requests as usize],
            disk: Vec::new(),
            storing: false,
            storing_sharing: false,
            storing_missing: false,
            storing_activity: false,
            applying: false,
            pulls: Vec::new(),
        }
    }

    /// The connection on which the owner pulls is there, dialled by this end or not; or it is not.
    pub fn pull_link(&mut self, dialled: Option<bool>) {
        self.pulls.clear();
        match dialled {
            Some(dialled) => self.core.handle_pull_up(self.now, dialled),
            None => self.core.handle_pull_lost(self.now),
        }
    }

    /// Something arrives that was pulled.
    pub fn pulled(&mut self, which: u8, zeroes: bool, result: Result<(), RequestError>) {
        if self.pulls.is_empty() {
            return;
        }
        let which = usize::from(which) % self.pulls.len();
        let (slot, extent) = self.pulls.swap_remove(which);
        let message = Message::Pulled {
            slot,
            extent,
            zeroes,
            result,
        };
        assert!(
            self.core
                .handle_pulled(self.now, TrafficClass::Pull, message),
            "{message:?}"
        );
    }

    /// Something arrives that was not, as a rule.
    pub fn not_pulled(&mut self, message: Message) {
        if let Message::Pulled { slot, extent, .. } = message
            && !self.pulls.contains(&(slot, extent))
        {
            assert!(
                !self
                    .core
                    .handle_pulled(self.now, TrafficClass::Pull, message),
                "{message:?}"
            );
        }
    }

    pub fn pass(&mut self, nanoseconds: u64) {
        self.now = self.now.after(Duration::from_nanos(nanoseconds));
    }

    pub fn request(&mut self, origin: Origin, operation: Operation) {
        if let Some(tag) = self.take_tag(Use::Request) {
            self.core.handle_request(
                self.now,
                Request {
                    tag,
                    origin,
                    operation,
                },
            );
        }
    }

    /// A frame comes in.
    pub fn message(&mut self, class: TrafficClass, message: Message) {
        assert!(message.belongs_on(class), "{message:?} on {class:?}");
        let buffer = match message {
            Message::Copy { .. }
            | Message::DoubleWrite { .. }
            | Message::DelayedWrite { .. }
            | Message::Verify { .. }
            | Message::VerifyHole { .. } => {
                match self.take_tag(Use::Replica) {
                    Some(tag) => Some(tag),
                    // A body stops reading from the connection until a tag is free.
                    None => return,
                }
            }
            Message::ForwardReply { tag, number, .. }
                if self.core.forward_reply_length(tag, number).is_none() =>
            {
                return;
            }
            _ => None,
        };
        self.core.handle_message(self.now, class, message, buffer);
    }

    /// One of the disk's operations ends.
    pub fn disk_done(&mut self, which: u8, result: Result<Content, RequestError>) {
        if !self.disk.is_empty() {
            let (tag, _) = self.disk.swap_remove(usize::from(which) % self.disk.len());
            self.core.handle_disk_done(self.now, tag, result);
        }
    }

    /// A client leaves, of which some of the requests are.
    pub fn client_left(&mut self, which: u8) {
        let tags: Vec<_> = (0u32..)
            .zip(&self.tags)
            .filter(|(tag, used)| **used == Use::Request && which >> (tag % 8) & 1 == 1)
            .map(|(tag, _)| RequestTag(tag))
            .collect();
        self.core.handle_client_left(self.now, tags);
    }

    /// A request comes in that another node forwards.
    pub fn forwarded(&mut self, forwarder: Forwarder, number: u32, operation: Operation) {
        if self.core.admit_forwarded(forwarder, number) == Admission::Take {
            self.request(Origin::Peer, operation);
        }
    }

    /// The kept writes are on the disk, or are not.
    pub fn applied(&mut self, result: Result<(), RequestError>) {
        if std::mem::take(&mut self.applying) {
            self.core.handle_kept_applied(self.now, result);
        }
    }

    pub fn persisted(&mut self) {
        if std::mem::take(&mut self.storing_sharing) {
            self.core.handle_sharing_stored(self.now);
        }
        if std::mem::take(&mut self.storing_missing) {
            self.core.handle_missing_stored(self.now);
        }
        if std::mem::take(&mut self.storing_activity) {
            self.core.handle_activity_stored(self.now, true);
        }
        if self.storing {
            self.storing = false;
            self.core.handle_persisted(self.now);
        }
    }

    /// The store refuses. Only the record that gives the disk away can be taken back.
    pub fn not_persisted(&mut self) {
        if self.storing
            && self
                .core
                .handle_not_persisted(self.now, AbortReason::Cancelled)
        {
            self.storing = false;
        }
    }

    /// The disk and the store finish all that they were given, and what follows from it.
    pub fn settle(&mut self) {
        for _ in 0..4096 {
            self.drain();
            let stores = self.storing
                || self.storing_sharing
                || self.storing_missing
                || self.storing_activity;
            if self.disk.is_empty() && !stores && !self.applying {
                return;
            }
            self.persisted();
            self.disk_done(0, Ok(Content::Data));
            self.applied(Ok(()));
        }
        panic!("the controller never has enough of the disk");
    }

    /// Everything ends: what can be answered must be.
    pub fn finish(mut self) {
        self.settle();
        self.core.cancel(self.now, AbortReason::Cancelled);
        self.settle();
        for class in [
            TrafficClass::Control,
            TrafficClass::Sync,
            TrafficClass::Copy,
        ] {
            self.core.handle_connection_lost(self.now, class);
            self.settle();
        }
        for _ in 0..4 {
            self.pass(2_000_000_000);
            self.core.handle_timer(self.now);
            self.settle();
        }
        self.core.go_alone(self.now);
        self.settle();
        self.core.handle_forward_lost(self.now);
        self.settle();
        self.core.fail_forwarded(self.now);
        self.settle();
        self.pull_link(None);
        self.settle();
        // What waits for what is missing waits for the other node, as long as its client does.
        if self.core.lacks().is_some() {
            self.client_left(u8::MAX);
            self.settle();
        }
        let record = self.core.record();
        match record.ownership {
            // Nobody knows who owns the disk, or this node waits to hear that it does.
            Ownership::Accepted { .. } | Ownership::Relinquished { .. } => {}
            Ownership::Vacant | Ownership::Serving | Ownership::Departed { .. } => {
                let busy = self.tags.iter().position(|&tag| tag != Use::Free);
                assert_eq!(busy, None, "a tag is still busy at {record:?}");
                assert_eq!(self.core.requests_in_flight(), 0);
            }
        }
    }

    /// Carries out what the controller wants.
    pub fn drain(&mut self) {
        let most = 8 * self.limits.requests + 8 * u32::from(self.limits.window_chunks) + 128;
        for _ in 0..most {
            match self.core.poll_action() {
                None => return,
                Some(action) => self.carry_out(action),
            }
        }
        panic!("one input made more than {most} actions");
    }

    fn carry_out(&mut self, action: Action) {
        match action {
            Action::Disk { tag, operation } => {
                assert!(!self.at_disk(tag), "{tag:?} is at the disk already");
                if let Some(extent) = extent_of(&operation) {
                    assert!(extent.within(self.capacity), "{extent} is not on the disk");
                }
                match tag {
                    DiskTag::Request(tag) => self.expect(tag, Use::Request),
                    DiskTag::Replica(tag) => self.expect(tag, Use::Replica),
                    DiskTag::Chunk(slot) => assert!(slot.0 < self.limits.window_chunks),
                    DiskTag::Delayed(slot) => {
                        assert!(slot.0 < self.limits.delayed_chunks.max(1));
                    }
                    DiskTag::Barrier => assert_eq!(operation, DiskOperation::Flush),
                    DiskTag::Owed(slot) | DiskTag::Pulled(slot) => {
                        assert!(slot.0 < PULL_SLOTS);
                        let extent = extent_of(&operation).expect("it moves data");
                        assert!(extent.sectors() <= PULL_SECTORS);
                    }
                    DiskTag::Checkpoint
                    | DiskTag::OwedFlush
                    | DiskTag::BaseFlush
                    | DiskTag::ActivityFlush => {
                        assert_eq!(operation, DiskOperation::Flush);
                    }
                    DiskTag::Layout => {
                        assert!(matches!(operation, DiskOperation::FindHole { .. }));
                    }
                    DiskTag::Holes => {
                        let DiskOperation::FindLongHole { from } = operation else {
                            panic!("{operation:?} finds no long hole");
                        };
                        assert!(from.0 < self.capacity.0, "{from:?} is not on the disk");
                    }
                }
                self.disk.push((tag, operation));
            }
            Action::Send { class, message } => {
                assert!(message.belongs_on(class), "{message:?} on {class:?}");
                let (header, inline, length) = message.encode();
                assert_eq!(Message::decode(&header, &inline[..length]), Ok(message));
                if let Message::Pull { slot, extent } = message {
                    let twice = self.pulls.iter().any(|(busy, _)| *busy == slot);
                    assert!(!twice, "{slot:?} is asked for twice");
                    self.pulls.push((slot, extent));
                }
                match message.payload() {
                    Some(PayloadBuffer::Request(tag)) => self.expect(tag, Use::Request),
                    Some(PayloadBuffer::Source(slot)) => {
                        assert!(!self.at_disk(slot.into()), "{slot:?} is being read");
                    }
                    None => {}
                }
            }
            Action::Complete { tag, result } => {
                self.expect(tag, Use::Request);
                let read = self.at_disk(DiskTag::Request(tag));
                assert!(
                    !read,
                    "{tag:?} is answered ({result:?}) while the disk has its buffer"
                );
                self.tags[tag.0 as usize] = Use::Free;
            }
            Action::ReleaseReplica { tag } => {
                self.expect(tag, Use::Replica);
                assert!(
                    !self.at_disk(DiskTag::Replica(tag)),
                    "the disk has the buffer of {tag:?}"
                );
                self.tags[tag.0 as usize] = Use::Free;
            }
            Action::Persist { .. } => {
                assert!(!self.storing, "a second record before the first is stored");
                self.storing = true;
            }
            Action::SendForwarder { message, .. } => {
                let (header, inline, length) = message.encode();
                assert_eq!(Message::decode(&header, &inline[..length]), Ok(message));
            }
            Action::ReleasePulled { slot } => {
                assert!(
                    !self.at_disk(DiskTag::Pulled(slot)),
                    "the disk has the buffer of {slot:?}"
                );
            }
            Action::NoteHere { extent } => assert!(extent.within(self.capacity)),
            Action::StoreMissing => {
                assert!(!self.storing_missing, "twice at once");
                assert!(self.core.missing_to_store().is_some());
                self.storing_missing = true;
            }
            Action::StoreActivity => {
                assert!(!self.storing_activity, "twice at once");
                self.storing_activity = true;
            }
            Action::ApplyKept { .. } => {
                assert!(!self.applying, "twice at once");
                self.applying = true;
            }
            Action::Notify(Event::SharingChanged { .. }) => self.storing_sharing = true,
            Action::Notify(_) | Action::DiscardUnsent { .. } | Action::DropKept => {}
        }
    }

    fn at_disk(&self, tag: DiskTag) -> bool {
        self.disk.iter().any(|&(busy, _)| busy == tag)
    }

    fn expect(&self, tag: RequestTag, expected: Use) {
        assert_eq!(self.tags.get(tag.0 as usize), Some(&expected), "{tag:?}");
    }

    fn take_tag(&mut self, for_use: Use) -> Option<RequestTag> {
        let free = self.tags.iter().position(|&tag| tag == Use::Free)?;
        self.tags[free] = for_use;
        Some(RequestTag(free as u32))
    }
}

fn extent_of(operation: &DiskOperation) -> Option<Extent> {
    match *operation {
        DiskOperation::Read { extent, .. }
        | DiskOperation::Write { extent, .. }
        | DiskOperation::WriteZeroes { extent, .. }
        | DiskOperation::Keep { extent, .. }
        | DiskOperation::KeepZeroes { extent, .. }
        | DiskOperation::FindHole { extent } => Some(extent),
        DiskOperation::Flush | DiskOperation::FindLongHole { .. } => None,
    }
}
