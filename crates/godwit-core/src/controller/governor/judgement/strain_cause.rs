//! Judges if the migration causes the guest's waits. A machine has its own reasons: now and then a processor stands
//! still for milliseconds, whatever copies do. One such wait says nothing about the rate of copies, several do.

use crate::controller::governor::tuning::strain_cause::{
    BORNE_PART, FORGET_FACTOR, LEARN_PART, MEMORY_PART, ON_END_PERIODS,
};

/// Recent strain of the guest.
#[derive(Debug, Default)]
pub(in crate::controller) struct StrainCause {
    /// Recent strained periods, decaying.
    recent: f64,
    on_end: u32,
    /// Part of periods that are strained while copies hardly move.
    inherent: f64,
}

impl StrainCause {
    /// Ends a sampling period, strained or not, in which copies did or did not creep. Returns true if copies should
    /// yield.
    pub(in crate::controller) fn lies_with_copies(&mut self, strained: bool, crept: bool) -> bool {
        let now = f64::from(u8::from(strained));
        self.recent = self.recent * MEMORY_PART + now;
        if crept {
            self.inherent += (now - self.inherent) * LEARN_PART;
        } else {
            self.inherent *= FORGET_FACTOR;
        }
        self.on_end = if strained { self.on_end + 1 } else { 0 };
        let borne = (BORNE_PART + self.inherent * 2.0) / (1.0 - MEMORY_PART);
        let long = self.on_end.is_multiple_of(ON_END_PERIODS);
        let often = self.recent > borne + 1.0 && self.on_end < ON_END_PERIODS;
        let at_fault = strained && (long || often);
        if at_fault {
            // The effect of yielding has to show before copies yield again.
            self.recent = self.recent.min(borne / 2.0);
        }
        at_fault
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the number of yields in `periods`, of which one in `every` is strained.
    fn yields(strain_cause: &mut StrainCause, periods: u32, every: u32, crept: bool) -> usize {
        let mut at_fault =
            |number: u32| strain_cause.lies_with_copies(number.is_multiple_of(every), crept);
        (1..=periods).filter(|number| at_fault(*number)).count()
    }

    #[test]
    fn a_wait_now_and_then_is_nobodys_fault() {
        assert_eq!(yields(&mut StrainCause::default(), 10_000, 150, false), 0);
    }

    #[test]
    fn waits_on_end_or_too_many_of_them_are() {
        assert_eq!(yields(&mut StrainCause::default(), 2, 1, false), 0);
        assert_eq!(yields(&mut StrainCause::default(), 9, 1, false), 3);
        let often = yields(&mut StrainCause::default(), 1000, 20, false);
        assert!((10..=30).contains(&often), "{often} of 50");
    }

    #[test]
    fn what_the_machine_does_while_copies_hardly_move_is_learnt_and_forgotten() {
        let mut strain_cause = StrainCause::default();
        yields(&mut strain_cause, 2000, 40, true);
        assert_eq!(yields(&mut strain_cause, 400, 40, false), 0);
        yields(&mut strain_cause, 10_000, 10_000, false);
        assert!(yields(&mut strain_cause, 1000, 40, false) > 5);
    }
}
