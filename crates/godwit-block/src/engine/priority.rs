//! When a disk's thread runs: whoever waits for it is a guest, and its turns are short.

use std::io;
use std::mem::size_of;

/// The kernel's `struct sched_attr`, first version.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct SchedAttr {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

/// Three times the share of an ordinary thread where processors are short: enough to be the next
/// that runs, and not so much that a busy disk starves the guests.
const NICE: i32 = -5;

/// Nanoseconds. The shorter a thread's slice, the sooner it runs after it woke up (Linux 6.12 and
/// newer); others ignore it.
const SLICE: u64 = 100_000;

/// Makes the calling thread, and the kernel's workers that do I/O for it, run soon after they wake
/// up. A thread for which somebody chose more stays as it is.
///
/// # Errors
/// When the system does not allow the better `nice` value, which takes `CAP_SYS_NICE` or
/// `RLIMIT_NICE`. The short slice takes nothing.
pub(super) fn run_soon() -> io::Result<()> {
    let current = get()?;
    if current.policy != libc::SCHED_OTHER as u32 {
        return Ok(());
    }
    let shorter = SchedAttr {
        runtime: SLICE,
        ..current
    };
    set(&SchedAttr {
        nice: current.nice.min(NICE),
        ..shorter
    })
    .or_else(|refused| set(&shorter).and(Err(refused)))
}

/// How the calling thread is scheduled.
fn get() -> io::Result<SchedAttr> {
    let mut attributes = SchedAttr::default();
    let size = size_of::<SchedAttr>();
    // SAFETY: the kernel writes at most `size` bytes to the structure, which is as long.
    let result = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) };
    checked(result)?;
    Ok(attributes)
}

fn set(attributes: &SchedAttr) -> io::Result<()> {
    // SAFETY: the structure lives through the call and has the length that it says.
    let result = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const *attributes, 0) };
    checked(result)
}

fn checked(result: libc::c_long) -> io::Result<()> {
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_runs_sooner_than_others_as_far_as_it_may() {
        let ordinary = get().unwrap();
        let allowed = run_soon().is_ok();
        let now = get().unwrap();
        assert_eq!(now.policy, ordinary.policy, "no real-time thread");
        let nice = if allowed {
            ordinary.nice.min(NICE)
        } else {
            ordinary.nice
        };
        assert_eq!(now.nice, nice);
        // Kernels before 6.12 report no slice.
        assert!(ordinary.runtime == 0 || now.runtime == SLICE, "{now:?}");
    }

    #[test]
    fn who_was_given_more_keeps_it() {
        let mut better = get().unwrap();
        better.nice = NICE - 5;
        if set(&better).is_ok() {
            run_soon().unwrap();
            assert_eq!(get().unwrap().nice, NICE - 5);
        }
        let mut real_time = get().unwrap();
        (real_time.policy, real_time.priority) = (libc::SCHED_RR as u32, 1);
        (real_time.nice, real_time.runtime) = (0, 0);
        if set(&real_time).is_ok() {
            run_soon().unwrap();
            assert_eq!(get().unwrap().policy, libc::SCHED_RR as u32);
        }
    }
}
