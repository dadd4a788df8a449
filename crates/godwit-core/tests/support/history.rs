//! What each sector may hold: the writes that were asked for, and when they were acknowledged.

use std::collections::HashMap;

/// Content of one sector: the number of the write that stored it, 0 for zeroes.
pub(crate) type Value = u64;

/// A write as the client saw it; `end` is `None` while (or if never) acknowledged.
#[derive(Clone, Copy, Debug)]
struct Write {
    value: Value,
    start: u64,
    end: Option<u64>,
}

/// The writes to every sector of a disk.
#[derive(Debug)]
pub(crate) struct History {
    sectors: HashMap<u64, Vec<Write>>,
}

impl History {
    pub(crate) fn new() -> Self {
        Self {
            sectors: HashMap::new(),
        }
    }

    pub(crate) fn started(&mut self, sectors: std::ops::Range<u64>, value: Value, now: u64) {
        for sector in sectors {
            let write = Write {
                value,
                start: now,
                end: None,
            };
            self.sectors
                .entry(sector)
                .or_insert_with(|| {
                    vec![Write {
                        value: 0,
                        start: 0,
                        end: Some(0),
                    }]
                })
                .push(write);
        }
    }

    pub(crate) fn acknowledged(&mut self, sectors: std::ops::Range<u64>, start: u64, now: u64) {
        for sector in sectors {
            let writes = self.sectors.get_mut(&sector).expect("it was started");
            let write = writes
                .iter_mut()
                .find(|w| w.start == start)
                .expect("it was started");
            write.end = Some(now);
        }
    }

    /// Whether a read that ran from `start` to `end` may return the value: it was written by a
    /// write that had begun, and no other write lies wholly between the two.
    pub(crate) fn allows(&self, sector: u64, value: Value, start: u64, end: u64) -> bool {
        let Some(writes) = self.sectors.get(&sector) else {
            return value == 0;
        };
        // The last write that was wholly over when the read began hides all that ended before it.
        let newest = writes
            .iter()
            .filter(|write| write.end.is_some_and(|ended| ended < start))
            .map(|write| write.start)
            .max()
            .unwrap_or(0);
        writes.iter().any(|write| {
            write.value == value
                && write.start <= end
                && write.end.is_none_or(|written| written >= newest)
        })
    }

    pub(crate) fn describe(&self, sector: u64) -> String {
        format!("{:?}", self.sectors.get(&sector))
    }
}
