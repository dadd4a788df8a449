//! The protocol of memory windows, without verbs: the window in use by a peer, and the window to bind anew.
//!
//! A side has two windows for each queue pair and binds them in turns. Every message carries the newest key. The peer
//! uses this key from the next write on, and reports the change once no request with the key before is under way. Only
//! then is the window of the old key bound anew, with a new key as well.

/// A message's fields about windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Told {
    /// The key of the last binding.
    pub(crate) key: u32,
    /// Number of the peer's keys to which this side has changed over.
    pub(crate) adopted: u32,
}

impl Told {
    const ADOPTED_BITS: u32 = 31;

    /// Returns the 63 bits for a note.
    pub(crate) fn word(self) -> u64 {
        u64::from(self.key) << Self::ADOPTED_BITS | u64::from(self.adopted)
    }

    pub(crate) fn of(word: u64) -> Self {
        Self {
            key: (word >> Self::ADOPTED_BITS) as u32,
            adopted: (word & ((1 << Self::ADOPTED_BITS) - 1)) as u32,
        }
    }
}

/// Returns true if the peer invalidates the old key on its change to key number `adopted`, from 1, where windows have
/// to be invalidated. Otherwise the side of the binding does. Each window is at times invalidated in both ways.
fn peer_invalidates(adopted: u32) -> bool {
    adopted % 4 > 1
}

/// Returns the window, of two, of key number `number`, from 1.
fn window_of(number: u32) -> usize {
    (number as usize + 1) % 2
}

/// This side's windows.
#[derive(Default)]
pub(crate) struct Offered {
    bound: u32,
    adopted: u32,
}

impl Offered {
    /// Returns the window to bind next, unless the peer may still use it.
    pub(crate) fn next(&self) -> Option<usize> {
        (self.bound == self.adopted).then_some(window_of(self.bound + 1))
    }

    pub(crate) fn bind(&mut self) {
        self.bound += 1;
    }

    pub(crate) fn bindings(&self) -> u32 {
        self.bound
    }

    /// Takes the peer's number of adopted keys. Returns the window invalidated by the peer, if windows are invalidated.
    pub(crate) fn hear(&mut self, adopted: u32) -> Result<Option<usize>, String> {
        if adopted == self.adopted {
            return Ok(None);
        }
        if adopted != self.bound {
            return Err(format!(
                "the peer uses key {adopted} after key {}, of {} that it may know",
                self.adopted, self.bound
            ));
        }
        self.adopted = adopted;
        Ok(peer_invalidates(adopted).then_some(window_of(adopted + 1)))
    }
}

/// The peer's windows.
#[derive(Default)]
pub(crate) struct Used {
    /// The newest keys, the latest first.
    keys: [u32; 3],
    heard: u32,
    using: u32,
    adopted: u32,
    /// The number after the last request with a key, and after the last one with the key before.
    requests: u64,
    old_requests: u64,
}

impl Used {
    /// Takes the key of the peer's last binding.
    pub(crate) fn hear(&mut self, key: u32) -> Result<(), String> {
        if self.heard > 0 && key == self.keys[0] {
            return Ok(());
        }
        if self.heard > self.adopted {
            return Err(format!(
                "the peer bound key {key:#x} while this side was not done with the one before"
            ));
        }
        self.keys = [key, self.keys[0], self.keys[1]];
        self.heard += 1;
        Ok(())
    }

    /// Returns the window for the next write, and the key; `None` if none is known yet.
    pub(crate) fn newest(&mut self) -> Option<(usize, u32)> {
        if self.using < self.heard {
            (self.using, self.old_requests) = (self.heard, self.requests);
        }
        self.current()
    }

    /// Returns the window of the last write, and the key.
    pub(crate) fn current(&self) -> Option<(usize, u32)> {
        let key = self.keys[(self.heard - self.using) as usize];
        (self.using > 0).then_some((window_of(self.using), key))
    }

    /// Records that request `number` uses the current key.
    pub(crate) fn used_by(&mut self, number: u64) {
        self.requests = number + 1;
    }

    /// Returns the number of keys to which this side has changed over once `completed` requests have completed, and the
    /// key for this side to invalidate with the message, if windows are invalidated.
    pub(crate) fn adopt(&mut self, completed: u64) -> (u32, Option<u32>) {
        if self.adopted == self.using || completed < self.old_requests {
            return (self.adopted, None);
        }
        self.adopted = self.using;
        let old = self.keys[(self.heard - self.using) as usize + 1];
        (self.adopted, peer_invalidates(self.adopted).then_some(old))
    }

    /// Returns a window, and the key from before the peer bound the window anew, if the peer has bound enough keys.
    pub(crate) fn stale(&self) -> Option<(usize, u32)> {
        (self.heard >= 3).then_some((window_of(self.heard), self.keys[2]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_of_windows_is_told_whole() {
        let told = Told {
            key: u32::MAX,
            adopted: 0x7fff_fffe,
        };
        assert_eq!(Told::of(told.word()), told);
        assert_eq!(told.word() >> 63, 0);
    }

    #[test]
    fn a_window_is_bound_anew_once_nothing_uses_its_key() {
        let (mut offered, mut used) = (Offered::default(), Used::default());
        assert_eq!((offered.next(), used.newest()), (Some(0), None));
        offered.bind();
        assert_eq!(offered.next(), None);
        used.hear(0x107).unwrap();
        assert_eq!(used.newest(), Some((0, 0x107)));
        used.used_by(4);
        assert_eq!(used.adopt(0), (1, None));
        assert_eq!(offered.hear(1), Ok(None));
        assert_eq!(offered.next(), Some(1));
        offered.bind();
        used.hear(0x207).unwrap();
        // A read goes to the window of the write before.
        assert_eq!(used.current(), Some((0, 0x107)));
        used.used_by(5);
        assert_eq!(used.newest(), Some((1, 0x207)));
        used.used_by(9);
        assert_eq!(used.adopt(5), (1, None));
        assert!(used.hear(0x108).is_err());
        assert_eq!(offered.hear(1), Ok(None));
        assert_eq!(offered.next(), None);
        assert_eq!(used.adopt(6), (2, Some(0x107)));
        assert_eq!(used.adopt(6), (2, None));
        assert_eq!(offered.hear(2), Ok(Some(0)));
        assert_eq!(offered.next(), Some(0));
        assert!(offered.hear(1).is_err());
        assert!(offered.hear(3).is_err());
        offered.bind();
        used.hear(0x108).unwrap();
        assert_eq!(used.stale(), Some((0, 0x107)));
    }

    #[test]
    fn both_sides_invalidate_both_windows() {
        let mut ways = std::collections::BTreeSet::new();
        let mut offered = Offered::default();
        for number in 1..20 {
            offered.bind();
            let by_peer = offered.hear(number).unwrap();
            ways.insert((offered.next(), by_peer.is_some()));
            assert!(by_peer.is_none_or(|window| Some(window) == offered.next()));
        }
        assert_eq!(ways.len(), 4);
    }
}
