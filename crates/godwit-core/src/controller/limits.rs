//! Sizes of the controller's tables.

/// Sizes of the controller's tables, fixed for its life.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Request tags: every guest request, forwarded request and received frame in flight holds one. At most 65,536.
    pub requests: u32,
    /// Slots of the locking window: chunks in flight at the source.
    pub window_chunks: u16,
    /// Slots for delayed writes in flight at the source, each of 64 KiB: the
    /// [`DelayedSlot`](crate::action::DelayedSlot)s. At least one: zero counts as one.
    pub delayed_chunks: u16,
    /// Ranges of delayed writes remembered exactly; with more ranges the table coarsens.
    pub delayed_ranges: u16,
    /// Maximum number of hot places, whose writes are kept back while the disk is copied. With zero every write goes to
    /// the destination at once.
    pub hot_places: u16,
    /// Sectors of an area of the activity log ([`AREA_SECTORS`](crate::AREA_SECTORS) where nodes meet).
    pub area_sectors: u32,
    /// Areas that are written before earlier ones are forgotten.
    pub active_areas: u16,
}

impl Limits {
    /// Returns the maximum number of posted writes: double writes whose requests are answered and whose
    /// acknowledgements are open. From 1 to 256. A posted write's tag is free, but the body keeps the data until the
    /// frame is sent. The number is therefore at most a quarter of `requests`: frames not taken by the link must leave
    /// room for requests whose wait is noticed.
    #[must_use]
    pub const fn posted_writes(&self) -> usize {
        match self.requests / 4 {
            0 => 1,
            quarter if quarter < 256 => quarter as usize,
            _ => 256,
        }
    }
}
