//! The logs of the pages written by a device: the dirty bitmap, for the front end to read while the guest migrates, and
//! the node's own ([`WrittenPages`]).

use std::fs::File;
use std::sync::atomic::{AtomicU8, Ordering};

use godwit_memory::mapping::SharedMapping;

use crate::memory::written::WrittenPages;
use crate::memory::{GuestRam, MemoryError, Segment, map_file};

/// Bytes of guest memory for each bit.
const PAGE: u64 = 4096;

/// A page written by the device lies past the end of the log.
#[derive(Debug, thiserror::Error)]
#[error("the log of written pages ends before address {0:#x}")]
pub struct OutsideLog(u64);

/// A bit per page, shared with the front end. The front end clears the bits it has read.
pub struct DirtyLog {
    bits: SharedMapping,
}

impl DirtyLog {
    /// Maps the log.
    pub fn new(file: File, offset: u64, length: u64) -> Result<Self, MemoryError> {
        Ok(Self {
            bits: map_file(&file, offset, length)?,
        })
    }

    /// Returns true if the file does not back all of the log any more.
    pub fn has_lost_pages(&self) -> bool {
        self.bits.has_lost_pages()
    }

    /// Marks the pages of `length` bytes from `address`. Must be called after the write: a bit tells the front end to
    /// send the page as it is now.
    fn mark(&self, address: u64, length: u64) -> Result<(), OutsideLog> {
        if length == 0 {
            return Ok(());
        }
        let last = address.checked_add(length - 1).ok_or(OutsideLog(address))?;
        let last = last / PAGE;
        if last / 8 >= self.bits.bytes() as u64 {
            return Err(OutsideLog(last * PAGE));
        }
        let mut page = address / PAGE;
        while page <= last {
            let byte = page / 8;
            let end = last.min(byte * 8 + 7);
            let mask = (0xff_u8 << (page % 8)) & (0xff >> (7 - end % 8));
            // SAFETY: the byte lies within the mapping, as was checked above, and is only ever reached atomically, here
            // and by the front end.
            let bits = unsafe { AtomicU8::from_ptr(self.bits.as_ptr().add(byte as usize)) };
            bits.fetch_or(mask, Ordering::AcqRel);
            page = end + 1;
        }
        Ok(())
    }
}

/// The logs that are on, for writes to one guest memory. Every write of a device goes through here afterwards.
#[derive(Clone, Copy)]
pub struct WriteLog<'a> {
    front_end: Option<&'a DirtyLog>,
    own: Option<(&'a WrittenPages, &'a GuestRam)>,
}

impl<'a> WriteLog<'a> {
    /// No log.
    pub const OFF: Self = Self {
        front_end: None,
        own: None,
    };

    /// Logs writes to this memory, for the front end, for the node, for both or for neither.
    pub fn new(
        ram: &'a GuestRam,
        front_end: Option<&'a DirtyLog>,
        own: Option<&'a WrittenPages>,
    ) -> Self {
        Self {
            front_end,
            own: own.map(|own| (own, ram)),
        }
    }

    /// Marks the pages of `length` bytes from `address`. Must be called after the write: a mark says that the page is to
    /// be sent as it is now.
    ///
    /// # Errors
    /// The front end's log has no bit for a page.
    pub fn mark(self, address: u64, length: u64) -> Result<(), OutsideLog> {
        self.mark_as(address, Some(address), length)
    }

    /// Marks bytes that have an address of their own in the front end's log. Without one, the front end does not want
    /// them logged.
    pub(crate) fn mark_as(
        self,
        address: u64,
        for_front_end: Option<u64>,
        length: u64,
    ) -> Result<(), OutsideLog> {
        if let Some((own, ram)) = self.own {
            own.mark(ram, address, length);
        }
        match (self.front_end, for_front_end) {
            (Some(log), Some(address)) => log.mark(address, length),
            _ => Ok(()),
        }
    }

    /// Marks the pages of all segments.
    ///
    /// # Errors
    /// As [`Self::mark`].
    pub fn mark_all(self, segments: &[Segment]) -> Result<(), OutsideLog> {
        segments
            .iter()
            .try_for_each(|segment| self.mark(segment.address, u64::from(segment.length)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(bytes: u64) -> (DirtyLog, File) {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(bytes).expect("a size");
        let shared = file.try_clone().expect("the same file");
        (DirtyLog::new(file, 0, bytes).expect("a log"), shared)
    }

    fn pages(log: &DirtyLog) -> Vec<u64> {
        let bytes = log.bits.bytes();
        // SAFETY: the mapping has `bytes` bytes, and no thread changes them meanwhile.
        let bits = unsafe { std::slice::from_raw_parts(log.bits.as_ptr(), bytes) };
        (0..bytes as u64 * 8)
            .filter(|page| bits[(page / 8) as usize] & (1 << (page % 8)) != 0)
            .collect()
    }

    #[test]
    fn exactly_the_pages_written_are_marked() {
        let (log, _file) = log(4096);
        log.mark(0, 0).expect("nothing to mark");
        assert!(pages(&log).is_empty());
        log.mark(4096 * 5 + 4095, 1).expect("within");
        assert_eq!(pages(&log), [5]);
        log.mark(4096 * 7 + 4095, 2).expect("within");
        assert_eq!(pages(&log), [5, 7, 8]);
        log.mark(4096 * 14, 4096 * 12).expect("within");
        let expected: Vec<_> = [5, 7, 8].into_iter().chain(14..26).collect();
        assert_eq!(pages(&log), expected);
    }

    #[test]
    fn a_page_past_the_end_is_refused_and_nothing_is_marked() {
        let (log, _file) = log(4096);
        let end = 4096 * 8 * 4096;
        log.mark(end - 1, 1).expect("the last page");
        assert!(log.mark(end, 1).is_err());
        assert!(log.mark(end - 4096, 4097).is_err());
        assert!(log.mark(u64::MAX, 2).is_err());
        assert_eq!(pages(&log), [4096 * 8 - 1]);
    }

    #[test]
    fn a_file_that_is_too_short_is_refused() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(4095).expect("a size");
        assert!(matches!(
            DirtyLog::new(file, 0, 4096),
            Err(MemoryError::Short { .. })
        ));
    }
}
