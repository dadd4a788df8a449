//! A disk that was created from an image moves without what it has of that: the destination gets the rest from here,
//! and the image from where it is kept.
//!
//! What differs is found by comparing, which is for the body. From the moment at which the body begins until the disk has
//! left, everything that the guest writes counts as different: what was found stays true, and a disk that was compared when
//! it was created, of which nothing differed yet, need not be read when it moves. A block that this node lacks is as it is in
//! the image.
//!
//! What differs is copied by pre-copy in blocks of 4 KiB, or pushed. The guest's writes never go to both nodes, however
//! long that takes: at the destination a write of a part of a block would find the rest of it missing. With push and pull
//! the disk may leave before all that differs is there. Then the destination lacks some of it, which this node owes, and
//! the rest of what it lacks is in the image.

use crate::controller::transfer::dirty::DirtyBitmap;
use crate::controller::transfer::push_pull::{BLOCK_SECTORS, CHUNK_SECTORS, each_run_by_heat};
use crate::controller::{
    Controller, ImageOffer, MAX_PULLED, MigrationOptions, Missing, PolicyOptions, StartError,
};
use crate::event::AbortReason;
use crate::planted::PlantedBug;
use crate::units::{Bytes, Extent, Lba, MAX_EXTENT_SECTORS};
use crate::wire::{Message, TrafficClass};

/// How soon the destination is to fetch what lies in a chunk of 64 KiB in which something differs: the guest works there.
const BESIDE_WRITTEN: u8 = 2;
/// How soon it is to fetch what this node has fetched: without prefetching somebody has read it.
const FETCHED: u8 = 1;
/// How soon it is to fetch what nobody has asked for in all that time.
const NEVER_FETCHED: u8 = 0;

/// How much of a disk is as it is in its image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compared {
    /// What differs, or may, in blocks of 4 KiB.
    pub different: Bytes,
    /// What is as the image has it, and no hole there.
    pub same: Bytes,
}

/// What of a disk is as it is in its image.
#[derive(Debug)]
pub(in crate::controller) struct OnImage {
    /// Blocks that differ, or may.
    different: DirtyBitmap,
    /// Blocks that are as the image has them, and are not holes there; nothing while that is being found out.
    same: Option<DirtyBitmap>,
}

impl OnImage {
    /// The guest writes here.
    fn written(&mut self, extent: Extent) {
        self.different.set(extent);
        if let Some(same) = &mut self.same {
            same.clear(extent);
        }
    }

    /// What is to be copied.
    pub(in crate::controller::transfer) const fn different(&self) -> &DirtyBitmap {
        &self.different
    }
}

impl Controller {
    /// The body begins to compare the disk with the image that it was created from. What the disk lacks now, a bit for
    /// each block of 4 KiB as [`Missing::words`] has them, is as it is there.
    ///
    /// # Errors
    /// [`StartError`]: the disk is not this node's, is leaving, or is too large.
    pub fn begin_comparison(&mut self) -> Result<Vec<u64>, StartError> {
        if !self.authority.may_leave_rest() {
            return Err(StartError::NotServing);
        }
        if self.needs_source() {
            return Err(StartError::NeedsSource);
        }
        if self.source.is_some() {
            return Err(StartError::Busy);
        }
        if self.capacity.bytes() > MAX_PULLED {
            return Err(StartError::Option("size of a disk that is pulled"));
        }
        let mut on_image = OnImage {
            different: DirtyBitmap::new(self.capacity, BLOCK_SECTORS),
            same: None,
        };
        // Their data may reach the disk behind the comparison.
        let forgets = self.has_bug(PlantedBug::ComparedBesideWrites);
        for tag in self
            .slots
            .select(|slot| !forgets && slot.is_request() && slot.is_write() && slot.is_at_disk())
        {
            if let Some(extent) = self.slots[tag].extent {
                on_image.written(extent);
            }
        }
        self.on_image = Some(Box::new(on_image));
        Ok(match &self.lacking {
            Some(lacking) => lacking.missing_words(),
            None => vec![0; Missing::word_length(self.capacity)],
        })
    }

    /// What the comparison found: blocks that differ from the image, and blocks that are the same and no holes there.
    /// What was written since it began differs. [`Self::start_source`] then moves the disk without what is the same.
    /// False when no comparison has begun, a write has failed since that has made it of no use, or these are not as many
    /// words as the disk has.
    pub fn end_comparison(&mut self, different: &[u64], same: &[u64]) -> bool {
        let capacity = self.capacity;
        let fits = |words: &[u64]| words.len() == Missing::word_length(capacity);
        let Some(on_image) = self
            .on_image
            .as_mut()
            .filter(|_| fits(different) && fits(same))
        else {
            return false;
        };
        let mut found = DirtyBitmap::from_words(capacity, BLOCK_SECTORS, same);
        each_run(&on_image.different, |written| found.clear(written));
        let differs = DirtyBitmap::from_words(capacity, BLOCK_SECTORS, different);
        each_run(&differs, |extent| {
            on_image.different.set(extent);
            found.clear(extent);
        });
        on_image.same = Some(found);
        true
    }

    /// What is known from a comparison that has ended, and from what was written since; nothing when that is not known.
    pub fn compared(&self) -> Option<Compared> {
        let on_image = self.on_image.as_ref()?;
        Some(Compared {
            different: Bytes(on_image.different.bytes()),
            same: Bytes(on_image.same.as_ref()?.bytes()),
        })
    }

    /// The same as [`Self::end_comparison`] takes it: the blocks that differ, and those that are the same.
    pub fn compared_words(&self) -> Option<[Vec<u64>; 2]> {
        let on_image = self.on_image.as_ref()?;
        let words = |blocks: &DirtyBitmap| blocks.words().collect();
        Some([words(&on_image.different), words(on_image.same.as_ref()?)])
    }

    /// The disk moves as a whole, or not at all.
    pub fn forget_comparison(&mut self) {
        if self.source.is_none() {
            self.on_image = None;
        }
    }

    /// The guest writes here, to this node's disk.
    #[inline]
    pub(in crate::controller) fn differs_from_image(&mut self, extent: Extent, zeroes: bool) {
        let forgets = zeroes && self.has_bug(PlantedBug::DiscardsAsInImage);
        if let Some(on_image) = self.on_image.as_mut().filter(|_| !forgets) {
            on_image.written(extent);
        }
    }

    /// A write of the guest here has failed. Where this node lacks what it went over, that counts as different and is
    /// not here, so it can neither be copied nor be told of: the disk does not leave like this.
    pub(in crate::controller) fn stays_where_not_written(&mut self, extent: Extent) {
        let lacking = self.lacking.as_ref();
        let lacks = lacking.is_some_and(|lacking| lacking.lacks_any_of(extent));
        if lacks && self.on_image.is_some() && !self.abort_source(AbortReason::SourceDisk) {
            self.forget_comparison();
        }
    }

    /// Whether the disk moves without what it has of its image.
    pub(in crate::controller) fn leaves_image(&self) -> bool {
        self.on_image
            .as_ref()
            .is_some_and(|on_image| on_image.same.is_some())
    }

    /// Whether the disk can move like that, if it is to: what is copied is remembered block by block.
    pub(in crate::controller) fn check_on_image(
        &self,
        options: &MigrationOptions,
    ) -> Result<(), StartError> {
        // The destination takes what it is told to lack for what the image has, or not.
        if self.leaves_image() != (options.image != ImageOffer::None) {
            return Err(StartError::Option("comparison with the image"));
        }
        let fits = match (options.image, options.policy) {
            (ImageOffer::None, _) => true,
            (_, PolicyOptions::PreCopy(rounds)) => {
                rounds.block_sectors == BLOCK_SECTORS && !options.verify
            }
            (ImageOffer::TwoPlaces, PolicyOptions::PushPull(_)) => true,
            _ => false,
        };
        match fits {
            true => Ok(()),
            false => Err(StartError::Option(
                "policy of a disk that stays on its image",
            )),
        }
    }

    /// Tells the destination what it will lack, and what of it to fetch first. False when that is nothing.
    pub(in crate::controller) fn tell_what_is_the_same(&mut self) -> bool {
        let Self {
            on_image,
            lacking,
            actions,
            ..
        } = self;
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

/// The extents of blocks that are set, in order.
pub(in crate::controller::transfer) fn each_run(
    blocks: &DirtyBitmap,
    mut visit: impl FnMut(Extent),
) {
    let mut head = Lba(0);
    while let Some(run) = blocks.next_run(head, MAX_EXTENT_SECTORS) {
        head = run.end();
        visit(run);
    }
}
