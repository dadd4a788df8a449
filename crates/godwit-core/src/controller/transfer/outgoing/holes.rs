//! Where a disk that is pushed and pulled has long holes, found out before it leaves. Where the destination's image reads
//! as zeroes, nothing has to be told of them: what the destination does not lack it has.
//!
//! A place counts as a hole only if this migration has sent nothing there, and if no write of the guest was under way
//! while the body looked. What the guest writes afterwards is lacking, as ever.

use core::time::Duration;

use crate::action::{Action, Content, DiskOperation, DiskTag};
use crate::controller::Controller;
use crate::controller::transfer::dirty::DirtyBitmap;
use crate::controller::transfer::outgoing::{MAX_PULLED, Source};
use crate::controller::transfer::policy::Policy;
use crate::controller::transfer::push_pull::BLOCK_SECTORS;
use crate::controller::{MigrationOptions, OlderCopy};
use crate::planted::PlantedBug;
use crate::request::RequestError;
use crate::units::{Extent, Lba, Sectors, Time};

/// How long the disk waits for holes to be found before it leaves. Others are found as they are pulled.
const LONGEST_SEARCH: Duration = Duration::from_secs(2);

/// How often the body looks before the guest gets a turn, and how long that is.
const LOOKS: u32 = 8;
const TURN: Duration = Duration::from_millis(1);

/// Writes that may come while the body looks. After more it has looked in vain.
const MOST_WRITTEN: usize = 256;

/// What is known of the destination's image, which read as zeroes at first, and of this disk's holes.
#[derive(Debug)]
pub(in crate::controller) struct Holes {
    /// Blocks of which something was sent; nothing where the destination's image may hold anything.
    sent: Option<DirtyBitmap>,
    search: Option<Search>,
}

/// A search for holes from the start of the disk to its end.
#[derive(Debug)]
struct Search {
    from: Lba,
    ends: Time,
    looks: u32,
    /// When the body looks again.
    resumes: Option<Time>,
    /// What was written since the body was asked, if it has been asked.
    written: Option<Vec<Extent>>,
}

impl Holes {
    pub(super) fn new(options: &MigrationOptions, capacity: Sectors) -> Self {
        let reads_as_zeroes =
            options.older_copy == OlderCopy::Zeroes && capacity.bytes() <= MAX_PULLED;
        Self {
            sent: reads_as_zeroes.then(|| DirtyBitmap::new(capacity, BLOCK_SECTORS)),
            search: None,
        }
    }

    /// Data of this part of the disk, or zeroes, is about to be sent.
    #[inline]
    pub(in crate::controller) fn sends(&mut self, extent: Extent) {
        if let Some(sent) = &mut self.sent {
            sent.set(extent);
        }
    }

    /// The guest writes here.
    #[inline]
    pub(super) fn written(&mut self, extent: Extent) {
        let search = self.search.as_mut();
        if let Some(written) = search.and_then(|search| search.written.as_mut())
            && written.len() <= MOST_WRITTEN
        {
            written.push(extent);
        }
    }

    /// The disk is pushed and pulled from now on.
    pub(super) fn begin(&mut self, now: Time) {
        if self.sent.is_some() {
            self.search = Some(Search {
                from: Lba(0),
                ends: now.after(LONGEST_SEARCH),
                looks: 0,
                resumes: None,
                written: None,
            });
        }
    }

    /// Whether the disk must not leave yet.
    pub(super) const fn is_searching(&self) -> bool {
        self.search.is_some()
    }

    /// When the body looks again.
    pub(super) const fn deadline(&self) -> Option<Time> {
        match &self.search {
            Some(search) => search.resumes,
            None => None,
        }
    }
}

impl Search {
    /// What the body reported is a hole but for what was written since it was asked. Whether the search goes on.
    fn looked(
        &mut self,
        found: Result<Content, RequestError>,
        capacity: Sectors,
    ) -> Option<(Lba, Lba, Vec<Extent>)> {
        let written = self.written.take()?;
        let Ok(Content::LongHole { start, end }) = found else {
            self.from = Lba(capacity.0);
            return None;
        };
        let end = end.min(Lba(capacity.0));
        self.from = end.max(Lba(self.from.0 + 1));
        let in_vain = written.len() > MOST_WRITTEN;
        (start < end && !in_vain).then_some((start, end, written))
    }
}

impl Source {
    /// The search comes to its end, whatever has not been found.
    fn give_up_search(&mut self, now: Time) {
        let is_ordered = self.is_ordered();
        let capacity = self.capacity;
        self.holes.search.take_if(|search| {
            let is_late = search.ends <= now || search.from.0 >= capacity.0;
            is_ordered || is_late
        });
    }

    /// These sectors are a hole, but for what was written.
    fn leave_out(&mut self, (start, end, written): (Lba, Lba, Vec<Extent>), forgets: bool) {
        let (Policy::PushPull(push), Some(sent)) = (&mut self.policy, &self.holes.sent) else {
            return;
        };
        push.is_hole(start, end, sent);
        for extent in written {
            if !forgets && extent.start() < end && extent.end() > start {
                push.give_up(extent);
            }
        }
    }
}

impl Controller {
    /// Goes on with the search for holes, if there is one.
    pub(super) fn search_holes(&mut self) {
        let now = self.now;
        let is_looking = self.looking_for_holes;
        let Some(source) = &mut self.source else {
            return;
        };
        source.give_up_search(now);
        let Some(search) = source.holes.search.as_mut().filter(|_| !is_looking) else {
            return;
        };
        if search.resumes.is_some_and(|at| at > now) {
            return;
        }
        if search.resumes.take().is_some() {
            search.looks = 0;
        }
        if search.looks == LOOKS {
            search.resumes = Some(now.after(TURN));
            return;
        }
        search.looks += 1;
        let from = search.from;
        // Their data may reach the disk behind the body's look.
        let under_way = self
            .slots
            .select(|slot| slot.is_request() && slot.is_write() && slot.is_at_disk());
        let under_way = under_way
            .into_iter()
            .filter_map(|tag| self.slots[tag].extent);
        search.written = Some(under_way.collect());
        self.looking_for_holes = true;
        self.act(Action::Disk {
            tag: DiskTag::Holes,
            operation: DiskOperation::FindLongHole { from },
        });
    }

    /// The body has looked. What it says may be about a migration that is over: nobody relies on it.
    pub(in crate::controller) fn long_hole_found(&mut self, found: Result<Content, RequestError>) {
        self.looking_for_holes = false;
        let forgets = self.has_bug(PlantedBug::HolesOverWrites);
        let forgets_sent = self.has_bug(PlantedBug::HolesOverSent);
        if let Some(source) = &mut self.source {
            let capacity = source.capacity;
            if let Some(sent) = source.holes.sent.as_mut().filter(|_| forgets_sent) {
                sent.empty();
            }
            let search = source.holes.search.as_mut();
            if let Some(hole) = search.and_then(|search| search.looked(found, capacity)) {
                source.leave_out(hole, forgets);
            }
        }
        self.pump();
    }
}
