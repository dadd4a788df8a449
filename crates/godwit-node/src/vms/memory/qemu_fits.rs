//! Which QEMUs may have memory in a part of a device, or of a file that others have parts of as well. From 8.1 to 9.2 QEMU
//! frees the wrong pages of such a file, when a guest's balloon or its virtio-mem gives memory back: it leaves out where
//! in the file the guest's part begins, and another guest loses what it has there.

use crate::node::Node;
use crate::store::machine::PooledMemory;
use crate::vms::memory::pooled;
use crate::vms::outgoing::preflight;
use godwit_api::{ErrorBody, ErrorCode};

/// The first QEMU that frees the right ones, as far as this was looked at.
const FIRST_SOUND: [u64; 3] = [10, 0, 0];

/// What is wrong with a QEMU of this version for such memory, a sentence's end.
pub(crate) fn unfit([major, minor, micro]: [u64; 3]) -> Option<String> {
    ([major, minor, micro] < FIRST_SOUND).then(|| {
        format!(
            "QEMU {major}.{minor}.{micro} can free memory of other machines in a memory pool that is a device or a file: \
             use 10.0 or later"
        )
    })
}

/// Looks whether a QEMU may be started with its memory in this pool.
///
/// # Errors
/// It may not, or does not tell its version.
pub(crate) async fn check(
    node: &Node,
    vm: &str,
    program: &str,
    memory: Option<&PooledMemory>,
) -> Result<(), ErrorBody> {
    let Some(memory) = memory else {
        return Ok(());
    };
    if !pooled::open(&node.config, &memory.pool)?.is_device() {
        return Ok(());
    }
    let user = node.config.qemu_user.as_ref();
    let found = preflight::version(program, user).await;
    match found.map(unfit) {
        Ok(None) => Ok(()),
        Ok(Some(why)) => Err(
            ErrorBody::new(ErrorCode::Conflict, format!("VM {vm}: {why}"))
                .hint("name another with --qemu PATH, or use a memory pool that is a folder"),
        ),
        Err(why) => Err(
            ErrorBody::new(ErrorCode::Invalid, format!("cannot start VM {vm}: {why}"))
                .hint("install QEMU, or name it with --qemu PATH"),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qemus_that_free_others_memory_are_refused() {
        for version in [[8, 0, 0], [8, 1, 0], [9, 2, 4]] {
            let why = unfit(version).expect("is refused");
            assert!(why.contains("use 10.0 or later"), "{why}");
        }
        for version in [[10, 0, 0], [10, 0, 2], [11, 1, 0]] {
            assert_eq!(unfit(version), None);
        }
    }
}
