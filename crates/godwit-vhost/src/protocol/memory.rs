//! The front end's messages about the guest's memory: a table of all of it, or slots, one by one.
//!
//! A region that stays as it is stays mapped: its pages, and the page tables for them, are still there when a machine
//! goes on that stood still.

use std::fs::File;
use std::sync::Arc;

use vhost::VhostUserMemoryRegionBase;
use vhost::vhost_user::message::VhostUserMemoryRegion;
use vhost::vhost_user::{Error, Result};

use crate::memory::post_copy::PostCopy;
use crate::memory::region::Region;
use crate::memory::relocated::Relocation;
use crate::memory::{GuestRam, MemoryError, peer_memory};
use crate::protocol::device::Device;
use crate::protocol::handler::{DRAIN, Handler, PROMPT};
use crate::protocol::session::{FrontEndCommand, FrontEndError};

/// Most slots of guest memory. QEMU refuses a back end that comes back with fewer.
pub(super) const MOST_SLOTS: usize = 64;

/// The regions of a table that are mapped already.
struct Known(Vec<Option<Arc<Region>>>);

impl Known {
    fn of(ram: Option<&GuestRam>, regions: &[VhostUserMemoryRegion], files: &[File]) -> Self {
        let mapped = |(region, file): (&VhostUserMemoryRegion, &File)| {
            let mut mapped = ram.map_or(&[][..], GuestRam::regions).iter();
            mapped.find(|mapped| mapped.is(region, file)).cloned()
        };
        Self(regions.iter().zip(files).map(mapped).collect())
    }

    /// Returns the front end's addresses of the other regions.
    fn others(&self, regions: &[VhostUserMemoryRegion]) -> Vec<u64> {
        let others = self.0.iter().zip(regions);
        let others = others.filter(|(known, _)| known.is_none());
        others.map(|(_, region)| region.user_addr).collect()
    }

    /// Maps the other regions.
    fn complete(
        self,
        regions: &[VhostUserMemoryRegion],
        files: &[File],
    ) -> std::result::Result<Vec<Arc<Region>>, MemoryError> {
        let all = self.0.into_iter().zip(regions.iter().zip(files));
        all.map(|(known, (region, file))| known.map_or_else(|| Region::map(region, file), Ok))
            .collect()
    }
}

impl<D: Device> Handler<D> {
    /// Replaces all of the memory.
    pub(super) fn replace_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: &[File],
    ) -> Result<()> {
        // Pages of memory that was still arriving may be missing, and nobody would wait for them.
        let before = self.ram.clone();
        let before = before.filter(|ram| !ram.arrival().is_under_way());
        let known = Known::of(before.as_deref(), regions, files);
        self.refuse_arriving(&known.others(regions))?;
        // Nothing is relocated between the mapping and its use.
        let mut relocation = Relocation::begin();
        let table = known.complete(regions, files);
        let table = table.map_err(|error| self.refuse(error))?;
        self.follow(&mut relocation, &table)?;
        let is_same = |ram: Arc<GuestRam>| {
            let pairs = ram.regions().iter().zip(&table);
            ram.regions().len() == table.len() && pairs.into_iter().all(|(a, b)| Arc::ptr_eq(a, b))
        };
        if !self.lacks_memory && before.is_some_and(is_same) {
            return Ok(());
        }
        let ram = GuestRam::of(table, Arc::default()).map_err(|error| self.refuse(error))?;
        let ram = Arc::new(ram);
        self.ram = Some(Arc::clone(&ram));
        self.lacks_memory = false;
        self.ask(FrontEndCommand::Memory { ram }, PROMPT)?;
        Ok(())
    }

    /// Maps arriving memory and returns its addresses in this process. The device gets the memory after the front end
    /// has acknowledged the addresses: from then on missing pages can be served.
    pub(super) fn prepare_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: &[File],
    ) -> Result<Vec<VhostUserMemoryRegionBase>> {
        let before = self.post_copy.as_ref().and_then(PostCopy::latest);
        let known = Known::of(before.as_deref(), regions, files);
        let mut relocation = Relocation::begin();
        let table = known.complete(regions, files);
        let table = table.map_err(|error| self.refuse(error))?;
        self.follow(&mut relocation, &table)?;
        let bases = table.iter().map(|region| region.place().0).collect();
        self.prepare(table)?;
        Ok(bases)
    }

    /// Adds a slot. Returns the slot's address in this process if its memory arrives: then the device gets the memory
    /// after an acknowledgement, as with [`Self::prepare_table`].
    pub(super) fn add_slot(
        &mut self,
        slot: &VhostUserMemoryRegion,
        file: &File,
    ) -> Result<Option<VhostUserMemoryRegionBase>> {
        let before = self.latest();
        let mut regions = before.map_or_else(Vec::new, |ram| ram.regions().to_vec());
        check_slot(slot, &regions).map_err(|error| self.refuse(error))?;
        self.refuse_arriving(&[slot.user_addr])?;
        let mut relocation = Relocation::begin();
        let region = Region::map(slot, file).map_err(|error| self.refuse(error))?;
        self.follow(&mut relocation, std::slice::from_ref(&region))?;
        let (base, _) = region.place();
        regions.push(region);
        self.change_slots(regions)?;
        Ok(self.listens().then_some(base))
    }

    /// Removes a slot. Requests under way keep the slot mapped until they end.
    pub(super) fn remove_slot(&mut self, slot: &VhostUserMemoryRegion) -> Result<()> {
        let before = self.latest();
        let mut regions = before.map_or_else(Vec::new, |ram| ram.regions().to_vec());
        // The front end names no file here.
        let found = regions.iter().position(|region| region.has_addresses(slot));
        let Some(found) = found else {
            return Err(self.refuse(MemoryError::NoSlot));
        };
        regions.remove(found);
        let _relocation = Relocation::begin();
        self.change_slots(regions)
    }

    fn change_slots(&mut self, regions: Vec<Arc<Region>>) -> Result<()> {
        if self.listens() {
            return self.prepare(regions);
        }
        let arrival = self.ram.as_ref().map(|ram| Arc::clone(ram.arrival()));
        let ram = GuestRam::of(regions, arrival.unwrap_or_default());
        self.ram = Some(Arc::new(ram.map_err(|error| self.refuse(error))?));
        self.give_memory()
    }

    /// Gives the device the memory. While a running ring lacks memory, the device stands still instead: QEMU divides a
    /// slot by removing it before it adds the parts.
    pub(super) fn give_memory(&mut self) -> Result<()> {
        let Some(ram) = self.ram.clone() else {
            return Ok(());
        };
        let mut running = self.rings.iter().filter(|ring| ring.running);
        if running.all(|ring| ring.lies_in(&ram)) {
            self.lacks_memory = false;
            self.ask(FrontEndCommand::Memory { ram }, PROMPT)?;
        } else if !std::mem::replace(&mut self.lacks_memory, true) {
            self.ask(FrontEndCommand::Still, DRAIN)?;
        }
        Ok(())
    }

    /// Waits for the pages of this memory from now on, with the device still.
    fn prepare(&mut self, regions: Vec<Arc<Region>>) -> Result<()> {
        let Some(post_copy) = &self.post_copy else {
            return Err(Error::InvalidOperation("post-copy was not announced"));
        };
        let ram = GuestRam::of(regions, post_copy.arrival());
        let ram = ram.map_err(|error| self.refuse(error))?;
        if self.rings.iter().any(|ring| ring.running) {
            // After this answer the front end no longer recognizes addresses of the old memory.
            self.ask(FrontEndCommand::Still, DRAIN)?;
        }
        let prepared = match &mut self.post_copy {
            Some(post_copy) => post_copy.prepare(ram),
            None => Ok(()),
        };
        prepared.map_err(|error| self.refuse(error))
    }

    /// Returns true if memory that is shared now arrives by post-copy.
    fn listens(&self) -> bool {
        self.post_copy.as_ref().is_some_and(PostCopy::listens)
    }

    /// Returns the memory that was shared last.
    fn latest(&self) -> Option<Arc<GuestRam>> {
        match self.listens() {
            true => self.post_copy.as_ref().and_then(PostCopy::latest),
            false => self.ram.clone(),
        }
    }

    fn refuse_arriving(&mut self, addresses: &[u64]) -> Result<()> {
        let asks = self.post_copy.is_none() && !addresses.is_empty();
        match asks && peer_memory::is_arriving(&self.socket, addresses) {
            true => Err(self.refuse(FrontEndError::StillArriving)),
            false => Ok(()),
        }
    }

    fn follow(&mut self, relocation: &mut Relocation, regions: &[Arc<Region>]) -> Result<()> {
        let followed = relocation.follow(regions);
        followed.map_err(|error| self.refuse(MemoryError::Moved(error)))
    }
}

fn check_slot(
    slot: &VhostUserMemoryRegion,
    regions: &[Arc<Region>],
) -> std::result::Result<(), MemoryError> {
    let ends = [slot.guest_phys_addr, slot.user_addr, slot.mmap_offset];
    let ends_somewhere = |start: u64| start.checked_add(slot.memory_size).is_some();
    if slot.memory_size == 0 || !ends.into_iter().all(ends_somewhere) {
        return Err(MemoryError::Slot);
    }
    if regions.len() >= MOST_SLOTS {
        return Err(MemoryError::Slots(MOST_SLOTS));
    }
    match regions.iter().any(|region| region.overlaps(slot)) {
        true => Err(MemoryError::Overlap),
        false => Ok(()),
    }
}

#[cfg(test)]
#[path = "memory_tests.rs"]
mod tests;
