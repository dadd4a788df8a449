//! All shadow objects of the process.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::objects::*;
use crate::shim::presetup::Plan;
use crate::shim::verbs::datagrams::Redirect;
use crate::tables::{Call, LocalKeys, ObjectId, Recent, RemoteKey, Roadmap, TAG_BITS, Windows};

/// The translation of local keys, since the process has moved.
pub(super) static KEYS: LocalKeys = LocalKeys::new();

static WINDOWS: Mutex<Windows> = Mutex::new(Windows::new());

/// Returns the memory windows of the process, by their shadows' addresses. This lock is taken last, after the world and
/// after a queue.
pub(super) fn windows() -> MutexGuard<'static, Windows> {
    WINDOWS.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Clone, Copy)]
pub(super) enum Object {
    Context(*mut ShadowContext),
    Pd(*mut ShadowPd),
    Mr(*mut ShadowMr),
    Mw(*mut ShadowMw),
    Channel(*mut ShadowChannel),
    Cq(*mut ShadowCq),
    Srq(*mut ShadowSrq),
    Qp(*mut ShadowQp),
    Ah(*mut ShadowAh),
}

impl Object {
    /// Returns true if the device has no object behind the shadow.
    pub(super) unsafe fn is_released(self) -> bool {
        match self {
            Object::Context(context) => (*context).real.load(Ordering::Acquire).is_null(),
            Object::Pd(domain) => (*domain).real.load(Ordering::Acquire).is_null(),
            Object::Mr(region) => (*region).real.load(Ordering::Acquire).is_null(),
            Object::Mw(window) => (*window).real.load(Ordering::Acquire).is_null(),
            Object::Channel(channel) => (*channel).real.load(Ordering::Acquire).is_null(),
            Object::Cq(queue) => (*queue).lane.visit().real.is_null(),
            Object::Srq(queue) => (*queue).lane.visit().real.is_null(),
            Object::Qp(pair) => (*pair).lane.visit().real.is_null(),
            Object::Ah(handle) => (*handle).real.load(Ordering::Acquire).is_null(),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    /// The application works on the device.
    Running,
    /// All queue pairs are suspended; the device's objects exist.
    Suspended,
    /// Some or all of the device's objects are gone.
    Released,
}

pub(super) struct World {
    pub(super) roadmap: Roadmap,
    pub(super) objects: BTreeMap<ObjectId, Object>,
    pub(super) phase: Phase,
    /// Verbs that the application has used and whose objects do not move.
    pub(super) marks: BTreeSet<&'static str>,
    /// True once [`KEYS`] has all regions: since a queue pair may not be plain.
    pub(super) translates: bool,
    /// True once no queue pair is plain: since the process moved or had a memory window.
    pub(super) all_translate: bool,
    /// Remote keys in the tables that partners got at moves. The key of a region that is gone stays: a partner may have
    /// the key in its table.
    pub(super) spoken_keys: BTreeSet<u32>,
    /// Local keys that the application knew at moves.
    pub(super) known_local_keys: BTreeSet<u32>,
    /// Remote keys of regions that the application has given back. A partner may have kept a key.
    pub(super) freed_keys: Recent,
    /// Likewise for windows, which are named by the upper bits of their keys.
    pub(super) spoken_windows: BTreeSet<u32>,
    pub(super) freed_windows: Recent,
    /// Queue pairs for datagrams that have moved.
    pub(super) redirects: Vec<Redirect>,
    /// The plan that was told last, until the process resumes.
    pub(super) told: Option<Plan>,
    /// Absent unless memory that the device writes is tracked. An error if some of this memory could not be marked.
    pub(super) written: Option<Result<(), String>>,
}

// SAFETY: the pointers are to objects that live until the application destroys them, which removes the pointers first.
unsafe impl Send for World {}

static WORLD: Mutex<World> = Mutex::new(World {
    roadmap: Roadmap::new(),
    objects: BTreeMap::new(),
    phase: Phase::Running,
    marks: BTreeSet::new(),
    translates: false,
    all_translate: false,
    spoken_keys: BTreeSet::new(),
    known_local_keys: BTreeSet::new(),
    freed_keys: Recent::new(),
    spoken_windows: BTreeSet::new(),
    freed_windows: Recent::new(),
    redirects: Vec::new(),
    told: None,
    written: None,
});
static RESUMED: Condvar = Condvar::new();

/// Returns the world in any phase, for the mover.
pub(super) fn world() -> MutexGuard<'static, World> {
    WORLD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the world once the application may change it: a control call waits while the process moves.
pub(super) fn running_world() -> MutexGuard<'static, World> {
    let mut world = world();
    while world.phase != Phase::Running {
        world = RESUMED.wait(world).unwrap_or_else(PoisonError::into_inner);
    }
    world
}

/// Wakes waiting control calls.
pub(super) fn announce_running() {
    RESUMED.notify_all();
}

fn keys_of(window: u32) -> std::ops::RangeInclusive<u32> {
    let first = window << TAG_BITS;
    first..=first | ((1 << TAG_BITS) - 1)
}

impl World {
    /// Records a call that succeeded. The parents are shadows of the caller and exist, unless the application destroyed
    /// one meanwhile, which is the application's error and undefined as ever.
    pub(super) fn add(&mut self, call: Call) -> Option<ObjectId> {
        self.roadmap.add(call).ok()
    }

    pub(super) fn remove(&mut self, id: ObjectId) {
        if self.roadmap.remove(id).is_ok() {
            self.objects.remove(&id);
        }
    }

    pub(super) fn queue_pairs(&self) -> impl Iterator<Item = *mut ShadowQp> {
        self.objects.values().filter_map(|object| match object {
            Object::Qp(qp) => Some(*qp),
            _ => None,
        })
    }

    pub(super) fn shared_receive_queues(&self) -> impl Iterator<Item = *mut ShadowSrq> {
        self.objects.values().filter_map(|object| match object {
            Object::Srq(queue) => Some(*queue),
            _ => None,
        })
    }

    /// Returns true if partners and the application know no other queue pair than `own` as `number`.
    pub(super) fn allows_number(&self, number: u32, own: *const ShadowQp) -> bool {
        // SAFETY: objects live while the world is locked.
        let known = |pair: *mut ShadowQp| unsafe { (*pair).face.qp_num };
        !self
            .queue_pairs()
            .any(|pair| !std::ptr::eq(pair, own) && known(pair) == number)
    }

    pub(super) fn completion_queues(&self) -> impl Iterator<Item = *mut ShadowCq> {
        self.objects.values().filter_map(|object| match object {
            Object::Cq(cq) => Some(*cq),
            _ => None,
        })
    }

    /// Returns the remote keys of partners, with the device's keys.
    pub(super) fn remote_keys(&self) -> Vec<RemoteKey> {
        let regions = self
            .regions()
            .map(|(known, physical)| RemoteKey::Region(known, physical));
        let windows = windows();
        let names = windows
            .names()
            .map(|(window, physical)| RemoteKey::Window { window, physical });
        regions.chain(names).collect()
    }

    /// Records the keys that partners get with this move.
    pub(super) fn speak_keys(&mut self) {
        let regions: Vec<u32> = self.regions().map(|(known, _)| known).collect();
        self.spoken_keys.extend(regions);
        let local: Vec<u32> = self.local_keys().collect();
        self.known_local_keys.extend(local);
        let names = windows()
            .names()
            .map(|(known, _)| known)
            .collect::<Vec<_>>();
        self.spoken_windows.extend(names);
    }

    /// Returns true if a partner may take the device's key for another region or window of this process.
    pub(super) fn is_spoken(&self, key: u32) -> bool {
        self.spoken_keys.contains(&key) || self.spoken_windows.contains(&(key >> TAG_BITS))
    }

    /// Returns true if a partner may have kept the key of a region or window that is gone.
    pub(super) fn is_freed(&self, key: u32) -> bool {
        self.freed_keys.contains(key) || self.freed_windows.contains(key >> TAG_BITS)
    }

    /// As [`World::is_spoken`], for all keys of a window with this name at the device.
    pub(super) fn is_spoken_window(&self, name: u32) -> bool {
        let keys = keys_of(name);
        self.spoken_windows.contains(&name) || self.spoken_keys.range(keys).next().is_some()
    }

    /// As [`World::is_freed`], for all keys of a window with this name at the device.
    pub(super) fn is_freed_window(&self, name: u32) -> bool {
        self.freed_windows.contains(name) || self.freed_keys.any_in(keys_of(name))
    }

    /// Returns an upper bound of the names that no other window may get.
    pub(super) fn taken_names(&self) -> usize {
        // A window has two names.
        let own = 2 * windows().all().count();
        let keys = self.spoken_keys.len() + self.freed_keys.len();
        own + keys + self.spoken_windows.len() + self.freed_windows.len()
    }

    /// Returns an upper bound of the keys that no other region may get.
    pub(super) fn taken_keys(&self) -> usize {
        let names = self.spoken_windows.len() + self.freed_windows.len();
        let keys = self.spoken_keys.len() + self.freed_keys.len();
        keys + self.known_local_keys.len() + (names << TAG_BITS)
    }

    /// Returns the remote keys of regions: the partners' and the device's.
    fn regions(&self) -> impl Iterator<Item = (u32, u32)> {
        self.objects.values().filter_map(|object| match object {
            // SAFETY: objects live while the world is locked.
            Object::Mr(region) => Some(unsafe {
                (
                    (**region).face.rkey,
                    (**region).physical_rkey.load(Ordering::Acquire),
                )
            }),
            _ => None,
        })
    }

    /// Fills [`KEYS`] with every region and keeps them complete from now on.
    pub(super) fn translate(&mut self) {
        self.translates = true;
        for object in self.objects.values() {
            if let Object::Mr(region) = object {
                // SAFETY: objects live while the world is locked.
                let (known, device_region) = unsafe {
                    (
                        (**region).face.lkey,
                        (**region).real.load(Ordering::Acquire),
                    )
                };
                // A released region gets its key when made again.
                if !device_region.is_null() {
                    // SAFETY: as above.
                    KEYS.set(known, unsafe { (*device_region).lkey });
                }
            }
        }
    }

    /// Returns the local keys that the application knows.
    fn local_keys(&self) -> impl Iterator<Item = u32> {
        self.objects.values().filter_map(|object| match object {
            // SAFETY: objects live while the world is locked.
            Object::Mr(region) => Some(unsafe { (**region).face.lkey }),
            _ => None,
        })
    }

    pub(super) fn memory_windows(&self) -> impl Iterator<Item = *mut ShadowMw> {
        self.objects.values().filter_map(|object| match object {
            Object::Mw(window) => Some(*window),
            _ => None,
        })
    }

    pub(super) fn address_handles(&self) -> impl Iterator<Item = *mut ShadowAh> {
        self.objects.values().filter_map(|object| match object {
            Object::Ah(handle) => Some(*handle),
            _ => None,
        })
    }

    pub(super) fn channels(&self) -> impl Iterator<Item = *mut ShadowChannel> {
        self.objects.values().filter_map(|object| match object {
            Object::Channel(channel) => Some(*channel),
            _ => None,
        })
    }
}
