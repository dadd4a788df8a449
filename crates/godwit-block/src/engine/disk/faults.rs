//! Disk errors on behalf of tests: the fail points `disk::WHO::OPERATION`, where WHO is `request`, `chunk`, `replica`,
//! `barrier`, `layout`, `owed`, `pulled`, `checkpoint`, `base` or `kept`, and OPERATION is `read`, `write`, `zero` or `sync`.
//! `return(28)` makes the disk report error number 28, `return` an I/O error. Without the feature `failpoints` there
//! are no fail points.

#[cfg(feature = "failpoints")]
use godwit_core::action::DiskTag;

use crate::engine::disk::User;

/// Returns the result that replaces the kernel's result of an operation.
#[cfg(feature = "failpoints")]
pub(in crate::engine) fn result(user: User, operation: &str, result: i32) -> i32 {
    let User::Core(tag) = user else {
        fail::fail_point!(&format!("disk::kept::{operation}"), |_| -libc::EIO);
        return result;
    };
    let who = match tag {
        DiskTag::Request(_) => "request",
        DiskTag::Chunk(_) | DiskTag::Delayed(_) => "chunk",
        DiskTag::Replica(_) => "replica",
        DiskTag::Barrier => "barrier",
        DiskTag::Layout | DiskTag::Holes => "layout",
        DiskTag::Owed(_) => "owed",
        DiskTag::Pulled(_) => "pulled",
        DiskTag::Checkpoint | DiskTag::OwedFlush => "checkpoint",
        DiskTag::BaseFlush => "base",
        DiskTag::ActivityFlush => "activity",
    };
    let errno = |text: Option<String>| text.and_then(|text| text.parse().ok());
    let name = format!("disk::{who}::{operation}");
    fail::fail_point!(&name, |text| -errno(text).unwrap_or(libc::EIO));
    result
}

/// Returns the result unchanged: the feature `failpoints` is off.
#[cfg(not(feature = "failpoints"))]
pub(in crate::engine) const fn result(_user: User, _operation: &str, result: i32) -> i32 {
    result
}
