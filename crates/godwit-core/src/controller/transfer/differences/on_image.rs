//! Moves of a disk without its image: the destination gets the differences from here, and the image from the image's
//! own place.
//!
//! The body finds the differences by comparison. From the start of the comparison until the disk has left, every write
//! of the guest counts as a difference, so the result stays true. A disk compared at its creation, without any
//! difference, need not be read for a move. A block that this node lacks is as in the image.
//!
//! Differences are copied by pre-copy in blocks of 4 KiB, or pushed. The guest's writes never go to both nodes, however
//! long the copy takes: at the destination a write of a partial block would find the rest of the block missing. With
//! push and pull the disk may leave before all differences are at the destination. The destination then lacks some
//! differences, which this node owes, and the rest of the missing blocks is in the image.

use crate::controller::block_set::BlockSet;
use crate::controller::cx::Cx;
use crate::controller::transfer::differences::Differences;
use crate::controller::transfer::heat::{BLOCK_SECTORS, CHUNK_SECTORS, each_run_by_heat};
use crate::controller::{
    Controller, ImageOffer, MAX_PULLED, MigrationOptions, Missing, StartError,
};
use crate::event::AbortReason;
use crate::planted::PlantedBug;
use crate::units::{Bytes, Extent, Lba};
use crate::wire::{Message, TrafficClass};

/// Priority of fetching blocks in a chunk of 64 KiB with a difference: the guest works there.
const BESIDE_WRITTEN: u8 = 2;
/// Priority of fetching blocks that this node has fetched: without prefetching, these blocks have been read.
const FETCHED: u8 = 1;
/// Priority of fetching blocks that nobody has asked for in all this time.
const NEVER_FETCHED: u8 = 0;

/// Amount of a disk that is as in its image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compared {
    /// Blocks of 4 KiB that differ, or may differ.
    pub different: Bytes,
    /// Blocks that are as in the image, and not holes there.
    pub same: Bytes,
}

/// Blocks of a disk that are as in its image.
#[derive(Debug)]
pub(in crate::controller) struct OnImage {
    /// Blocks that differ, or may differ.
    different: BlockSet,
    /// Blocks that are as in the image and not holes there; `None` during the comparison.
    same: Option<BlockSet>,
}

impl OnImage {
    /// Notes a write of the guest.
    fn written(&mut self, extent: Extent) {
        self.different.set(extent);
        if let Some(same) = &mut self.same {
            same.clear(extent);
        }
    }

    /// Returns the blocks to copy.
    pub(in crate::controller) const fn different(&self) -> &BlockSet {
        &self.different
    }
}

impl Differences {
    /// Notes a write of the guest to this node's disk.
    #[inline]
    pub(in crate::controller) fn differs_from_image(
        &mut self,
        cx: &mut Cx,
        extent: Extent,
        zeroes: bool,
    ) {
        let forgets = zeroes && cx.has_bug(PlantedBug::DiscardsAsInImage);
        if let Some(on_image) = self.on_image.as_mut().filter(|_| !forgets) {
            on_image.written(extent);
        }
    }

    /// Returns true if the disk moves without the blocks of its image.
    pub(in crate::controller) fn leaves_image(&self) -> bool {
        self.on_image
            .as_ref()
            .is_some_and(|on_image| on_image.same.is_some())
    }
}

impl Controller {
    /// Begins the body's comparison of the disk with its image. Returns the missing blocks, a bit for each block of 4
    /// KiB like [`Missing::words`]: these blocks are as in the image.
    ///
    /// # Errors
    /// [`StartError`]: the disk is not this node's, is leaving, or is too large.
    pub fn begin_comparison(&mut self) -> Result<Vec<u64>, StartError> {
        if !self.cx.authority.may_leave_rest() {
            return Err(StartError::NotServing);
        }
        if self.needs_source() {
            return Err(StartError::NeedsSource);
        }
        if self.outgoing.source.is_some() {
            return Err(StartError::Busy);
        }
        if self.cx.capacity.bytes() > MAX_PULLED {
            return Err(StartError::Option("size of a disk that is pulled"));
        }
        let mut on_image = OnImage {
            different: BlockSet::new(self.cx.capacity, BLOCK_SECTORS),
            same: None,
        };
        // Data of these writes may reach the disk behind the comparison.
        let forgets = self.cx.has_bug(PlantedBug::ComparedBesideWrites);
        for tag in self
            .cx
            .slots
            .select(|slot| !forgets && slot.is_request() && slot.is_write() && slot.is_at_disk())
        {
            if let Some(extent) = self.cx.slots[tag].extent {
                on_image.written(extent);
            }
        }
        self.differences.on_image = Some(Box::new(on_image));
        Ok(match &self.lacking {
            Some(lacking) => lacking.missing_words(),
            None => vec![0; Missing::word_length(self.cx.capacity)],
        })
    }

    /// Takes the comparison's result: blocks that differ from the image, and blocks that are the same and not holes.
    /// Blocks written since the comparison began differ. [`Self::start_source`] then moves the disk without the same
    /// blocks. Returns false if no comparison has begun, if a failed write has made the comparison useless, or if the
    /// number of words does not match the disk.
    pub fn end_comparison(&mut self, different: &[u64], same: &[u64]) -> bool {
        let capacity = self.cx.capacity;
        let fits = |words: &[u64]| words.len() == Missing::word_length(capacity);
        let Some(on_image) = self
            .differences
            .on_image
            .as_mut()
            .filter(|_| fits(different) && fits(same))
        else {
            return false;
        };
        let mut found = BlockSet::from_words(capacity, BLOCK_SECTORS, same);
        let differs = BlockSet::from_words(capacity, BLOCK_SECTORS, different);
        on_image.different.add(&differs);
        found.remove(&on_image.different);
        on_image.same = Some(found);
        true
    }

    /// Returns the result of a finished comparison including later writes, or `None` without such a result.
    pub fn compared(&self) -> Option<Compared> {
        let on_image = self.differences.on_image.as_ref()?;
        Some(Compared {
            different: Bytes(on_image.different.bytes()),
            same: Bytes(on_image.same.as_ref()?.bytes()),
        })
    }

    /// Returns the result as taken by [`Self::end_comparison`]: the differing blocks, and the same blocks.
    pub fn compared_words(&self) -> Option<[Vec<u64>; 2]> {
        let on_image = self.differences.on_image.as_ref()?;
        let words = |blocks: &BlockSet| blocks.words().collect();
        Some([words(&on_image.different), words(on_image.same.as_ref()?)])
    }

    /// Forgets the comparison: the disk moves as a whole, or not at all.
    pub fn forget_comparison(&mut self) {
        if self.outgoing.source.is_none() {
            self.differences.on_image = None;
        }
    }

    /// Handles a failed write of the guest. If this node lacks blocks of the write, these blocks count as different but
    /// are not here. Such blocks can be neither copied nor announced, so the disk cannot leave without its image.
    pub(in crate::controller) fn stays_where_not_written(&mut self, extent: Extent) {
        let lacking = self.lacking.as_ref();
        let lacks = lacking.is_some_and(|lacking| lacking.lacks_any_of(extent));
        if lacks
            && self.differences.on_image.is_some()
            && !self.abort_source(AbortReason::SourceDisk)
        {
            self.forget_comparison();
        }
    }

    /// Checks that the options allow a move without the image.
    pub(in crate::controller) fn check_on_image(
        &self,
        options: &MigrationOptions,
    ) -> Result<(), StartError> {
        // The destination takes announced blocks from the image or from this node, depending on this option.
        if self.differences.leaves_image() != (options.image != ImageOffer::None) {
            return Err(StartError::Option("comparison with the image"));
        }
        match options.image == ImageOffer::None || options.policy.may_leave_image(options) {
            true => Ok(()),
            false => Err(StartError::Option(
                "policy of a disk that stays on its image",
            )),
        }
    }

    /// Tells the destination the blocks it will lack, with their priority. Returns false without such blocks.
    pub(in crate::controller) fn tell_what_is_the_same(&mut self) -> bool {
        let (lacking, actions) = (&self.lacking, &mut self.cx.actions);
        let on_image = &self.differences.on_image;
        let Some((on_image, same)) = on_image
            .as_ref()
            .and_then(|it| Some((it, it.same.as_ref()?)))
            .filter(|(_, same)| same.count() > 0)
        else {
            return false;
        };
        let heat = |chunk: u64, part: Extent| {
            let chunk = Extent::new(Lba(chunk * u64::from(CHUNK_SECTORS)), CHUNK_SECTORS);
            let is_written = chunk.is_some_and(|chunk| on_image.different.touches(chunk));
            let lacks = lacking.as_ref().is_some_and(|it| it.lacks_any_of(part));
            match (is_written, lacks) {
                (true, _) => BESIDE_WRITTEN,
                (false, false) => FETCHED,
                (false, true) => NEVER_FETCHED,
            }
        };
        each_run_by_heat(same, heat, |start, sectors, heat| {
            actions.push_back(crate::action::Action::Send {
                class: TrafficClass::Control,
                message: Message::Lacks {
                    start,
                    sectors,
                    heat,
                    at_source: false,
                },
            });
        });
        true
    }
}
