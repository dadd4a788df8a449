//! How large the controller's tables are.

/// Sizes of the controller's tables, fixed for its life.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Request tags: every guest request, forwarded request and received frame in flight holds one. At
    /// most 65,536.
    pub requests: u32,
    /// Slots of the locking window: chunks in flight at the source.
    pub window_chunks: u16,
    /// Slots for delayed writes in flight at the source. They are the
    /// [`DelayedSlot`](crate::action::DelayedSlot)s.
    /// Each holds 64 KiB. At least one: zero counts as one.
    pub delayed_chunks: u16,
    /// Ranges of delayed writes that are remembered exactly; beyond that the table coarsens.
    pub delayed_ranges: u16,
    /// Places that the guest writes to again and again and whose writes are kept back while the disk is
    /// copied, at most. With zero every write goes to the destination at once.
    pub hot_places: u16,
}

impl Limits {
    /// Double writes at most whose requests were answered and which the destination has not
    /// acknowledged: 1 to 256. Their tags are free, but until such a frame is sent the body keeps the
    /// data, so it is no more than a quarter of what there is for requests: what nobody takes must
    /// leave room for requests that wait and so are noticed.
    #[must_use]
    pub const fn posted_writes(&self) -> usize {
        match self.requests / 4 {
            0 => 1,
            quarter if quarter < 256 => quarter as usize,
            _ => 256,
        }
    }
}
