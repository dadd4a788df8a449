//! How far a VM's memory has moved out of its memory pool, found in the mappings of its QEMU: after a restart of this
//! node they alone tell.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use godwit_memory::mover::mappings::{self, Layout};
use godwit_vhost::memory::relocated::{FileId, Part, Relocation};

use crate::disks::vhost::Held;
use crate::node::Node;
use crate::store::machine::VmEntry;
use crate::vms::memory::pooled;
use crate::vms::vm::Vm;
use godwit_api::ErrorBody;

/// What a VM's local memory is called among its QEMU's files.
pub(super) const LOCAL: &str = "godwit-memory";

/// The files of a VM's memory and how they are mapped.
#[derive(Debug)]
pub(super) struct Found {
    /// The segment's, in the memory pool.
    pub(super) home: File,
    /// The local one, if some of the memory is there.
    pub(super) away: Option<File>,
    pub(super) layout: Layout,
}

/// Finds the memory of `bytes` bytes of a QEMU that maps this file of a memory pool, or did.
pub(super) fn find(pid: u32, memory: &Path, bytes: u64) -> std::io::Result<Found> {
    let open = |path: &Path| File::options().read(true).write(true).open(path);
    let home = open(memory)?;
    let id = mappings::File::of(&home)?;
    let all = mappings::of_process(pid)?;
    if let Some(layout) = mappings::find(&all, id, bytes, None) {
        let away = None;
        return Ok(Found { home, away, layout });
    }
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))?.flatten() {
        let name = std::fs::read_link(entry.path()).unwrap_or_default();
        if !name
            .to_string_lossy()
            .starts_with(&format!("/memfd:{LOCAL}"))
        {
            continue;
        }
        let away = open(&entry.path())?;
        let other = Some(mappings::File::of(&away)?);
        if let Some(layout) = mappings::find(&all, id, bytes, other) {
            let away = Some(away);
            return Ok(Found { home, away, layout });
        }
    }
    Err(std::io::Error::other(
        "its QEMU does not have it where it should be",
    ))
}

/// Lets the devices map what has moved where it is, before their sockets are served again after a restart of this
/// node. Disks of a VM whose memory cannot be found stay without a socket: to write to the wrong memory would be worse.
pub(crate) fn restore(node: &Arc<Node>, stored: &[(String, VmEntry)]) -> Vec<Held> {
    let mut held = Vec::new();
    for (name, entry) in stored {
        let Some(memory) = entry.memory.as_ref().filter(|_| entry.moved_to.is_none()) else {
            continue;
        };
        let Some(pid) = listener(&entry.qmp) else {
            continue;
        };
        let restored = pooled::file_of(node, name, memory).and_then(|file| {
            let failed = |error: std::io::Error| {
                ErrorBody::new(godwit_api::ErrorCode::Internal, error.to_string())
            };
            let Found { home, away, layout } = find(pid, &file, memory.bytes).map_err(failed)?;
            let Some(away) = away else { return Ok(()) };
            let mut relocation = Relocation::begin();
            relocation.set(FileId::of(&home).map_err(failed)?, away);
            let part = Part {
                offset: 0,
                bytes: layout.away,
            };
            relocation.moved(&home, part, true).map_err(failed)
        });
        if let Err(error) = restored {
            tracing::error!(vm = name, %error, "cannot find the VM's memory, so its disks are not served to it");
            held.push(Held::new(node, &entry.machine.disks));
        }
    }
    held
}

/// Notes how much of a VM's memory is not in its memory pool.
pub(crate) fn note(node: &Node, vm: &Vm, pid: u32) {
    let memory = vm.lock().entry.memory.clone();
    let Some(memory) = memory else { return };
    let found = pooled::file_of(node, &vm.name, &memory)
        .ok()
        .and_then(|file| find(pid, &file, memory.bytes).ok());
    if let Some(found) = found {
        vm.lock().local_bytes = found.layout.away;
    }
}

/// The process that listens at a monitor's socket.
fn listener(path: &Path) -> Option<u32> {
    let socket = std::os::unix::net::UnixStream::connect(path).ok()?;
    let credentials = rustix::net::sockopt::socket_peercred(&socket).ok()?;
    u32::try_from(credentials.pid.as_raw_nonzero().get()).ok()
}
