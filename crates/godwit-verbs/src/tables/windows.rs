//! Memory windows: the binding of each window, and the device's keys of each window (the RDMA live-migration paper,
//! sections 3.1 and 3.3).
//!
//! The upper 24 bits of a window's remote key name the window. The lowest byte, the tag, changes with each binding. A
//! window of type 2 takes the tag that the application requests. So a move changes the names, and application and
//! device have the same tag.

use std::collections::BTreeMap;

use super::ObjectId;

/// Bits of the tag in a key.
pub(crate) const TAG_BITS: u32 = 8;
const TAG: u32 = (1 << TAG_BITS) - 1;

/// The address of an application's structure for a window, which is the window's name in requests.
pub type WindowAddress = usize;

/// The part of a region that a window exposes to peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Binding {
    /// The region.
    pub region: ObjectId,
    /// The queue pair whose request bound the window; the sole user of a window of type 2.
    pub pair: ObjectId,
    /// Begin of the part, as in requests.
    pub address: u64,
    /// Bytes.
    pub length: u64,
    /// `IBV_ACCESS_*`
    pub access: u32,
}

/// The binding of a window once all posted requests are done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// Not bound.
    No,
    /// Bound.
    To(Binding),
    /// Unknown: a queue pair that was to bind or unbind the window failed and is gone, before or after doing so.
    Unknown,
}

/// The way in which a window is bound, `IBV_MW_TYPE_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowType {
    /// Bound by `ibv_bind_mw`, for all queue pairs of the protection domain.
    One,
    /// Bound by a request, for the queue pair of the request.
    Two,
}

/// A window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// The type.
    pub kind: WindowType,
    /// The application's name.
    known: u32,
    /// The device's name.
    physical: u32,
    /// The application's tag, and the device's. The tags differ while a window that was made again has not been bound.
    known_tag: u32,
    device_tag: u32,
    /// The binding.
    pub bound: Bound,
    /// True if the device has this binding.
    pub on_device: bool,
    /// The queue pair of the last request about the window, if a failure of the request would change the binding.
    doubt: Option<ObjectId>,
}

impl Window {
    /// Returns the upper bits of the application's keys.
    pub fn known_name(&self) -> u32 {
        self.known
    }

    /// Returns the application's key.
    pub fn known_key(&self) -> u32 {
        self.known << TAG_BITS | self.known_tag
    }

    /// Returns the device's current key.
    pub fn device_key(&self) -> u32 {
        self.physical << TAG_BITS | self.device_tag
    }

    /// Returns the device's key after the device has bound the window with the application's tag.
    pub fn bound_key(&self) -> u32 {
        self.physical << TAG_BITS | self.known_tag
    }

    /// Records a request to `pair` that changes the binding to `bound`.
    fn change(&mut self, pair: ObjectId, bound: Bound) {
        let outlives = match self.bound {
            Bound::No => self.doubt.is_some(),
            // A window of type 2 goes with its queue pair.
            Bound::To(binding) => {
                self.kind == WindowType::One || binding.pair != pair || self.doubt.is_some()
            }
            Bound::Unknown => true,
        };
        (self.bound, self.doubt) = (bound, outlives.then_some(pair));
    }

    /// Records the end of a queue pair, which may have failed before.
    fn pair_ended(&mut self, pair: ObjectId, failed: bool) {
        let own = matches!(self.bound, Bound::To(binding) if binding.pair == pair);
        let doubted = self.doubt == Some(pair);
        if failed && (doubted || (own && self.kind == WindowType::One)) {
            self.bound = Bound::Unknown;
        } else if own && self.kind == WindowType::Two {
            self.bound = Bound::No;
        }
        if doubted {
            self.doubt = None;
        }
    }
}

/// The process's windows.
#[derive(Debug, Default)]
pub struct Windows {
    all: BTreeMap<WindowAddress, Window>,
    by_known: BTreeMap<u32, WindowAddress>,
    by_physical: BTreeMap<u32, WindowAddress>,
}

impl Windows {
    /// Returns an empty table.
    pub const fn new() -> Self {
        Self {
            all: BTreeMap::new(),
            by_known: BTreeMap::new(),
            by_physical: BTreeMap::new(),
        }
    }

    /// Returns true if the process has no window.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Adds a new window with this key.
    pub fn add(&mut self, address: WindowAddress, kind: WindowType, key: u32) {
        let (name, tag) = (key >> TAG_BITS, key & TAG);
        let window = Window {
            kind,
            known: name,
            physical: name,
            known_tag: tag,
            device_tag: tag,
            bound: Bound::No,
            on_device: true,
            doubt: None,
        };
        self.all.insert(address, window);
        self.by_known.insert(name, address);
        self.by_physical.insert(name, address);
    }

    /// Removes a window. Returns the application's name.
    pub fn remove(&mut self, address: WindowAddress) -> Option<u32> {
        let window = self.all.remove(&address)?;
        self.by_known.remove(&window.known);
        self.by_physical.remove(&window.physical);
        Some(window.known)
    }

    /// Records that the device has made the window again, with this key and not bound.
    pub fn made_again(&mut self, address: WindowAddress, key: u32) {
        let Some(window) = self.all.get_mut(&address) else {
            return;
        };
        if self.by_physical.get(&window.physical) == Some(&address) {
            self.by_physical.remove(&window.physical);
        }
        (window.physical, window.device_tag) = (key >> TAG_BITS, key & TAG);
        window.on_device = window.bound == Bound::No;
        // No request of a moving process has failed.
        window.doubt = None;
        self.by_physical.insert(window.physical, address);
    }

    /// Returns true if a window has this name, at the application or at the device.
    pub fn has_name(&self, name: u32) -> bool {
        self.by_known.contains_key(&name) || self.by_physical.contains_key(&name)
    }

    /// Returns all names: the application's and the device's.
    pub fn names(&self) -> impl Iterator<Item = (u32, u32)> {
        self.all
            .values()
            .map(|window| (window.known, window.physical))
    }

    /// Returns the window at `address`.
    pub fn get(&self, address: WindowAddress) -> Option<&Window> {
        self.all.get(&address)
    }

    /// Returns all windows.
    pub fn all(&self) -> impl Iterator<Item = (WindowAddress, &Window)> {
        self.all.iter().map(|(address, window)| (*address, window))
    }

    /// Returns the keys of the device for a request to bind the window: the present key and the wanted one. The
    /// application's structure contains `has`, and the request contains `wanted`. If the structure and the device
    /// disagree, the result differs from the device's key too, and the device refuses the request, as without this
    /// library.
    pub fn keys_to_bind(
        &self,
        address: WindowAddress,
        has: u32,
        wanted: u32,
    ) -> Option<(u32, u32)> {
        let window = self.all.get(&address)?;
        let strays = (has & TAG).wrapping_sub(window.known_tag);
        let name = if has >> TAG_BITS == window.known {
            window.physical
        } else {
            0
        };
        Some((
            name << TAG_BITS | window.device_tag.wrapping_add(strays) & TAG,
            window.physical << TAG_BITS | wanted & TAG,
        ))
    }

    /// Records a request to `pair` that binds the window. The key has the tag of `wanted` from now on.
    pub fn bind(&mut self, address: WindowAddress, wanted: u32, bound: Bound, pair: ObjectId) {
        if let Some(window) = self.all.get_mut(&address) {
            (window.known_tag, window.device_tag) = (wanted & TAG, wanted & TAG);
            window.change(pair, bound);
            window.on_device = true;
        }
    }

    /// Records that the device has bound the window again, or has dropped the binding for a while.
    pub fn set_on_device(&mut self, address: WindowAddress, on_device: bool) {
        if let Some(window) = self.all.get_mut(&address) {
            window.on_device = on_device;
            if on_device {
                window.device_tag = window.known_tag;
            }
        }
    }

    /// Returns the device's key for an application's key; none if no window has this key.
    pub fn device_key(&self, known: u32) -> Option<u32> {
        let address = self.by_known.get(&(known >> TAG_BITS))?;
        let window = self.all.get(address)?;
        let strays = (known & TAG).wrapping_sub(window.known_tag);
        Some(window.physical << TAG_BITS | window.device_tag.wrapping_add(strays) & TAG)
    }

    /// Records a request to `pair` that invalidates a window by the application's key. Devices refuse such a request
    /// for type 1.
    pub fn invalidate(&mut self, known: u32, pair: ObjectId) {
        let address = self.by_known.get(&(known >> TAG_BITS));
        if let Some(window) = address.and_then(|address| self.all.get_mut(address))
            && window.known_tag == known & TAG
            && window.kind == WindowType::Two
        {
            window.change(pair, Bound::No);
        }
    }

    /// Records that a peer has invalidated a window by the device's key. Returns the application's key; none if no
    /// window has this key.
    pub fn invalidated(&mut self, device_key: u32) -> Option<u32> {
        let address = self.by_physical.get(&(device_key >> TAG_BITS))?;
        let window = self.all.get_mut(address)?;
        if window.device_tag == device_key & TAG && window.kind == WindowType::Two {
            // The device has reported the invalidation.
            (window.bound, window.doubt) = (Bound::No, None);
        }
        Some(window.known << TAG_BITS | device_key & TAG)
    }

    /// Removes all bindings to a region that is gone.
    pub fn region_ended(&mut self, region: ObjectId) {
        for window in self.all.values_mut() {
            if matches!(window.bound, Bound::To(binding) if binding.region == region) {
                window.bound = Bound::No;
            }
        }
    }

    /// Records the end of a queue pair, which unbinds its windows of type 2. If the queue pair has `failed`, its effect
    /// on other windows is unknown.
    pub fn pair_ended(&mut self, pair: ObjectId, failed: bool) {
        for window in self.all.values_mut() {
            window.pair_ended(pair, failed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const AT: WindowAddress = 0x1000;

    fn binding(region: u64, pair: u64) -> Bound {
        Bound::To(Binding {
            region: ObjectId(region),
            pair: ObjectId(pair),
            address: 0,
            length: 8,
            access: 2,
        })
    }

    fn bound(windows: &Windows) -> Bound {
        windows.get(AT).unwrap().bound
    }

    #[test]
    fn a_window_that_was_made_again_has_the_tag_that_its_users_know_once_it_is_bound() {
        let mut windows = Windows::new();
        windows.add(AT, WindowType::Two, 0x0500_0007);
        assert_eq!(
            windows.keys_to_bind(AT, 0x0500_0007, 0x0500_0008),
            Some((0x0500_0007, 0x0500_0008))
        );
        windows.bind(AT, 0x0500_0008, binding(1, 2), ObjectId(2));
        windows.made_again(AT, 0x0900_0042);
        let window = *windows.get(AT).unwrap();
        assert!(!window.on_device);
        assert_eq!(
            (window.known_key(), window.device_key(), window.bound_key()),
            (0x0500_0008, 0x0900_0042, 0x0900_0008)
        );
        windows.set_on_device(AT, true);
        assert_eq!(windows.device_key(0x0500_0008), Some(0x0900_0008));
        assert_eq!(windows.names().collect::<Vec<_>>(), [(0x5_0000, 0x9_0000)]);
        assert!(windows.has_name(0x5_0000) && windows.has_name(0x9_0000));
        assert_eq!(windows.remove(AT), Some(0x5_0000));
        assert!(!windows.has_name(0x5_0000) && !windows.has_name(0x9_0000));
    }

    #[test]
    fn a_stale_key_stays_stale() {
        let mut windows = Windows::new();
        windows.add(AT, WindowType::Two, 0x507);
        windows.made_again(AT, 0x942);
        // The application's tag matches the device's until the first binding gives both the same tag.
        assert_eq!(windows.keys_to_bind(AT, 0x507, 0x508), Some((0x942, 0x908)));
        assert_eq!(windows.keys_to_bind(AT, 0x506, 0x508), Some((0x941, 0x908)));
        // A structure that names another window.
        assert_eq!(windows.keys_to_bind(AT, 0x607, 0x508), Some((0x42, 0x908)));
        assert_eq!(windows.keys_to_bind(AT + 1, 0x507, 0x508), None);
        windows.bind(AT, 0x508, binding(1, 2), ObjectId(2));
        windows.invalidate(0x507, ObjectId(2));
        assert_eq!(windows.invalidated(0x907), Some(0x507));
        assert_eq!(windows.invalidated(0x508), None);
        assert_eq!(bound(&windows), binding(1, 2));
        assert_eq!(windows.invalidated(0x908), Some(0x508));
        assert_eq!(bound(&windows), Bound::No);
    }

    #[test]
    fn what_ends_takes_bindings_with_it() {
        let mut windows = Windows::new();
        windows.add(AT, WindowType::One, 0x507);
        windows.bind(AT, 0x508, binding(1, 2), ObjectId(2));
        windows.invalidate(0x508, ObjectId(2));
        windows.pair_ended(ObjectId(2), false);
        windows.pair_ended(ObjectId(3), true);
        windows.region_ended(ObjectId(3));
        assert_eq!(bound(&windows), binding(1, 2));
        windows.pair_ended(ObjectId(2), true);
        assert_eq!(bound(&windows), Bound::Unknown);
        windows.bind(AT, 0x509, binding(1, 2), ObjectId(2));
        windows.region_ended(ObjectId(1));
        assert_eq!(bound(&windows), Bound::No);
        windows.remove(AT);
        windows.add(AT, WindowType::Two, 0x507);
        windows.bind(AT, 0x508, binding(1, 2), ObjectId(2));
        windows.pair_ended(ObjectId(2), false);
        assert_eq!(bound(&windows), Bound::No);
    }

    #[test]
    fn what_another_queue_pair_was_to_undo_is_not_known_when_that_one_failed() {
        let doubted = |kind, undo: fn(&mut Windows)| {
            let ended = |failed| {
                let mut windows = Windows::new();
                windows.add(AT, kind, 0x507);
                windows.bind(AT, 0x508, binding(1, 2), ObjectId(2));
                undo(&mut windows);
                windows.pair_ended(ObjectId(4), true);
                let before = bound(&windows);
                windows.pair_ended(ObjectId(3), failed);
                if failed {
                    assert_eq!(bound(&windows), Bound::Unknown);
                    windows.bind(AT, 0x50a, binding(1, 2), ObjectId(2));
                    assert_eq!(bound(&windows), binding(1, 2));
                }
                before
            };
            assert_eq!(ended(false), ended(true));
            ended(false)
        };
        let unbound = doubted(WindowType::One, |windows| {
            windows.bind(AT, 0x509, Bound::No, ObjectId(3));
        });
        let invalidated = doubted(WindowType::Two, |windows| {
            windows.invalidate(0x508, ObjectId(3));
        });
        let again = doubted(WindowType::Two, |windows| {
            windows.bind(AT, 0x509, binding(1, 3), ObjectId(3));
        });
        assert_eq!((unbound, invalidated), (Bound::No, Bound::No));
        assert_eq!(again, binding(1, 3));
    }

    #[test]
    fn nothing_is_in_doubt_once_a_peer_or_a_move_has_shown_what_is() {
        let mut windows = Windows::new();
        windows.add(AT, WindowType::Two, 0x507);
        windows.bind(AT, 0x508, binding(1, 2), ObjectId(2));
        windows.invalidate(0x508, ObjectId(3));
        windows.made_again(AT, 0x908);
        windows.pair_ended(ObjectId(3), true);
        assert_eq!(bound(&windows), Bound::No);
        windows.bind(AT, 0x509, binding(1, 2), ObjectId(2));
        windows.invalidate(0x509, ObjectId(2));
        windows.pair_ended(ObjectId(2), true);
        assert_eq!(bound(&windows), Bound::No);
        windows.bind(AT, 0x50a, binding(1, 2), ObjectId(2));
        windows.invalidate(0x50a, ObjectId(3));
        windows.invalidated(0x90a);
        windows.pair_ended(ObjectId(3), true);
        assert_eq!(bound(&windows), Bound::No);
    }

    proptest! {
        /// However often windows are made again, an application's key leads to its window and back.
        #[test]
        fn a_key_means_its_window(
            moves in prop::collection::vec((0usize..4, 0u32..1 << 24, any::<u8>(), any::<u8>()), 1..40),
        ) {
            let mut windows = Windows::new();
            for window in 0..4 {
                windows.add(window, WindowType::Two, ((window as u32 + 1) << TAG_BITS) + 3);
            }
            for (window, name, fresh, tag) in moves {
                if windows.all().any(|(other, has)| other != window && has.physical == name) {
                    continue;
                }
                windows.made_again(window, name << TAG_BITS | u32::from(fresh));
                let known = windows.get(window).unwrap().known_key();
                let (has, wanted) = windows.keys_to_bind(window, known, known & !TAG | u32::from(tag)).unwrap();
                prop_assert_eq!(has, name << TAG_BITS | u32::from(fresh));
                windows.bind(window, wanted, binding(1, 2), ObjectId(2));
                for address in 0..4 {
                    let has = *windows.get(address).unwrap();
                    prop_assert_eq!(windows.device_key(has.known_key()), Some(has.device_key()));
                    prop_assert_eq!(has.known_key() >> TAG_BITS, address as u32 + 1);
                }
                let device_key = windows.get(window).unwrap().device_key();
                let known = windows.get(window).unwrap().known_key();
                prop_assert_eq!(windows.invalidated(device_key), Some(known));
            }
        }
    }
}
