//! The QEMU versions that may have memory in a part of a device, or of a file with other segments. From 8.1 to 9.2 QEMU
//! frees the wrong pages of such a file when a guest's balloon or virtio-mem returns memory: QEMU ignores the offset of
//! the guest's part, and another guest loses its memory.

use crate::vms::Vms;
use crate::vms::memory::pools;
use godwit_api::{ErrorBody, ErrorCode};
use godwit_context::store::machine::PooledMemory;
use godwit_qemu::version::Version;

/// The first QEMU verified to free the right pages.
const FIRST_SOUND: Version = Version([10, 0, 0]);

/// Returns the end of a sentence with the fault of this version, if any.
pub(crate) fn unfit(version: Version) -> Option<String> {
    (version < FIRST_SOUND).then(|| {
        format!(
            "QEMU {version} can free memory of other machines in a memory pool that is a device or a file: \
             use 10.0 or later"
        )
    })
}

/// Checks that a QEMU of this version may be started with its memory in this pool.
///
/// # Errors
/// The version has the fault.
pub fn check(
    vms: &Vms,
    vm: &str,
    qemu: Version,
    memory: Option<&PooledMemory>,
) -> Result<(), ErrorBody> {
    let Some(memory) = memory else {
        return Ok(());
    };
    if !pools::open(&vms.context.config, &memory.pool)?.is_device() {
        return Ok(());
    }
    match unfit(qemu) {
        None => Ok(()),
        Some(why) => Err(
            ErrorBody::new(ErrorCode::Conflict, format!("VM {vm}: {why}"))
                .hint("name another with --qemu PATH, or use a memory pool that is a folder"),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qemus_that_free_others_memory_are_refused() {
        for version in [[8, 0, 0], [8, 1, 0], [9, 2, 4]] {
            let why = unfit(Version(version)).expect("is refused");
            assert!(why.contains("use 10.0 or later"), "{why}");
        }
        for version in [[10, 0, 0], [10, 0, 2], [11, 1, 0]] {
            assert_eq!(unfit(Version(version)), None);
        }
    }
}
