//! The steps of an allocation, of the cleanup after a crash, and of a segment's removal.

use std::collections::HashSet;
use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::claim::{Entry, Stage, Verdict, same_node, tag, verdict};
use super::record::{Content, LONGEST_NAME, Record};
use super::space::{Extent, place};
use super::table::RECORDS;
use super::{Device, Found, Identity, open, reserve};
use crate::ownership::Title;
use crate::pool::PoolError;
use crate::pool::page::Page;

/// Number of attempts when another node wants the same part or name, and pause after each.
const TRIES: u32 = 50;
const REST: Duration = Duration::from_millis(1);
/// Number of pauses to wait for another node's decision, since that node may have died.
const PATIENCE: u32 = 50;
/// Bytes that are overwritten through one mapping.
const WINDOW_BYTES: u64 = 64 << 20;

/// Records that this process is allocating, as opposed to records left by a dead process.
static UNDER_WAY: Mutex<Option<HashSet<(Identity, usize)>>> = Mutex::new(None);

/// A claimed record, which becomes free again unless it becomes a segment.
struct Claim<'a> {
    device: &'a Device,
    index: usize,
    record: Record,
    tag: u64,
    /// Last stage that this process has written.
    stage: Stage,
}

impl Claim<'_> {
    /// Moves the record to another stage.
    ///
    /// # Errors
    /// [`PoolError::Changed`] if another process has changed the record, which then no longer belongs to this process.
    fn step(&mut self, to: Stage) -> Result<(), PoolError> {
        if !self.record.change(self.stage, to, self.tag) {
            return Err(PoolError::Changed(self.device.path.clone()));
        }
        self.stage = to;
        Ok(())
    }

    /// Checks that the record still belongs to this process.
    ///
    /// # Errors
    /// [`PoolError::Changed`].
    fn check(&self) -> Result<(), PoolError> {
        match self.record.stage() == Ok((self.stage, self.tag)) {
            true => Ok(()),
            false => Err(PoolError::Changed(self.device.path.clone())),
        }
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        if self.stage != Stage::Held {
            // A record that was freed or taken over stays as it is.
            let _ = self.record.change(self.stage, Stage::Free, self.tag);
        }
        under_way(|all| all.remove(&(self.device.identity, self.index)));
    }
}

/// Returns true while this process is between two steps of an allocation. In the meantime, no other process may begin
/// to act for the node.
pub fn is_allocating() -> bool {
    under_way(|all| !all.is_empty())
}

fn under_way<R>(change: impl FnOnce(&mut HashSet<(Identity, usize)>) -> R) -> R {
    let mut all = UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner);
    change(all.get_or_insert_default())
}

impl Device {
    /// Allocates a segment owned by `owner`, without a trace of earlier guests' memory. Stops if `ends` returns true,
    /// since this process must then not go on.
    pub(in crate::pool) fn allocate(
        &self,
        name: &str,
        bytes: u64,
        owner: &str,
        ends: &dyn Fn() -> bool,
    ) -> Result<Found, PoolError> {
        if name.is_empty() || name.len() > LONGEST_NAME {
            return Err(PoolError::Damaged {
                name: name.to_owned(),
                why: "its name is too long",
            });
        }
        let mut claim = self.claim(owner)?;
        let extent = self.announce(&mut claim, name, bytes, owner)?;
        claim.step(Stage::Taken)?;
        self.wipe(extent, &claim, ends)?;
        claim.step(Stage::Held)?;
        let index = claim.index;
        drop(claim);
        let found = self.find(name)?;
        match found.index == index {
            true => Ok(found),
            false => Err(PoolError::NoSegment(name.to_owned())),
        }
    }

    /// Chooses a part of the device that no record has.
    fn choose(&self, used: &[Extent], bytes: u64) -> Result<Extent, PoolError> {
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
    }

    /// Claims a free record.
    fn claim(&self, owner: &str) -> Result<Claim<'_>, PoolError> {
        let mut number = [0; 8];
        random(&mut number).map_err(PoolError::io(&self.path))?;
        let tag = tag(owner, u64::from_le_bytes(number));
        for index in 0..RECORDS {
            let record = self.table.record(index);
            if !matches!(record.stage(), Ok((Stage::Free, _))) {
                continue;
            }
            // Noted before the claim, so that the record is never taken for a dead process's.
            let key = (self.identity, index);
            if !under_way(|all| all.insert(key)) {
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
                stage: Stage::Claimed,
            });
        }
        self.used()?;
        Err(PoolError::TooMany(RECORDS))
    }

    /// Announces segments until one of them belongs to this node.
    fn announce(
        &self,
        claim: &mut Claim<'_>,
        name: &str,
        bytes: u64,
        owner: &str,
    ) -> Result<Extent, PoolError> {
        let mut id = [0; 16];
        random(&mut id).map_err(PoolError::io(&self.path))?;
        for _ in 0..TRIES {
            let used = self.used()?.into_iter();
            let used: Vec<Extent> = used.map(|entry| entry.extent).collect();
            let extent = self.choose(&used, bytes)?;
            let content = Content {
                name: name.to_owned(),
                extent,
                id,
            };
            claim.check()?;
            let title = Title::new(owner);
            claim.record.write(claim.index, &content, &title);
            claim.step(Stage::Announced)?;
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
            claim.step(Stage::Claimed)?;
            std::thread::sleep(REST);
        }
        // A node that died may have announced the name.
        let same = self.used()?.into_iter().find(|entry| entry.name == name);
        Err(same.map_or(PoolError::Busy, |entry| self.taken(name, entry.index)))
    }

    /// Returns the verdict on an announcement, after a bounded wait for a node that wants the same and may give way.
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

    /// Builds the error for a name that another segment has, or is about to get.
    fn taken(&self, name: &str, index: usize) -> PoolError {
        let title = self.table.record(index).header().title();
        PoolError::Exists {
            name: name.to_owned(),
            owner: title.map(|title| title.owner).unwrap_or_default(),
        }
    }

    /// Overwrites the part with zeroes, as long as the claim is valid: an earlier guest may have had the part.
    fn wipe(
        &self,
        extent: Extent,
        claim: &Claim<'_>,
        ends: &dyn Fn() -> bool,
    ) -> Result<(), PoolError> {
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
            claim.check()?;
            if ends() {
                return Err(PoolError::Ending);
            }
            let bytes = window.min(extent.end() - at);
            let page = Page::map_part(&file, at, bytes).map_err(PoolError::io(&self.path))?;
            page.wipe().map_err(PoolError::io(&self.path))?;
            at += bytes;
        }
        Ok(())
    }

    /// Frees the records of `owner`'s allocations that ended between two steps.
    pub(in crate::pool) fn clear(&self, owner: &str) {
        let own = tag(owner, 0);
        for index in 0..RECORDS {
            let record = self.table.record(index);
            let left = || {
                let stage = record.stage().ok();
                stage.filter(|(stage, whose)| stage.is_unfinished() && same_node(*whose, own))
            };
            let key = (self.identity, index);
            // While the record is noted as under way, no thread of this process begins with the record.
            if left().is_some() && under_way(|all| all.insert(key)) {
                if let Some((stage, whose)) = left() {
                    // If the change fails, another process has the record.
                    let _ = record.change(stage, Stage::Free, whose);
                }
                under_way(|all| all.remove(&key));
            }
        }
    }

    /// Removes a segment. Only the segment's owner may do so.
    ///
    /// # Errors
    /// [`PoolError::Changed`] if the record is free or belongs to another segment by now.
    pub(in crate::pool) fn remove(&self, found: &Found) -> Result<(), PoolError> {
        let is_same = self
            .content(found.index)
            .is_ok_and(|content| content.id == found.id);
        match is_same && found.record.change(Stage::Held, Stage::Free, 0) {
            true => Ok(()),
            false => Err(PoolError::Changed(self.path.clone())),
        }
    }
}

/// Fills the bytes with random data.
fn random(bytes: &mut [u8]) -> io::Result<()> {
    rustix::rand::getrandom(bytes, rustix::rand::GetRandomFlags::empty())?;
    Ok(())
}

#[cfg(test)]
#[path = "allocation_tests.rs"]
mod tests;
