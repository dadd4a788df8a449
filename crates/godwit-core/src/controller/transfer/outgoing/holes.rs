//! Long holes of a disk that is pushed and pulled, found before the disk leaves. If the destination's image reads as
//! zeroes, holes need no announcement: the destination has every block that it does not lack.
//!
//! A place counts as a hole only if this migration has sent nothing there, and if no write of the guest was under way
//! during the body's search. Blocks written later by the guest are lacking, as usual.

use core::time::Duration;

use crate::action::{Action, Content, DiskOperation, DiskTag};
use crate::controller::Controller;
use crate::controller::block_set::BlockSet;
use crate::controller::cx::Cx;
use crate::controller::policy::Policy;
use crate::controller::transfer::heat::BLOCK_SECTORS;
use crate::controller::transfer::outgoing::Outgoing;
use crate::controller::transfer::outgoing::{MAX_PULLED, Source};
use crate::controller::{MigrationOptions, OlderCopy};
use crate::planted::PlantedBug;
use crate::request::RequestError;
use crate::units::{Extent, Lba, Sectors, Time};

/// Maximum time the disk waits for holes before it leaves. Other holes are found while they are pulled.
const LONGEST_SEARCH: Duration = Duration::from_secs(2);

/// Searches of the body before the guest gets a turn, and the length of this turn.
const LOOKS: u32 = 8;
const TURN: Duration = Duration::from_millis(1);

/// Maximum number of writes during a search of the body. After more writes the search was in vain.
const MOST_WRITTEN: usize = 256;

/// Knowledge about the destination's image, which read as zeroes at first, and about this disk's holes.
#[derive(Debug)]
pub(in crate::controller) struct Holes {
    /// Blocks sent at least in part; `None` if the destination's image may have any content.
    sent: Option<BlockSet>,
    search: Option<Search>,
}

/// A search for holes from the start of the disk to its end.
#[derive(Debug)]
struct Search {
    from: Lba,
    ends: Time,
    looks: u32,
    /// Time of the body's next search.
    resumes: Option<Time>,
    /// Extents written since the body's search began, if a search is under way.
    written: Option<Vec<Extent>>,
}

impl Holes {
    pub(super) fn new(options: &MigrationOptions, capacity: Sectors) -> Self {
        let reads_as_zeroes =
            options.older_copy == OlderCopy::Zeroes && capacity.bytes() <= MAX_PULLED;
        Self {
            sent: reads_as_zeroes.then(|| BlockSet::new(capacity, BLOCK_SECTORS)),
            search: None,
        }
    }

    /// Notes data or zeroes of this part of the disk that are about to be sent.
    #[inline]
    pub(in crate::controller) fn sends(&mut self, extent: Extent) {
        if let Some(sent) = &mut self.sent {
            sent.set(extent);
        }
    }

    /// Notes a write of the guest.
    #[inline]
    pub(super) fn written(&mut self, extent: Extent) {
        let search = self.search.as_mut();
        if let Some(written) = search.and_then(|search| search.written.as_mut())
            && written.len() <= MOST_WRITTEN
        {
            written.push(extent);
        }
    }

    /// Begins the search: the disk is pushed and pulled from now on.
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

    /// Returns true if the disk must not leave yet.
    pub(super) const fn is_searching(&self) -> bool {
        self.search.is_some()
    }

    pub(super) const fn deadline(&self) -> Option<Time> {
        match &self.search {
            Some(search) => search.resumes,
            None => None,
        }
    }
}

impl Search {
    /// Takes the body's report. Returns the hole and the extents written since the search began, if the report is of
    /// use.
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
    /// Ends a search that is complete, late, or cut short by an ordered switchover.
    fn give_up_search(&mut self, now: Time) {
        let is_ordered = self.is_ordered();
        let capacity = self.capacity;
        self.holes.search.take_if(|search| {
            let is_late = search.ends <= now || search.from.0 >= capacity.0;
            is_ordered || is_late
        });
    }

    /// Leaves out a hole, except for the extents written meanwhile.
    fn leave_out(&mut self, (start, end, written): (Lba, Lba, Vec<Extent>), forgets: bool) {
        let policy = &mut self.policy;
        let Some(sent) = self.holes.sent.as_ref().filter(|_| policy.pulls()) else {
            return;
        };
        policy.is_hole(start, end, sent);
        for extent in written {
            if !forgets && extent.start() < end && extent.end() > start {
                policy.give_up(self.pass, core::iter::once(extent), start);
            }
        }
    }
}

impl Outgoing {
    /// Continues the search for holes, if there is one.
    pub(super) fn search_holes(&mut self, cx: &mut Cx) {
        let now = cx.now;
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
        // Data of these writes may reach the disk behind the body's search.
        let under_way = cx
            .slots
            .select(|slot| slot.is_request() && slot.is_write() && slot.is_at_disk());
        let under_way = under_way.into_iter().filter_map(|tag| cx.slots[tag].extent);
        search.written = Some(under_way.collect());
        self.looking_for_holes = true;
        cx.act(Action::Disk {
            tag: DiskTag::Holes,
            operation: DiskOperation::FindLongHole { from },
        });
    }
}

impl Controller {
    /// Handles the body's report. The report may belong to a finished migration, so nothing relies on it.
    pub(in crate::controller) fn long_hole_found(&mut self, found: Result<Content, RequestError>) {
        self.outgoing.looking_for_holes = false;
        let forgets = self.cx.has_bug(PlantedBug::HolesOverWrites);
        let forgets_sent = self.cx.has_bug(PlantedBug::HolesOverSent);
        if let Some(source) = &mut self.outgoing.source {
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
