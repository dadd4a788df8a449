//! Exclusive access that costs its usual holder no atomic operation.
//!
//! A queue is nearly always used by one thread. This thread owns the queue's gate. To enter, the owner writes the
//! gate's address into its own slot and compares one pointer. Any other thread, for instance the mover's, takes the
//! gate's mutex, takes ownership away, makes the kernel run a barrier on all threads of the process (membarrier(2)),
//! and waits until the owner is outside. So the rare side pays for both.

use std::cell::{Cell, UnsafeCell};
use std::hint::cold_path;
use std::io::{self, Write};
use std::ops::{Deref, DerefMut};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicUsize, Ordering, compiler_fence};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// Changes of ownership after which a gate is no longer owned: its threads then take turns by the mutex.
const REVOCATIONS_BEFORE_SHARING: u32 = 16;

/// The gate that a thread is inside of. Each thread has one slot, which is never freed: a mover may read it. A later
/// thread reuses the slot of a thread that has ended, with its gates: no other thread can own these.
#[repr(align(64))]
struct ThreadSlot {
    /// The owner ([`this_thread`]); 0 while the slot has none.
    thread: AtomicUsize,
    /// The gate's address; 0 outside.
    inside: AtomicUsize,
    /// The thread's number in the kernel; 0 if unknown.
    kernel_thread: AtomicI32,
}

/// True once a thread has ended inside a gate. The value behind the gate may be half changed forever, and a lock of the
/// device's library may be held forever: such a process cannot be moved.
static ENDED_INSIDE: AtomicBool = AtomicBool::new(false);

/// Returns true if a thread of this process has ended while posting or polling.
pub(in crate::shim) fn a_thread_ended_inside() -> bool {
    ENDED_INSIDE.load(Ordering::Acquire)
}

/// Polls of a thread that does not leave before the kernel is asked for its existence.
const LOOKS_BEFORE_ASKING: u32 = 1000;

impl ThreadSlot {
    /// Returns true if the thread still runs. Not every end of a thread runs its destructors.
    fn lives(&self) -> bool {
        let number = self.kernel_thread.load(Ordering::Relaxed);
        if number == 0 {
            return true;
        }
        // SAFETY: takes no pointer; signal 0 is none.
        let asked = unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), number, 0) };
        asked == 0 || std::io::Error::last_os_error().raw_os_error() != Some(libc::ESRCH)
    }
}

/// Owns the gates that no thread owns.
static NOBODY: ThreadSlot = ThreadSlot {
    thread: AtomicUsize::new(0),
    inside: AtomicUsize::new(0),
    kernel_thread: AtomicI32::new(0),
};

/// Returns a number that no other running thread has, and that is never 0.
#[cfg(target_arch = "x86_64")]
#[inline]
fn this_thread() -> usize {
    let number: usize;
    // SAFETY: the first word of a thread's control block is its own address (System V ABI for threads); a library that
    // is loaded later would call a function for a thread-local variable.
    unsafe {
        std::arch::asm!("mov {}, fs:[0]", out(reg) number, options(nostack, preserves_flags, readonly, pure));
    }
    number
}

/// Returns a number that no other running thread has, and that is never 0.
#[cfg(not(target_arch = "x86_64"))]
#[inline]
fn this_thread() -> usize {
    SLOT.with(|slot| ptr::from_ref(slot) as usize)
}

thread_local! {
    static SLOT: Cell<*const ThreadSlot> = const { Cell::new(ptr::null()) };
}

#[inline]
fn slot() -> &'static ThreadSlot {
    let known = SLOT.get();
    if known.is_null() {
        return first_slot();
    }
    // SAFETY: slots are leaked.
    unsafe { &*known }
}

/// Slots of threads that have ended. The lock also publishes the writes of such a thread to the next owner.
static UNUSED: Mutex<Vec<&'static ThreadSlot>> = Mutex::new(Vec::new());

fn unused() -> MutexGuard<'static, Vec<&'static ThreadSlot>> {
    UNUSED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Recycles a thread's slot when the thread ends.
struct Lease(&'static ThreadSlot);

impl Drop for Lease {
    fn drop(&mut self) {
        SLOT.set(ptr::null());
        self.0.thread.store(0, Ordering::Relaxed);
        // A thread that ended inside a gate left its value half changed.
        if self.0.inside.load(Ordering::Relaxed) == 0 {
            unused().push(self.0);
        }
    }
}

thread_local! {
    static LEASE: Cell<Option<Lease>> = const { Cell::new(None) };
}

#[cold]
fn first_slot() -> &'static ThreadSlot {
    let again = unused().pop();
    let slot = again.unwrap_or_else(|| {
        Box::leak(Box::new(ThreadSlot {
            thread: AtomicUsize::new(0),
            inside: AtomicUsize::new(0),
            kernel_thread: AtomicI32::new(0),
        }))
    });
    // SAFETY: takes no pointer.
    let number = unsafe { libc::syscall(libc::SYS_gettid) };
    slot.kernel_thread
        .store(i32::try_from(number).unwrap_or(0), Ordering::Relaxed);
    SLOT.set(slot);
    // A thread that is ending has no lease any more. Its slot is never recycled and owns no gate: a later thread may
    // get the same number.
    if LEASE.try_with(|lease| lease.set(Some(Lease(slot)))).is_ok() {
        slot.thread.store(this_thread(), Ordering::Relaxed);
    }
    slot
}

/// Returns true if the kernel runs barriers for this process. Without barriers no gate is ever owned.
fn barriers_work() -> bool {
    static WORK: OnceLock<bool> = OnceLock::new();
    *WORK.get_or_init(|| membarrier(libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED))
}

fn membarrier(command: libc::c_int) -> bool {
    // SAFETY: takes no pointer.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}

fn barrier_everywhere() {
    if !membarrier(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED) {
        // A process that was restored from an image has to register again.
        membarrier(libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED);
        if !membarrier(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED) {
            // The slow global barrier needs no registration and exists wherever the private one did.
            if !membarrier(libc::MEMBARRIER_CMD_GLOBAL) {
                // Two threads in one queue would corrupt the application's messages.
                let _unheard = writeln!(
                    io::stderr(),
                    "godwit-verbs: membarrier(2) worked before and is refused now; this process cannot go on"
                );
                std::process::abort();
            }
        }
    }
}

/// A value with one user at a time.
pub(in crate::shim) struct Gate<T> {
    owner: AtomicPtr<ThreadSlot>,
    mutex: Mutex<u32>,
    shared: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached by one thread at a time (see the module's description).
unsafe impl<T: Send> Sync for Gate<T> {}

impl<T> Gate<T> {
    pub(in crate::shim) fn new(value: T) -> Self {
        Self {
            owner: AtomicPtr::new(nobody()),
            mutex: Mutex::new(0),
            shared: AtomicBool::new(false),
            value: UnsafeCell::new(value),
        }
    }

    /// Enters if this thread owns the gate.
    #[inline]
    pub(in crate::shim) fn enter(&self) -> Option<Inside<'_, T>> {
        // SAFETY: slots are never freed.
        let slot = unsafe { &*self.owner.load(Ordering::Acquire) };
        if slot.thread.load(Ordering::Relaxed) != this_thread()
            // This thread is inside another gate, and its slot can name only one.
            || slot.inside.load(Ordering::Relaxed) != 0
        {
            cold_path();
            return None;
        }
        // Only this thread writes its slot, so a plain store suffices. The compiler must not move the store behind the
        // comparison. The mover's barrier keeps the processor from doing so. The store is a release, since a thread
        // that waits for this one to leave another gate may see this store in place of the leaving.
        slot.inside.store(self.address(), Ordering::Release);
        compiler_fence(Ordering::SeqCst);
        if ptr::eq(self.owner.load(Ordering::Relaxed), slot) {
            return Some(Inside { gate: self, slot });
        }
        cold_path();
        leave(slot);
        None
    }

    fn address(&self) -> usize {
        ptr::from_ref(self).addr()
    }

    /// Enters by the mutex, after the owner of the gate.
    #[cold]
    pub(in crate::shim) fn lock(&self) -> Locked<'_, T> {
        let (mut locked, revoked) = self.take();
        if revoked {
            *locked.revocations += 1;
            if *locked.revocations >= REVOCATIONS_BEFORE_SHARING {
                self.shared.store(true, Ordering::Relaxed);
            }
        }
        locked
    }

    /// As [`Gate::lock`], for the mover: the gate's thread gets the gate back, however often the mover enters.
    #[cold]
    pub(in crate::shim) fn visit(&self) -> Locked<'_, T> {
        self.take().0
    }

    /// Waits until the thread is outside or has ended inside.
    fn wait_for(&self, owner: &ThreadSlot) {
        let mut looks = 0u32;
        while owner.inside.load(Ordering::Acquire) == self.address() {
            std::thread::yield_now();
            looks = looks.wrapping_add(1);
            if looks.is_multiple_of(LOOKS_BEFORE_ASKING) && !owner.lives() {
                ENDED_INSIDE.store(true, Ordering::Release);
                return;
            }
        }
    }

    /// Returns the locked gate, and true if another thread owned the gate.
    fn take(&self) -> (Locked<'_, T>, bool) {
        let revocations = self.mutex.lock().unwrap_or_else(PoisonError::into_inner);
        let owner = self.owner.swap(nobody(), Ordering::SeqCst);
        let revoked = !ptr::eq(owner, &NOBODY) && !ptr::eq(owner, slot());
        if revoked {
            barrier_everywhere();
            // SAFETY: slots are leaked.
            let owner = unsafe { &*owner };
            // A former owner that is outside cannot come back.
            self.wait_for(owner);
        }
        let locked = Locked {
            gate: self,
            revocations,
        };
        (locked, revoked)
    }
}

#[inline]
fn leave(slot: &ThreadSlot) {
    slot.inside.store(0, Ordering::Release);
}

fn nobody() -> *mut ThreadSlot {
    ptr::from_ref(&NOBODY).cast_mut()
}

/// A value in use by the gate's owner.
#[repr(C)]
pub(in crate::shim) struct Inside<'a, T> {
    gate: &'a Gate<T>,
    slot: &'static ThreadSlot,
}

impl<T> Deref for Inside<'_, T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this thread owns the gate and is inside.
        unsafe { &*self.gate.value.get() }
    }
}

impl<T> DerefMut for Inside<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above; the guard is borrowed exclusively.
        unsafe { &mut *self.gate.value.get() }
    }
}

impl<T> Drop for Inside<'_, T> {
    #[inline]
    fn drop(&mut self) {
        leave(self.slot);
    }
}

/// A value in use by the mutex's holder.
pub(in crate::shim) struct Locked<'a, T> {
    gate: &'a Gate<T>,
    /// Revocations among application threads; the guard is the lock.
    revocations: MutexGuard<'a, u32>,
}

impl<T> Locked<'_, T> {
    /// Makes this thread the owner, so that it enters quickly from now on.
    pub(in crate::shim) fn own(&self) {
        if !self.gate.shared.load(Ordering::Relaxed) && barriers_work() {
            self.gate
                .owner
                .store(ptr::from_ref(slot()).cast_mut(), Ordering::SeqCst);
        }
    }
}

impl<T> Deref for Locked<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: the mutex is held and nobody owns the gate, or this thread does.
        unsafe { &*self.gate.value.get() }
    }
}

impl<T> DerefMut for Locked<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above; the guard is borrowed exclusively.
        unsafe { &mut *self.gate.value.get() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    /// Owning and revoking threads count together; a lost step would show.
    #[test]
    fn one_thread_at_a_time() {
        let gate = Arc::new(Gate::new(0u64));
        let threads: Vec<_> = (0..3)
            .map(|number| {
                let gate = Arc::clone(&gate);
                std::thread::spawn(move || {
                    for step in 0..20_000 {
                        // The last thread always revokes, like a mover.
                        if let Some(mut value) = (number < 2).then(|| gate.enter()).flatten() {
                            *value += 1;
                            continue;
                        }
                        let mut value = gate.lock();
                        *value += 1;
                        // Ownership is given out although the gate has become shared, so that the other threads revoke
                        // all the time.
                        if number < 2 && step % 64 == 0 {
                            gate.owner
                                .store(ptr::from_ref(slot()).cast_mut(), Ordering::SeqCst);
                        }
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(*gate.lock(), 60_000);
    }

    #[test]
    fn a_thread_inside_one_gate_takes_another_by_its_mutex() {
        let (first, second) = (Gate::new(0), Gate::new(0));
        first.lock().own();
        second.lock().own();
        let inside = first.enter().unwrap();
        assert!(second.enter().is_none());
        // This thread owns the second gate too, so there is no owner to wait for.
        *second.lock() += 1;
        assert_eq!(slot().inside.load(Ordering::Relaxed), first.address());
        drop(inside);
        assert_eq!((*first.lock(), *second.lock()), (0, 1));
    }

    #[test]
    fn a_thread_that_ended_inside_is_not_waited_for_without_end() {
        let gate = Gate::new(0);
        std::thread::scope(|scope| {
            let ended = scope.spawn(|| {
                gate.lock().own();
                std::mem::forget(gate.enter().unwrap());
            });
            ended.join().unwrap();
        });
        *gate.lock() += 1;
        assert!(a_thread_ended_inside());
        assert_eq!(*gate.lock(), 1);
    }

    #[test]
    fn threads_that_ended_leave_their_slots_to_later_ones() {
        let slot_of_a_thread = || {
            std::thread::spawn(|| ptr::from_ref(slot()) as usize)
                .join()
                .unwrap()
        };
        let seen: std::collections::BTreeSet<_> = (0..200).map(|_| slot_of_a_thread()).collect();
        // Threads of other tests take and leave slots meanwhile.
        assert!(seen.len() < 50, "{} slots", seen.len());
    }

    #[test]
    fn a_mover_may_look_often_and_other_threads_may_not() {
        let gate = Gate::new(());
        let enters_after = |take: fn(&Gate<()>)| {
            for _ in 0..2 * REVOCATIONS_BEFORE_SHARING {
                gate.lock().own();
                std::thread::scope(|scope| scope.spawn(|| take(&gate)).join().unwrap());
            }
            gate.lock().own();
            gate.enter().is_some()
        };
        assert!(enters_after(|gate| drop(gate.visit())));
        assert!(!enters_after(|gate| drop(gate.lock())));
    }

    #[test]
    fn an_owner_enters_until_somebody_locks() {
        let gate = Gate::new(());
        assert!(gate.enter().is_none());
        gate.lock().own();
        assert!(gate.enter().is_some());
        drop(gate.lock());
        assert!(gate.enter().is_none());
    }
}
