//! What a QEMU that waits for a machine does with the machine's memory before it comes: it maps what is there, where the
//! pool is on tmpfs. A guest that comes without that meets a page fault at each page that it touches, all at once.

use std::sync::Arc;
use std::time::Duration;

use godwit_memory::mover::agent::Agent;

use crate::node::{Node, blocking};
use crate::vms::memory::{pooled, relocated};
use crate::vms::vm::Vm;

/// Bytes of memory that are asked for at once: some ten milliseconds.
const WINDOW_BYTES: u64 = 256 << 20;

/// Longest that a move waits for it, which is enough for about 4 GiB: the rest follows while the move goes on.
const PATIENCE: Duration = Duration::from_millis(250);

/// Lets the QEMU of a machine that comes map what is there of its memory, as far as it gets until the guest's memory begins
/// to move. Whatever keeps it from doing so only makes the guest slower for a moment.
pub(crate) async fn fill(node: &Node, vm: &Arc<Vm>, pid: u32) {
    let memory = vm.lock().entry.memory.clone();
    let Some(memory) = memory else { return };
    let Ok(place) = pooled::place_of(node, &vm.name, &memory) else {
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
    // It goes on by itself.
    let _ = tokio::time::timeout(PATIENCE, filling).await;
}

fn is_of_use(vm: &Vm) -> bool {
    let inner = vm.lock();
    inner.qemu.is_some() && inner.moving.is_none()
}
