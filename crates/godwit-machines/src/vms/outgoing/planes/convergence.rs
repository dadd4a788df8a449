//! Detection of a pre-copy that does not converge: memory written by the guest during a pass must be sent again.

use std::time::{Duration, Instant};

use godwit_qemu::migration::Seen;

/// Time without progress before the user is warned.
const PATIENCE: Duration = Duration::from_secs(5);

/// The first pass that counts. The pass before covers all memory, and says nothing about the guest's writes.
const FIRST_PASS: u64 = 2;

/// Passes begun since the least remainder, at least, before the user is warned.
const PASSES: u64 = 2;

/// Watches the bytes left at the start of each pass. While the bytes decrease, the pre-copy converges.
#[derive(Debug, Default)]
pub(in crate::vms) struct Convergence {
    /// The fewest bytes left at the start of a pass so far, with the pass and its time.
    least: Option<(u64, u64, Instant)>,
    pass: u64,
    warned: bool,
}

impl Convergence {
    /// Takes QEMU's progress. Returns a warning for the user, once, if there is no convergence in sight.
    pub(in crate::vms) fn look(&mut self, seen: &Seen, now: Instant) -> Option<String> {
        let progress = seen.progress;
        if seen.status != "active" || progress.passes < FIRST_PASS {
            return None;
        }
        if progress.passes != self.pass {
            self.pass = progress.passes;
            let begins = (progress.bytes_left, self.pass, now);
            // A tenth less is progress; a smaller change is chance.
            let least = self.least.get_or_insert(begins);
            if progress.bytes_left / 9 < least.0 / 10 {
                *least = begins;
            }
        }
        let (left, pass, since) = self.least?;
        let stays = self.pass >= pass + PASSES && now.duration_since(since) >= PATIENCE;
        if !stays || std::mem::replace(&mut self.warned, true) {
            return None;
        }
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        let rates = match (seen.dirtied, seen.sent) {
            (0, _) | (_, 0) => String::new(),
            (dirtied, sent) => {
                let (dirtied, sent) = (mib(dirtied), mib(sent));
                format!(" ({dirtied} MiB/s written, {sent} MiB/s sent)")
            }
        };
        Some(format!(
            "the guest writes memory as fast as it is sent{rates}: each pass leaves {} MiB or more \
             to send again, and the move may never end; cancel it and move the VM with --memory \
             post-copy or hybrid, or give it more bandwidth",
            mib(left)
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_qemu::migration::Progress;

    const MIB: u64 = 1 << 20;

    /// Returns the warnings for passes of `seconds` that begin with the bytes of `left`, in MiB.
    fn told(seconds: f64, left: &[u64]) -> Vec<(usize, String)> {
        let begun = Instant::now();
        let mut convergence = Convergence::default();
        let mut told = Vec::new();
        for (index, &left) in left.iter().enumerate() {
            for part in 0..10_u32 {
                let passed = seconds * (index as f64 + f64::from(part) / 10.0);
                let seen = Seen {
                    status: String::from("active"),
                    progress: Progress {
                        bytes_total: 4096 * MIB,
                        bytes_left: left * MIB / 10 * u64::from(10 - part),
                        passes: index as u64 + 1,
                        ..Progress::default()
                    },
                    dirtied: 210 * MIB,
                    sent: 100 * MIB,
                    ..Seen::default()
                };
                let text = convergence.look(&seen, begun + Duration::from_secs_f64(passed));
                told.extend(text.map(|text| (index, text)));
            }
        }
        told
    }

    #[test]
    fn memory_that_is_written_as_fast_as_it_is_sent_is_told_of_once() {
        let told = told(2.0, &[4096, 500, 490, 520, 505, 480, 500, 510]);
        let [(pass, text)] = told.as_slice() else {
            panic!("told {told:?}");
        };
        assert_eq!(*pass, 3, "five seconds after the second pass began");
        assert!(text.contains("210 MiB/s written, 100 MiB/s sent"), "{text}");
        assert!(text.contains("500 MiB or more"), "{text}");
        assert!(text.contains("--memory post-copy or hybrid"), "{text}");
    }

    #[test]
    fn memory_of_which_less_is_left_each_time_is_not_told_of() {
        assert_eq!(told(20.0, &[4096, 3000, 2000, 1500, 1200, 1000, 700]), []);
        assert_eq!(told(20.0, &[4096, 3000]), [], "one pass says nothing");
    }

    #[test]
    fn short_passes_get_the_same_time() {
        let left = [64; 40];
        assert_eq!(told(0.1, &left), [], "four seconds");
        assert_eq!(told(0.2, &left).len(), 1, "eight seconds");
    }
}
