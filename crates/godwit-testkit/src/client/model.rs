//! The reference: for every sector, the writes that a read may return.
//!
//! Every request has an interval from just before the request is sent to just after its reply came. A write takes
//! effect at some instant inside its interval. Of two writes the later one wins only if their intervals do not overlap;
//! otherwise either order is right, but the outcome stays once a read has returned it. An unanswered write may or may
//! not have happened.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::ops::Range;
use std::path::Path;

use super::content::Content;
use crate::SECTOR;

const NEVER: u64 = u64::MAX;

/// The content of the disk before the first write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Initial {
    Zero,
    /// The data of version 0 in every sector: see [`Model::write_image`].
    Pattern,
}

/// A read with forbidden content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation(pub String);

#[derive(Clone, Copy, Debug)]
pub struct WriteTicket {
    /// Version from which the data of the sectors is derived.
    pub version: u64,
    start: u64,
}

#[derive(Clone, Copy, Debug)]
pub struct ReadTicket {
    first: u64,
    start: u64,
}

#[derive(Clone, Copy, Debug)]
struct Write {
    version: u64,
    zero: bool,
    end: u64,
    /// Time from which on no read may return this write.
    retired: u64,
}

/// The reference model of one disk.
#[derive(Debug)]
pub struct Model {
    seed: u64,
    sectors: u64,
    initial: Initial,
    clock: u64,
    versions: u64,
    written: HashMap<u64, Vec<Write>>,
    in_flight: HashMap<u64, Range<u64>>,
    reading: BTreeMap<u64, u32>,
}

impl Model {
    /// Creates the model of a disk of `bytes` bytes.
    pub fn new(seed: u64, bytes: u64, initial: Initial) -> Self {
        Self {
            seed,
            sectors: bytes / SECTOR as u64,
            initial,
            clock: 1,
            versions: 0,
            written: HashMap::new(),
            in_flight: HashMap::new(),
            reading: BTreeMap::new(),
        }
    }

    /// Returns the disk's size in sectors.
    pub const fn sectors(&self) -> u64 {
        self.sectors
    }

    /// Returns the number of sectors written at least once.
    pub fn touched(&self) -> usize {
        self.written.len()
    }

    /// Writes an image file with the first content of a disk with [`Initial::Pattern`].
    pub fn write_image(&self, path: &Path) -> io::Result<()> {
        let mut file = io::BufWriter::with_capacity(1 << 20, std::fs::File::create(path)?);
        let mut data = [0; SECTOR];
        for sector in 0..self.sectors {
            if self.initial == Initial::Pattern {
                Content::generate(self.seed, sector, 0, &mut data);
            }
            io::Write::write_all(&mut file, &data)?;
        }
        io::Write::flush(&mut file)
    }

    /// Registers a write of these sectors before the request is sent; `zero` for a trim or write-zeroes.
    pub fn begin_write(&mut self, range: Range<u64>, zero: bool) -> WriteTicket {
        self.clock += 1;
        self.versions += 1;
        let (start, version) = (self.clock, self.versions);
        let initial = self.initial_write();
        let keep_from = self.reading.keys().next().copied().unwrap_or(start);
        for sector in range.clone() {
            let writes = self.written.entry(sector).or_insert_with(|| vec![initial]);
            writes.retain(|write| write.retired >= keep_from);
            writes.push(Write {
                version,
                zero,
                end: NEVER,
                retired: NEVER,
            });
        }
        self.in_flight.insert(version, range);
        WriteTicket { version, start }
    }

    pub fn data(&self, ticket: &WriteTicket, range: Range<u64>) -> Vec<u8> {
        let mut data = vec![0; (range.end - range.start) as usize * SECTOR];
        for (sector, into) in range.zip(data.chunks_exact_mut(SECTOR)) {
            Content::generate(self.seed, sector, ticket.version, into);
        }
        data
    }

    /// Records the acknowledgement of the write.
    pub fn end_write(&mut self, ticket: &WriteTicket) {
        self.clock += 1;
        let now = self.clock;
        let Some(range) = self.in_flight.remove(&ticket.version) else {
            return;
        };
        for sector in range {
            for write in self.written.entry(sector).or_default() {
                if write.version == ticket.version {
                    write.end = now;
                } else if write.end < ticket.start && write.retired == NEVER {
                    write.retired = now;
                }
            }
        }
    }

    /// Records that the write will not be answered: from now on it has happened or not.
    pub fn lose_write(&mut self, ticket: &WriteTicket) {
        self.clock += 1;
        self.lose(ticket.version);
    }

    /// Records that nothing in flight will be answered: each write has happened or not, each read is void. For use once
    /// the server is known to be dead.
    pub fn settle(&mut self) {
        self.clock += 1;
        let open: Vec<u64> = self.in_flight.keys().copied().collect();
        for version in open {
            self.lose(version);
        }
        self.reading.clear();
    }

    /// Registers a read from this sector on before the request is sent.
    pub fn begin_read(&mut self, first: u64) -> ReadTicket {
        self.clock += 1;
        *self.reading.entry(self.clock).or_default() += 1;
        ReadTicket {
            first,
            start: self.clock,
        }
    }

    /// Records a failed or void read.
    pub fn drop_read(&mut self, ticket: &ReadTicket) {
        self.clock += 1;
        self.reading.remove(&ticket.start);
    }

    /// Records the read's answer with this data.
    pub fn end_read(&mut self, ticket: &ReadTicket, data: &[u8]) -> Result<(), Violation> {
        self.clock += 1;
        self.reading.remove(&ticket.start);
        for (sector, found) in (ticket.first..).zip(data.chunks_exact(SECTOR)) {
            let content = Content::identify(self.seed, sector, found);
            self.check(sector, content, ticket.start)?;
        }
        Ok(())
    }

    fn check(&mut self, sector: u64, content: Content, start: u64) -> Result<(), Violation> {
        let now = self.clock;
        let initial = [self.initial_write()];
        let shows = |write: &Write| match content {
            Content::Zero => write.zero,
            Content::Data(version) => !write.zero && write.version == version,
            Content::Foreign => false,
        };
        let known: &[Write] = self.written.get(&sector).map_or(&initial, |writes| writes);
        if !known
            .iter()
            .any(|write| shows(write) && write.retired >= start)
        {
            let may: Vec<String> = known
                .iter()
                .filter(|write| write.retired >= start)
                .map(|write| {
                    let kind = if write.zero { "zero" } else { "data" };
                    let state = if write.end == NEVER {
                        " (in flight)"
                    } else {
                        ""
                    };
                    format!("{kind} of version {}{state}", write.version)
                })
                .collect();
            return Err(Violation(format!(
                "sector {sector} (byte {}) holds {content:?}, may hold only: {}",
                sector * SECTOR as u64,
                may.join(", ")
            )));
        }
        // The write seen by this read took effect after every other write that had ended before this read began. Those
        // older writes must never be read again.
        if let Some(writes) = self.written.get_mut(&sector) {
            for write in writes {
                if !shows(write) && write.end < start && write.retired == NEVER {
                    write.retired = now;
                }
            }
        }
        Ok(())
    }

    fn lose(&mut self, version: u64) {
        let now = self.clock;
        let Some(range) = self.in_flight.remove(&version) else {
            return;
        };
        for sector in range {
            for write in self.written.entry(sector).or_default() {
                if write.version == version {
                    write.end = now;
                }
            }
        }
    }

    const fn initial_write(&self) -> Write {
        let zero = matches!(self.initial, Initial::Zero);
        Write {
            version: 0,
            zero,
            end: 0,
            retired: NEVER,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sector_of(model: &Model, ticket: &WriteTicket) -> Vec<u8> {
        model.data(ticket, 5..6)
    }

    fn read(model: &mut Model, data: &[u8]) -> Result<(), Violation> {
        let ticket = model.begin_read(5);
        model.end_read(&ticket, data)
    }

    #[test]
    fn an_acknowledged_write_hides_what_was_before() {
        let mut model = Model::new(1, 1 << 20, Initial::Zero);
        let old = model.begin_write(5..6, false);
        assert!(read(&mut model, &[0; SECTOR]).is_ok(), "in flight: not yet");
        model.end_write(&old);
        assert!(
            read(&mut model, &[0; SECTOR]).is_err(),
            "acknowledged: zero is gone"
        );
        let new = model.begin_write(5..6, false);
        model.end_write(&new);
        let (old, new) = (sector_of(&model, &old), sector_of(&model, &new));
        assert!(read(&mut model, &old).is_err());
        assert!(read(&mut model, &new).is_ok());
    }

    #[test]
    fn overlapping_writes_may_land_in_any_order_but_only_once() {
        let mut model = Model::new(1, 1 << 20, Initial::Zero);
        let one = model.begin_write(5..6, false);
        let two = model.begin_write(5..6, false);
        model.end_write(&two);
        model.end_write(&one);
        let (one, two) = (sector_of(&model, &one), sector_of(&model, &two));
        assert!(read(&mut model, &two).is_ok());
        assert!(
            read(&mut model, &one).is_err(),
            "two was shown, so it came last"
        );
    }

    #[test]
    fn a_lost_write_may_have_happened_until_a_read_decides() {
        let mut model = Model::new(1, 1 << 20, Initial::Zero);
        let kept = model.begin_write(5..6, false);
        model.end_write(&kept);
        let lost = model.begin_write(5..6, false);
        model.settle();
        let (kept, lost) = (sector_of(&model, &kept), sector_of(&model, &lost));
        assert!(read(&mut model, &kept).is_ok());
        assert!(
            read(&mut model, &lost).is_err(),
            "it was shown not to have happened"
        );
        assert!(read(&mut model, &[0; SECTOR]).is_err());
    }

    #[test]
    fn a_read_in_flight_may_show_what_is_overwritten_meanwhile() {
        let mut model = Model::new(1, 1 << 20, Initial::Zero);
        let ticket = model.begin_read(5);
        let one = model.begin_write(5..6, false);
        model.end_write(&one);
        let two = model.begin_write(5..6, false);
        model.end_write(&two);
        let one = sector_of(&model, &one);
        assert!(model.end_read(&ticket, &one).is_ok());
        assert!(read(&mut model, &one).is_err());
    }

    #[test]
    fn foreign_data_and_data_of_another_place_are_found() {
        let mut model = Model::new(1, 1 << 20, Initial::Zero);
        let write = model.begin_write(5..7, false);
        model.end_write(&write);
        let both = model.data(&write, 5..7);
        assert!(
            read(&mut model, &both[SECTOR..]).is_err(),
            "sector 6's data at sector 5"
        );
        let mut torn = both[..SECTOR].to_vec();
        torn[500] ^= 1;
        assert!(read(&mut model, &torn).is_err());
        assert!(read(&mut model, &both[..SECTOR]).is_ok());
    }
}
