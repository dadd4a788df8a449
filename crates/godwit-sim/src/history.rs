//! The allowed content of each sector: requested writes, acknowledgements, and the content bound to survive a power
//! loss.

use godwit_core::units::Extent;

/// Content of one sector: the number of its last write, 0 for zeroes.
pub(crate) type Value = u32;

/// Base of an image's content: sector n holds this value plus n. No write has such a number.
pub(crate) const IMAGE: Value = 1 << 31;

/// The number of a write.
pub(crate) type WriteNumber = u32;

const NEVER: u64 = u64::MAX;

/// A write as seen by the client.
#[derive(Clone, Copy, Debug)]
struct Write {
    value: Value,
    start: u64,
    /// Time of the acknowledgement; [`NEVER`] without one, or if a power loss may have undone the write. The write
    /// hides all writes completed before its start.
    end: u64,
    /// Latest time at which the write took effect, if at all; [`NEVER`] while in flight.
    latest: u64,
    /// True for an acknowledged FUA write, and after an acknowledged flush whose start followed the write's
    /// acknowledgement.
    durable: bool,
}

/// A write's effect on one sector.
#[derive(Clone, Copy, Debug)]
struct Effect {
    write: WriteNumber,
    /// End of the earliest read that returned the value: the write had taken effect by then, acknowledged or not.
    seen: u64,
    /// As in [`Write`].
    latest: u64,
}

impl Effect {
    const fn of(write: WriteNumber) -> Self {
        Self {
            write,
            seen: NEVER,
            latest: NEVER,
        }
    }

    /// Returns the time by which the write had certainly taken effect.
    fn certain(&self, writes: &[Write]) -> u64 {
        writes[self.write as usize].end.min(self.seen)
    }

    /// Returns the time by which the write had taken effect, if at all.
    fn latest(&self, writes: &[Write]) -> u64 {
        let write = writes[self.write as usize].latest;
        write.min(self.seen).min(self.latest)
    }
}

/// The writes to every sector of a disk.
#[derive(Debug)]
pub(crate) struct History {
    writes: Vec<Write>,
    /// Effects by sector, oldest first, on top of a new disk's zeroes.
    sectors: Vec<Vec<Effect>>,
    /// Acknowledged writes not yet durable, in order of acknowledgement.
    unflushed: Vec<WriteNumber>,
    /// Time of the last power loss of a serving node. Content returned by earlier requests may have been lost since.
    power_lost: u64,
    /// The first write that may yet be undone. Earlier content is kept for that.
    kept_from: WriteNumber,
}

/// Number of effects of a sector at which the invisible ones are dropped.
const PRUNE_AT: usize = 24;

impl History {
    pub(crate) fn new(sectors: u64) -> Self {
        let zeroes = Write {
            value: 0,
            start: 0,
            end: 0,
            latest: 0,
            durable: true,
        };
        Self {
            writes: vec![zeroes],
            sectors: vec![Vec::new(); sectors as usize],
            unflushed: Vec::new(),
            power_lost: 0,
            kept_from: WriteNumber::MAX,
        }
    }

    /// Returns the number of the next write.
    pub(crate) const fn next(&self) -> WriteNumber {
        self.writes.len() as WriteNumber
    }

    /// Keeps the content of every sector before this write.
    pub(crate) const fn keep_from(&mut self, write: WriteNumber) {
        self.kept_from = write;
    }

    /// Undoes the writes from this one on, and what was read since `at`, when no request was under way. Acknowledged
    /// writes before are durable.
    pub(crate) fn undo_from(&mut self, first: WriteNumber, at: u64) {
        self.unflushed.clear();
        for write in &mut self.writes[..first as usize] {
            write.durable |= write.end != NEVER;
        }
        for effects in &mut self.sectors {
            effects.retain(|effect| effect.write < first);
            for effect in effects {
                for time in [&mut effect.seen, &mut effect.latest] {
                    *time = if *time > at { NEVER } else { *time };
                }
            }
        }
    }

    /// Records the initial, durable content of a sector.
    pub(crate) fn holds_at_first(&mut self, sector: u64, value: Value) {
        let write = self.writes.len() as WriteNumber;
        self.writes.push(Write {
            value,
            // After the zeroes, and before any request of a guest.
            start: 1,
            end: 1,
            latest: 1,
            durable: true,
        });
        self.sectors[sector as usize].push(Effect::of(write));
    }

    /// Records the start of a write; `zeroes` for a write of zeroes. `oldest` is the start of the oldest request
    /// without an answer.
    pub(crate) fn started(
        &mut self,
        extent: Extent,
        zeroes: bool,
        now: u64,
        oldest: u64,
    ) -> WriteNumber {
        let number = self.writes.len() as WriteNumber;
        self.writes.push(Write {
            value: if zeroes { 0 } else { number },
            start: now,
            end: NEVER,
            latest: NEVER,
            durable: false,
        });
        for sector in extent.start().0..extent.end().0 {
            let effects = &mut self.sectors[sector as usize];
            if effects.len() >= PRUNE_AT {
                prune(&self.writes, effects, oldest, self.kept_from);
            }
            effects.push(Effect::of(number));
        }
        number
    }

    pub(crate) fn acknowledged(&mut self, number: WriteNumber, fua: bool, now: u64) {
        let write = &mut self.writes[number as usize];
        if !fua && write.start <= self.power_lost {
            // The owner may have lost the write while the answer was in flight.
            write.latest = now;
            return;
        }
        write.end = now;
        write.latest = now;
        write.durable = fua;
        if !fua {
            self.unflushed.push(number);
        }
    }

    /// Records a write without acknowledgement: a failed one, or one whose client died with the serving node. The write
    /// has taken effect, wholly or in parts, or never will.
    pub(crate) fn given_up(&mut self, number: WriteNumber, now: u64) {
        self.writes[number as usize].latest = now;
    }

    /// Records the acknowledgement of a flush that began at `start`.
    pub(crate) fn flushed(&mut self, start: u64) {
        let writes = &mut self.writes;
        self.unflushed.retain(|&number| {
            let write = &mut writes[number as usize];
            write.durable = write.end < start;
            !write.durable
        });
    }

    /// Returns the number of acknowledged writes that a power loss may undo.
    pub(crate) fn unflushed(&self) -> usize {
        self.unflushed.len()
    }

    /// Records a power loss of the serving node: non-durable writes may or may not have survived.
    pub(crate) fn power_lost(&mut self, now: u64) {
        self.power_lost = now;
        self.unflushed.clear();
        for write in &mut self.writes {
            if !write.durable {
                write.end = NEVER;
            }
        }
        for effect in self.sectors.iter_mut().flatten() {
            if !self.writes[effect.write as usize].durable {
                effect.latest = effect.latest.min(effect.seen);
                effect.seen = NEVER;
            }
        }
    }

    /// Returns true if a read that ran from `start` to `end` may return the value. The write of the value must have
    /// begun, and no other write may lie wholly between the write and the read.
    pub(crate) fn read(&mut self, sector: u64, value: Value, start: u64, end: u64) -> bool {
        let writes = &self.writes;
        let effects = &mut self.sectors[sector as usize];
        // The last write completed before the read's start hides all writes completed before its own start.
        let mut newest = 0;
        let mut found: Option<(usize, u64)> = None;
        let mut several = false;
        for (at, effect) in effects.iter().enumerate() {
            let write = &writes[effect.write as usize];
            if effect.certain(writes) < start {
                newest = newest.max(write.start);
            }
            if write.value == value && write.start <= end {
                several |= found.is_some();
                let latest = effect.latest(writes);
                if found.is_none_or(|(_, before)| latest > before) {
                    found = Some((at, latest));
                }
            }
        }
        match found {
            Some((at, latest)) if latest >= newest => {
                if !several && value != 0 && start > self.power_lost {
                    effects[at].seen = effects[at].seen.min(end);
                }
                true
            }
            _ => value == 0 && newest == 0,
        }
    }

    /// Describes the writes to a sector for the report.
    pub(crate) fn describe(&self, sector: u64) -> String {
        let effects = &self.sectors[sector as usize];
        let skipped = effects.len().saturating_sub(16);
        let mut text = String::new();
        for effect in &effects[skipped..] {
            let write = &self.writes[effect.write as usize];
            let end = match (effect.certain(&self.writes), effect.latest(&self.writes)) {
                (NEVER, NEVER) => "open".to_owned(),
                (NEVER, latest) => format!("{latest} (uncertain)"),
                (certain, _) => certain.to_string(),
            };
            text += &format!(
                " #{}{}{} {}..{end}",
                effect.write,
                if write.value == 0 { " (zeroes)" } else { "" },
                if write.durable { " (durable)" } else { "" },
                write.start,
            );
        }
        text
    }
}

/// Drops effects that no read from now on can return, even after a power loss. Such effects ended before the start of a
/// durable write, which ended before the start of the oldest open request, and is not undone.
fn prune(writes: &[Write], effects: &mut Vec<Effect>, oldest: u64, kept_from: WriteNumber) {
    let hidden = effects
        .iter()
        .filter(|effect| effect.write < kept_from)
        .map(|effect| &writes[effect.write as usize])
        .filter(|write| write.durable && write.end < oldest)
        .map(|write| write.start)
        .max()
        .unwrap_or(0);
    effects.retain(|effect| effect.latest(writes) >= hidden);
}

#[cfg(test)]
mod tests {
    use godwit_core::units::Lba;

    use super::*;

    fn sector(at: u64) -> Extent {
        Extent::new(Lba(at), 1).expect("one sector")
    }

    #[test]
    fn an_acknowledged_write_hides_what_was_over_before_it_began() {
        let mut history = History::new(8);
        assert!(history.read(3, 0, 1, 2) && !history.read(3, 1, 1, 2));
        let first = history.started(sector(3), false, 10, 10);
        assert!(history.read(3, 0, 11, 12), "it has not happened yet");
        assert!(history.read(3, first, 11, 13), "it has happened");
        assert!(!history.read(3, 0, 14, 15), "and stays so");
        history.acknowledged(first, false, 20);
        let second = history.started(sector(3), false, 30, 30);
        history.acknowledged(second, false, 40);
        assert!(
            history.read(3, first, 35, 50),
            "the read overlapped the second"
        );
        assert!(!history.read(3, first, 41, 50));
        assert!(history.read(3, second, 41, 50));
    }

    #[test]
    fn a_power_loss_takes_back_no_more_than_what_was_not_flushed() {
        let mut history = History::new(8);
        let kept = history.started(sector(0), false, 1, 1);
        history.acknowledged(kept, false, 2);
        history.flushed(3);
        let forced = history.started(sector(1), false, 4, 4);
        history.acknowledged(forced, true, 5);
        let lost = history.started(sector(0), false, 6, 6);
        history.acknowledged(lost, false, 7);
        history.flushed(7);
        assert_eq!(
            history.unflushed(),
            1,
            "the flush began with the acknowledgement"
        );
        history.power_lost(9);
        assert!(
            history.read(0, kept, 10, 11),
            "the second write may be gone"
        );
        assert!(!history.read(0, 0, 10, 11), "the first may not");
        assert!(!history.read(1, 0, 10, 11), "nor one with FUA");
    }

    #[test]
    fn undone_writes_are_gone_and_earlier_ones_durable() {
        let mut history = History::new(1);
        let write = |history: &mut History, at| {
            let number = history.started(sector(0), false, at, at);
            history.acknowledged(number, true, at + 1);
            number
        };
        let kept = write(&mut history, 10);
        let undone = history.next();
        history.keep_from(undone);
        for at in 2..100 {
            write(&mut history, at * 10);
        }
        history.undo_from(undone, 15);
        assert!(history.read(0, kept, 1000, 1001));
        assert!(!history.read(0, undone, 1000, 1001));
        history.power_lost(1002);
        assert!(!history.read(0, 0, 1003, 1004));
    }

    #[test]
    fn what_is_dropped_could_not_have_been_read() {
        let mut history = History::new(1);
        let mut last = 0;
        for at in 0..200_u64 {
            last = history.started(sector(0), false, at * 10, at * 10);
            history.acknowledged(last, at % 3 == 0, at * 10 + 5);
        }
        assert!(history.sectors[0].len() <= PRUNE_AT + 1);
        assert!(history.read(0, last, 3000, 3001));
        assert!(!history.read(0, last - 1, 3000, 3001));
        history.power_lost(2990);
        assert!(
            history.read(0, last - 1, 3000, 3001),
            "writes 199 and 200 were not durable"
        );
        assert!(
            !history.read(0, last - 3, 3000, 3001),
            "write 199 is durable"
        );
    }
}
