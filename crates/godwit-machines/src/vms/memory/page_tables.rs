//! Page tables filled in advance: a QEMU that waits for a VM maps the VM's present memory if the pool is on tmpfs.
//! Otherwise the arriving guest takes a page fault at each page that it touches, all at once.

use std::sync::Arc;
use std::time::Duration;

use godwit_memory::mover::agent::Agent;

use crate::vms::Vms;
use crate::vms::memory::{pooled, relocated};
use crate::vms::vm::Vm;
use godwit_context::blocking;

/// Bytes of memory mapped by one request, which takes some ten milliseconds.
const WINDOW_BYTES: u64 = 256 << 20;

/// Longest wait of a move, enough for about 4 GiB: the rest follows while the move goes on.
const PATIENCE: Duration = Duration::from_millis(250);

/// Has the QEMU of an incoming VM map the VM's memory, as far as possible before the guest's memory begins to move. A
/// failure only makes the guest slower for a moment.
pub(crate) async fn fill(vms: &Vms, vm: &Arc<Vm>, pid: u32) {
    let memory = vm.lock().entry.memory.clone();
    let Some(memory) = memory else { return };
    let Ok(place) = pooled::place_of(vms, &vm.name, &memory) else {
        return;
    };
    let (vm, socket) = (Arc::clone(vm), vm.places.agent());
    let filling = blocking(move || {
        let Ok(found) = relocated::find(pid, &place) else {
            return;
        };
        let mut done = 0;
        while done < memory.bytes && is_of_use(&vm) {
            let bytes = WINDOW_BYTES.min(memory.bytes - done);
            if let Err(error) = Agent::fill(&socket, found.layout.address + done, bytes) {
                tracing::debug!(vm = vm.name, %error, "its page tables are not filled");
                return;
            }
            done += bytes;
        }
    });
    // The mapping goes on in the background.
    let _ = tokio::time::timeout(PATIENCE, filling).await;
}

fn is_of_use(vm: &Vm) -> bool {
    let inner = vm.lock();
    inner.qemu.is_some() && inner.moving.is_none()
}
