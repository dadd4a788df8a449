//! What each sector may hold: the writes that were asked for, when they were acknowledged, and what
//! has to survive a power loss.

use godwit_core::units::Extent;

/// Content of one sector: the number of the write that stored it, 0 for zeroes.
pub(crate) type Value = u32;

/// Sector n of an image holds this and n; no write has such a number.
pub(crate) const IMAGE: Value = 1 << 31;

/// Names a write.
pub(crate) type WriteNumber = u32;

const NEVER: u64 = u64::MAX;

/// A write as the client saw it.
#[derive(Clone, Copy, Debug)]
struct Write {
    value: Value,
    start: u64,
    /// When it was acknowledged; [`NEVER`] when it was not, or when a power loss may have undone it.
    /// It hides what was over before it began.
    end: u64,
    /// If it happened at all, it had by then; [`NEVER`] while it is under way.
    latest: u64,
    /// A flush that began after its acknowledgement was acknowledged, or it was FUA.
    durable: bool,
}

/// A write's effect on one sector.
#[derive(Clone, Copy, Debug)]
struct Effect {
    write: WriteNumber,
    /// When a read that returned it ended: it had happened by then, acknowledged or not.
    seen: u64,
    /// As in [`Write`].
    latest: u64,
}

impl Effect {
    /// By when it had certainly happened.
    fn certain(&self, writes: &[Write]) -> u64 {
        writes[self.write as usize].end.min(self.seen)
    }

    /// By when it had happened, if it did.
    fn latest(&self, writes: &[Write]) -> u64 {
        let write = writes[self.write as usize].latest;
        write.min(self.seen).min(self.latest)
    }
}

/// The writes to every sector of a disk.
#[derive(Debug)]
pub(crate) struct History {
    writes: Vec<Write>,
    /// Per sector, oldest first; before the first lie the zeroes of a new disk.
    sectors: Vec<Vec<Effect>>,
    /// Acknowledged and not durable, in order of acknowledgement.
    unflushed: Vec<WriteNumber>,
    /// When a node that served last lost its power: what a request from before returned may have
    /// been lost since.
    power_lost: u64,
}

/// So many effects of a sector are kept before those that can never show again are dropped.
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
        }
    }

    /// The disk is created with this in a sector, durably.
    pub(crate) fn holds_at_first(&mut self, sector: u64, value: Value) {
        let write = self.writes.len() as WriteNumber;
        self.writes.push(Write {
            value,
            // Behind the zeroes, and before anything that a guest does.
            start: 1,
            end: 1,
            latest: 1,
            durable: true,
        });
        self.sectors[sector as usize].push(Effect {
            write,
            seen: NEVER,
            latest: NEVER,
        });
    }

    /// A write begins; `zeroes` when it stores those. `oldest` is when the oldest request began that
    /// is not answered.
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
                prune(&self.writes, effects, oldest);
            }
            effects.push(Effect {
                write: number,
                seen: NEVER,
                latest: NEVER,
            });
        }
        number
    }

    pub(crate) fn acknowledged(&mut self, number: WriteNumber, fua: bool, now: u64) {
        let write = &mut self.writes[number as usize];
        if !fua && write.start <= self.power_lost {
            // The owner may have lost what it answered while the answer was on its way.
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

    /// A write will not be acknowledged: it failed, or its client died with the node that served it.
    /// It has happened, wholly or in parts, or never will.
    pub(crate) fn given_up(&mut self, number: WriteNumber, now: u64) {
        self.writes[number as usize].latest = now;
    }

    /// A flush that began at `start` was acknowledged.
    pub(crate) fn flushed(&mut self, start: u64) {
        let writes = &mut self.writes;
        self.unflushed.retain(|&number| {
            let write = &mut writes[number as usize];
            write.durable = write.end < start;
            !write.durable
        });
    }

    /// Acknowledged writes that a power loss may undo.
    pub(crate) fn unflushed(&self) -> usize {
        self.unflushed.len()
    }

    /// The node that serves lost its power: what was not durable may be there or not.
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

    /// Whether a read that ran from `start` to `end` may return the value: it was written by a
    /// write that had begun, and no other write lies wholly between the two.
    pub(crate) fn read(&mut self, sector: u64, value: Value, start: u64, end: u64) -> bool {
        let writes = &self.writes;
        let effects = &mut self.sectors[sector as usize];
        // The last write that was wholly over when the read began hides all that ended before it.
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

    /// The writes to a sector, for a person.
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

/// Drops what no read from now on can return, even after a power loss: what ended before a durable
/// write began that was over when the oldest open request began.
fn prune(writes: &[Write], effects: &mut Vec<Effect>, oldest: u64) {
    let hidden = effects
        .iter()
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
