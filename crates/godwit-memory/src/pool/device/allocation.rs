//! The steps of an allocation, of what is left of one, and of a segment's end.

use std::collections::HashSet;
use std::io;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::claim::{Entry, Stage, Verdict, tag, verdict};
use super::record::{Content, LONGEST_NAME, Record};
use super::space::{Extent, place};
use super::table::RECORDS;
use super::{Device, Found, open, reserve};
use crate::ownership::Title;
use crate::pool::PoolError;
use crate::pool::page::Page;

/// How often a node looks again at what another one wants as well, and how long it rests before that.
const TRIES: u32 = 50;
const REST: Duration = Duration::from_millis(1);
/// How often it waits for another one without anything having changed: it may have died.
const PATIENCE: u32 = 50;
/// Bytes that are overwritten through one mapping.
const WINDOW_BYTES: u64 = 64 << 20;

/// The records for which this process is between two steps: what an earlier one left is told from them.
static UNDER_WAY: Mutex<Option<HashSet<(PathBuf, usize)>>> = Mutex::new(None);

/// A record that this process has claimed, and gives back unless it becomes a segment.
struct Claim<'a> {
    device: &'a Device,
    index: usize,
    record: Record,
    tag: u64,
    is_kept: bool,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        if !self.is_kept {
            self.record.set_stage(Stage::Free, self.tag);
        }
        under_way(|all| all.remove(&(self.device.path.clone(), self.index)));
    }
}

fn under_way<R>(change: impl FnOnce(&mut HashSet<(PathBuf, usize)>) -> R) -> R {
    let mut all = UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner);
    change(all.get_or_insert_default())
}

impl Device {
    /// Allocates a segment that nobody else can read an earlier guest's memory from, owned by `owner`.
    pub(in crate::pool) fn allocate(
        &self,
        name: &str,
        bytes: u64,
        owner: &str,
    ) -> Result<Found, PoolError> {
        let choose = |used: &[Extent]| {
            place(self.head.space(), used, bytes).map_err(|none| match none.free >= bytes {
                true => PoolError::InPieces {
                    largest: none.largest,
                    wanted: bytes,
                },
                false => PoolError::Full {
                    free: none.free,
                    wanted: bytes,
                },
            })
        };
        self.take(name, owner, choose, |extent| self.wipe(extent))
    }

    /// Makes a segment, owned by `owner`, of a part that a QEMU uses already.
    pub(in crate::pool) fn adopt(
        &self,
        name: &str,
        extent: Extent,
        owner: &str,
    ) -> Result<Found, PoolError> {
        let align = self.head.align;
        let is_whole = extent.offset.is_multiple_of(align) && extent.bytes.is_multiple_of(align);
        if !is_whole || extent.bytes == 0 || !self.head.space().has(extent) {
            return Err(PoolError::Elsewhere(extent));
        }
        let choose = |used: &[Extent]| match used.iter().any(|other| other.overlaps(extent)) {
            true => Err(PoolError::Elsewhere(extent)),
            false => Ok(extent),
        };
        self.take(name, owner, choose, |extent| {
            open(&self.path)
                .and_then(|(file, geometry)| reserve(&self.path, &file, geometry, extent))
        })
    }

    /// The steps of an allocation, whoever chooses the place.
    fn take(
        &self,
        name: &str,
        owner: &str,
        choose: impl Fn(&[Extent]) -> Result<Extent, PoolError>,
        prepare: impl Fn(Extent) -> Result<(), PoolError>,
    ) -> Result<Found, PoolError> {
        if name.is_empty() || name.len() > LONGEST_NAME {
            return Err(PoolError::Damaged {
                name: name.to_owned(),
                why: "its name is too long",
            });
        }
        let mut claim = self.claim(owner)?;
        let extent = self.announce(&claim, name, owner, choose)?;
        let (index, tag) = (claim.index, claim.tag);
        claim.record.set_stage(Stage::Taken, tag);
        prepare(extent)?;
        claim.record.set_stage(Stage::Held, tag);
        claim.is_kept = true;
        drop(claim);
        let found = self.find(name)?;
        match found.index == index {
            true => Ok(found),
            false => Err(PoolError::NoSegment(name.to_owned())),
        }
    }

    /// Takes a free record.
    fn claim(&self, owner: &str) -> Result<Claim<'_>, PoolError> {
        let tag = tag(owner);
        for index in 0..RECORDS {
            let record = self.table.record(index);
            if !matches!(record.stage(), Ok((Stage::Free, _))) {
                continue;
            }
            // Known before it is claimed, so that it is never taken for what a dead process left.
            let key = (self.path.clone(), index);
            if !under_way(|all| all.insert(key.clone())) {
                continue;
            }
            if !record.claim(tag) {
                under_way(|all| all.remove(&key));
                continue;
            }
            return Ok(Claim {
                device: self,
                index,
                record,
                tag,
                is_kept: false,
            });
        }
        Err(PoolError::TooMany(RECORDS))
    }

    /// Announces segments until one is the node's.
    fn announce(
        &self,
        claim: &Claim<'_>,
        name: &str,
        owner: &str,
        choose: impl Fn(&[Extent]) -> Result<Extent, PoolError>,
    ) -> Result<Extent, PoolError> {
        let record = &claim.record;
        let mut id = [0; 16];
        rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty())
            .map_err(io::Error::from)
            .map_err(PoolError::io(&self.path))?;
        for _ in 0..TRIES {
            let used = self.used()?.into_iter();
            let used: Vec<Extent> = used.map(|entry| entry.extent).collect();
            let extent = choose(&used)?;
            let content = Content {
                name: name.to_owned(),
                extent,
                id,
            };
            record.write(claim.index, &content, &Title::new(owner));
            record.set_stage(Stage::Announced, claim.tag);
            let own = Entry {
                index: claim.index,
                stage: Stage::Announced,
                name: name.to_owned(),
                extent,
            };
            match self.settle(&own)? {
                Verdict::Mine => return Ok(extent),
                Verdict::NameTaken(other) => return Err(self.taken(name, other)),
                Verdict::Wait(_) | Verdict::Again => {}
            }
            record.set_stage(Stage::Claimed, claim.tag);
            std::thread::sleep(REST);
        }
        // A node that died may have announced the name.
        let same = self.used()?.into_iter().find(|entry| entry.name == name);
        Err(same.map_or(PoolError::Busy, |entry| self.taken(name, entry.index)))
    }

    /// What becomes of an announcement: waits a while for a node that wants the same and may give it up.
    fn settle(&self, own: &Entry<String>) -> Result<Verdict, PoolError> {
        let mut found = Verdict::Again;
        for _ in 0..PATIENCE {
            found = verdict(own, &self.used()?);
            if !matches!(found, Verdict::Wait(_)) {
                break;
            }
            std::thread::sleep(REST);
        }
        Ok(found)
    }

    /// A segment has the name, or is about to get it.
    fn taken(&self, name: &str, index: usize) -> PoolError {
        let title = self.table.record(index).header().title();
        PoolError::Exists {
            name: name.to_owned(),
            owner: title.map(|title| title.owner).unwrap_or_default(),
        }
    }

    /// Overwrites a part that an earlier guest may have had.
    fn wipe(&self, extent: Extent) -> Result<(), PoolError> {
        let (file, geometry) = open(&self.path)?;
        if extent.end() > geometry.bytes {
            return Err(PoolError::Table {
                path: self.path.clone(),
                why: String::from("the device has become smaller"),
            });
        }
        reserve(&self.path, &file, geometry, extent)?;
        let window = WINDOW_BYTES.next_multiple_of(self.head.align);
        let mut at = extent.offset;
        while at < extent.end() {
            let bytes = window.min(extent.end() - at);
            let page = Page::map_part(&file, at, bytes).map_err(PoolError::io(&self.path))?;
            page.wipe();
            at += bytes;
        }
        Ok(())
    }

    /// Frees what `owner` left of allocations that ended between two steps.
    pub(in crate::pool) fn clear(&self, owner: &str) {
        let own = tag(owner);
        for index in 0..RECORDS {
            let record = self.table.record(index);
            let is_left = || {
                let stage = record.stage();
                stage.is_ok_and(|(stage, whose)| stage.is_unfinished() && whose == own)
            };
            let key = (self.path.clone(), index);
            // While it is noted as under way nobody in this process begins with it.
            if is_left() && under_way(|all| all.insert(key.clone())) {
                if is_left() {
                    record.set_stage(Stage::Free, own);
                }
                under_way(|all| all.remove(&key));
            }
        }
    }

    /// Removes a segment, which its owner alone does.
    pub(in crate::pool) fn remove(&self, found: &Found) {
        found.record.set_stage(Stage::Free, 0);
    }
}

#[cfg(test)]
#[path = "allocation_tests.rs"]
mod tests;
