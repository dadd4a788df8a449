//! The end of a VM's memory in a memory pool. A part of a device is freed only once no device of this node can write
//! there any more, since another guest gets the part next: a request to a disk that does not answer can still write. A
//! file of the guest's own stays its own until its last mapping is gone.

use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_memory::pool::Place;
use godwit_vhost::memory::live;

use crate::vms::Vms;
use crate::vms::memory::{pooled, pools, relocated};
use godwit_api::{ErrorBody, ErrorCode};
use godwit_context::blocking;
use godwit_context::store::machine::VmEntry;

/// Longest wait of a request for devices that end.
const PATIENCE: Duration = Duration::from_secs(2);
/// Time between two checks, during that wait and afterwards.
const POLL: Duration = Duration::from_millis(5);
const RETRY: Duration = Duration::from_secs(1);

/// Returns true if devices of this node may still write to memory that another guest gets next. Unreadable memory may
/// be in use.
fn is_in_use(place: &Place) -> bool {
    place.align.is_some() && relocated::of_devices(place).map_or(true, live::is_mapped)
}

/// Waits for devices that still use memory, on a thread that may block. Returns false if they go on.
pub(super) fn settled(place: &Place) -> bool {
    let begun = Instant::now();
    while is_in_use(place) {
        if begun.elapsed() > PATIENCE {
            return false;
        }
        std::thread::sleep(POLL);
    }
    true
}

/// Returns the error for a request that needs memory still in use.
pub(super) fn still_in_use(vm: &str, pool: &str) -> ErrorBody {
    let text = format!(
        "devices still use the memory that an earlier VM {vm} had in memory pool {pool}: a request to one of its disks \
         has not ended"
    );
    ErrorBody::new(ErrorCode::Conflict, text)
        .hint("see to it that the disk's storage answers, or choose another name for the machine")
}

/// Frees a VM's segment if this node owns the segment, once neither a QEMU nor a device of this node maps it any more.
/// Waits in the background for devices that go on, without a limit; until then the VM keeps the memory.
pub async fn release(vms: &Arc<Vms>, vm: &str, entry: &VmEntry) {
    if entry.memory.is_none() {
        return;
    }
    let begun = Instant::now();
    while !free(vms, vm, entry).await {
        if begun.elapsed() > PATIENCE {
            tracing::warn!(
                vm,
                "devices still use the VM's memory, which is freed when they have ended"
            );
            godwit_context::spawn(go_on(Arc::clone(vms), vm.to_owned(), entry.clone()));
            return;
        }
        tokio::time::sleep(POLL).await;
    }
}

async fn go_on(vms: Arc<Vms>, vm: String, entry: VmEntry) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(RETRY) => {}
            // This node keeps the memory, and frees it at its next VM of this name.
            () = vms.context.closed() => return,
        }
        if free(&vms, &vm, &entry).await {
            tracing::info!(vm, "no device uses the VM's memory any more: it is freed");
            return;
        }
    }
}

/// Frees the segment if possible now. Returns false if devices use the memory.
async fn free(vms: &Arc<Vms>, vm: &str, entry: &VmEntry) -> bool {
    let (vms, name, entry) = (Arc::clone(vms), vm.to_owned(), entry.clone());
    let freed = blocking(move || try_free(&vms, &name, &entry)).await;
    freed.flatten().unwrap_or_else(|error| {
        tracing::debug!(vm, %error, "the VM's memory is not there to be freed");
        true
    })
}

fn try_free(vms: &Vms, vm: &str, entry: &VmEntry) -> Result<bool, ErrorBody> {
    let Some(memory) = &entry.memory else {
        return Ok(true);
    };
    if pooled::given(entry).is_some() {
        if let Ok(place) = pooled::place_of(vms, vm, memory) {
            let _ = relocated::forget(&place);
        }
        // The guest runs on the memory elsewhere, regardless of the title.
        return pooled::give(vms, vm, entry).map(|()| true);
    }
    let (pool, segment) = pooled::segment(vms, vm, memory)?;
    let failed = |error| pools::refused(&vms.context.config.name, &memory.pool, &error);
    let is_own = segment.title().map_err(failed)?.owner == vms.context.config.name;
    if is_own && is_in_use(segment.place()) {
        return Ok(false);
    }
    // Without its segment no process can map the memory any more either.
    let _ = relocated::forget(segment.place());
    if is_own {
        segment.remove(&pool).map_err(failed)?;
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use godwit_memory::pool::device::space::Extent;
    use rustix::fs::MemfdFlags;

    use super::*;

    #[test]
    fn only_parts_of_devices_wait_and_what_cannot_be_looked_at_may_be_in_use() {
        let file = rustix::fs::memfd_create("pool", MemfdFlags::CLOEXEC).expect("a file");
        let place = |path: &str, align| Place {
            path: path.into(),
            extent: Extent {
                offset: 0,
                bytes: 2 << 20,
            },
            align,
        };
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        assert!(settled(&place(&path, Some(2 << 20))), "nobody maps it");
        assert!(is_in_use(&place("/proc/self/no-pool", Some(2 << 20))));
        assert!(
            !is_in_use(&place("/proc/self/no-pool", None)),
            "its own file"
        );
    }
}
