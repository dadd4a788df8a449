//! The part of a VM's memory that has moved out of its memory pool, found in the mappings of its QEMU. After a restart
//! of this node only the mappings have this information.

use std::fs::File;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use godwit_memory::mover::agent::{Agent, AgentError, Side};
use godwit_memory::mover::mappings::{self, Layout};
use godwit_memory::pool::Place;
use godwit_memory::pool::device::space::Extent;
use godwit_vhost::memory::relocated::{Home, Part, Relocation};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use tokio::net::UnixStream;
use tokio::task::JoinSet;

use crate::vms::Vms;
use crate::vms::memory::pooled;
use crate::vms::vm::Vm;
use godwit_context::blocking;
use godwit_context::store::machine::{PooledMemory, VmEntry};
use godwit_disks::disks::vhost::Held;
use godwit_qemu::machine::Places;

/// Time between two searches for memory that was not found.
const RETRY: Duration = Duration::from_secs(1);

/// The name of a VM's local memory among its QEMU's files.
const LOCAL: &str = "godwit-memory";

/// The files of a VM's memory and their layout.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) home: InPool,
    /// The local file, if a part of the memory is local.
    pub(super) away: Option<File>,
    pub(super) layout: Layout,
}

/// A VM's memory in its memory pool.
#[derive(Debug)]
pub(super) struct InPool {
    /// The segment's file, or the device with the segment.
    pub(super) file: File,
    place: Place,
}

impl InPool {
    fn open(place: &Place) -> std::io::Result<Self> {
        let file = File::options().read(true).write(true).open(&place.path)?;
        let place = place.clone();
        Ok(Self { file, place })
    }

    /// Returns the segment in the terms of QEMU's mappings.
    fn mapped(&self) -> std::io::Result<mappings::Home> {
        let Extent { offset, bytes } = self.place.extent;
        let file = mappings::File::of(&self.file)?;
        Ok(mappings::Home {
            file,
            offset,
            bytes,
        })
    }

    /// Returns the segment in the terms of the devices that map the memory here.
    pub(super) fn of_devices(&self) -> std::io::Result<Home> {
        let Extent { offset, bytes } = self.place.extent;
        Home::of(&self.file, Part { offset, bytes })
    }

    /// Returns the segment in the terms of the agent that moves the memory.
    pub(super) fn side(&self) -> Side<'_> {
        Side {
            file: &self.file,
            offset: self.place.extent.offset,
            keeps: self.place.align.is_some(),
        }
    }

    /// Frees a part that memory has left. A part of a device keeps its room.
    pub(super) fn free(&self, offset: u64, bytes: u64) {
        if self.place.align.is_none() {
            free(&self.file, offset, bytes);
        }
    }
}

/// Makes a file of fixed size for local memory.
pub(super) fn make(bytes: u64) -> std::io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(rustix::fs::memfd_create(LOCAL, flags)?);
    file.set_len(bytes)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

/// Finds the memory of a QEMU that maps this place of a memory pool, or did.
pub(super) fn find(pid: u32, memory: &Place) -> std::io::Result<Found> {
    let home = InPool::open(memory)?;
    let mapped = home.mapped()?;
    let all = mappings::of_process(pid)?;
    if let Some(layout) = mappings::find(&all, mapped, None) {
        let away = None;
        return Ok(Found { home, away, layout });
    }
    for away in local_files(pid)? {
        let other = Some(mappings::File::of(&away)?);
        if let Some(layout) = mappings::find(&all, mapped, other) {
            let away = Some(away);
            return Ok(Found { home, away, layout });
        }
    }
    Err(std::io::Error::other(
        "its QEMU does not have it where it should be",
    ))
}

/// Returns the files of local memory that a QEMU has open, used or not.
fn local_files(pid: u32) -> std::io::Result<Vec<File>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))?.flatten() {
        let name = std::fs::read_link(entry.path()).unwrap_or_default();
        let is_local = name
            .to_string_lossy()
            .starts_with(&format!("/memfd:{LOCAL}"));
        if is_local {
            let open = File::options().read(true).write(true).open(entry.path());
            files.push(open?);
        }
    }
    Ok(files)
}

/// Frees a part of a file that memory has left. The part is freed and not overwritten: a request that ends late would
/// still have the old pages.
pub(super) fn free(left: &File, offset: u64, bytes: u64) {
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    if bytes > 0
        && let Err(error) = rustix::fs::fallocate(left, punch, offset, bytes)
    {
        tracing::warn!(%error, "memory that was left is not given back");
    }
}

/// Frees the parts that the memory of a QEMU has left, for a move that ended before its last step.
pub(super) fn give_back(pid: u32, found: &Found, bytes: u64) {
    let away = found.layout.away;
    found.home.free(0, away);
    match &found.away {
        Some(file) => free(file, away, bytes - away),
        None => {
            for file in local_files(pid).unwrap_or_default() {
                free(&file, 0, bytes);
            }
        }
    }
}

/// Records the bytes of a VM's memory outside its memory pool.
pub(crate) fn note(vms: &Vms, vm: &Vm, pid: u32) {
    let memory = vm.lock().entry.memory.clone();
    let Some(memory) = memory else { return };
    let found = pooled::place_of(vms, &vm.name, &memory)
        .ok()
        .and_then(|place| find(pid, &place).ok());
    if let Some(found) = found {
        vm.lock().local_bytes = found.layout.away;
        give_up_room(vms, vm, found.layout.away);
    }
}

/// Releases the pool's room behind the local start of a VM's memory to other VMs.
pub(super) fn give_up_room(vms: &Vms, vm: &Vm, away: u64) {
    let memory = vm.lock().entry.memory.clone();
    let Some(memory) = memory else { return };
    match pooled::segment(vms, &vm.name, &memory) {
        Ok((_, segment)) => segment.give_up(away),
        Err(error) => {
            tracing::warn!(vm = vm.name, %error, "the room of memory that has left the pool stays the VM's");
        }
    }
}

/// Does the same as [`find`], once the agent has ended the last request of an earlier run of this node. Before that a
/// chunk may still move, and the room for the next chunks is not freed. Nothing else moves while the returned agent is
/// held.
fn find_settled(
    agent: &Path,
    pid: u32,
    memory: &Place,
) -> Result<(Option<Agent>, Found), Box<dyn std::error::Error>> {
    let agent = match Agent::connect(agent) {
        Ok(agent) => Some(agent),
        // A QEMU without an agent, or with an agent that may not hold pages, moves nothing.
        Err(AgentError::Absent | AgentError::NoUserfault(_)) => None,
        Err(error) => return Err(error.into()),
    };
    Ok((agent, find(pid, memory)?))
}

/// Returns the bytes of a VM's memory outside its memory pool, from its QEMU's mappings.
///
/// # Errors
/// A sentence: the layout cannot be found out.
pub(crate) async fn local_bytes(
    vms: &Vms,
    vm: &Vm,
    memory: &PooledMemory,
    pid: u32,
) -> Result<u64, String> {
    let place = pooled::place_of(vms, &vm.name, memory).map_err(|error| error.message)?;
    let agent = vm.places.agent();
    let found = blocking(move || {
        let found = find_settled(&agent, pid, &place).map_err(|error| error.to_string());
        found.map(|(_, found)| found.layout.away)
    });
    let found = found.await.map_err(|error| error.message)?;
    found.map_err(|error| format!("cannot tell where its memory is: {error}"))
}

/// Makes the devices map moved memory at its new place, before their sockets are served again after a restart of this
/// node. The disks of a VM whose memory cannot be found get no socket until the memory is found or QEMU has ended:
/// writes to the wrong memory would be worse.
pub async fn restore(vms: &Arc<Vms>, stored: &[(String, VmEntry)]) {
    // All VMs are restored at once: a silent QEMU does not delay the others.
    let mut restoring = JoinSet::new();
    for (name, entry) in stored {
        let (vms, name, entry) = (Arc::clone(vms), name.clone(), entry.clone());
        restoring.spawn(async move { restore_or_hold(&vms, name, entry).await });
    }
    restoring.join_all().await;
}

/// Restores a VM's memory, or keeps trying with its disks held.
async fn restore_or_hold(vms: &Arc<Vms>, name: String, entry: VmEntry) {
    let Err(error) = restore_one(vms, &name, &entry).await else {
        return;
    };
    tracing::error!(
        vm = name,
        error,
        "cannot find the VM's memory, so its disks are not served to it yet"
    );
    let held = Held::new(&vms.disks, &entry.machine.disks);
    let vms = Arc::clone(vms);
    godwit_context::spawn(async move {
        loop {
            tokio::select! {
                () = tokio::time::sleep(RETRY) => {}
                () = vms.context.closed() => return,
            }
            match restore_one(&vms, &name, &entry).await {
                Ok(away) => {
                    tracing::info!(vm = name, "the VM's memory is found, or its QEMU has ended");
                    if let Some(vm) = vms.find(&name) {
                        vm.lock().local_bytes = away;
                    }
                    return drop(held);
                }
                Err(error) => {
                    tracing::debug!(vm = name, error, "the VM's memory is still not found")
                }
            }
        }
    });
}

/// Restores a VM's memory. Returns the bytes outside its memory pool, 0 without a QEMU.
async fn restore_one(vms: &Arc<Vms>, name: &str, entry: &VmEntry) -> Result<u64, String> {
    let Some(memory) = entry.memory.as_ref().filter(|_| entry.moved_to.is_none()) else {
        return Ok(0);
    };
    let listener = listener(&entry.qmp).await;
    let Some(pid) = listener.map_err(|error| format!("its QEMU's monitor: {error}"))? else {
        return Ok(0);
    };
    let place = pooled::place_of(vms, name, memory).map_err(|error| error.message)?;
    let places = Places {
        folder: vms.context.config.vms_dir().join(name),
    };
    let restored = blocking(move || {
        let restored = restore_of(&places.agent(), pid, &place);
        restored.map_err(|error| error.to_string())
    });
    restored.await.map_err(|error| error.message).flatten()
}

/// Makes the devices map the memory of a QEMU at its place, and frees the parts that the memory has left. Returns the
/// bytes outside its memory pool.
fn restore_of(agent: &Path, pid: u32, memory: &Place) -> Result<u64, Box<dyn std::error::Error>> {
    let (agent, found) = find_settled(agent, pid, memory)?;
    // Only while the agent is held does QEMU map nothing of the freed parts.
    if agent.is_some() {
        give_back(pid, &found, memory.extent.bytes);
    }
    let Found { home, away, layout } = found;
    let Some(away) = away else { return Ok(0) };
    let mut relocation = Relocation::begin();
    let of = home.of_devices()?;
    relocation.set(of, away);
    let part = Part {
        offset: 0,
        bytes: layout.away,
    };
    relocation.moved(of, &home.file, part, true)?;
    Ok(layout.away)
}

/// Forgets the relocation of a segment that no QEMU of this node uses: the local memory is freed, and a later file of
/// the same number, or a later segment there, is not mistaken for this one.
pub(super) fn forget(memory: &Place) -> std::io::Result<()> {
    let home = of_devices(memory)?;
    Relocation::begin().forget(home);
    Ok(())
}

/// Returns a place of a memory pool in the terms of the devices that map it here.
pub(super) fn of_devices(memory: &Place) -> std::io::Result<Home> {
    InPool::open(memory)?.of_devices()
}

/// Returns the process that listens at a monitor's socket, if any.
async fn listener(path: &Path) -> std::io::Result<Option<u32>> {
    match UnixStream::connect(path).await {
        Ok(socket) => Ok(socket
            .peer_cred()?
            .pid()
            .and_then(|pid| pid.try_into().ok())),
        Err(error) => match error.kind() {
            ErrorKind::NotFound | ErrorKind::ConnectionRefused => Ok(None),
            _ => Err(error),
        },
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::FileExt;

    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

    use super::*;

    /// Size of the memory: whole pages for any processor's page size.
    const BYTES: usize = 64 << 10;

    #[test]
    fn nothing_of_a_qemu_that_has_no_agent_is_given_back() {
        let home = File::from(rustix::fs::memfd_create("home", MemfdFlags::CLOEXEC).expect("one"));
        home.set_len(BYTES as u64).expect("grows");
        let flags = (ProtFlags::READ, MapFlags::SHARED);
        // SAFETY: the kernel finds the place, which nobody else uses.
        let mapped = unsafe { mmap(std::ptr::null_mut(), BYTES, flags.0, flags.1, &home, 0) };
        let mapped = mapped.expect("is mapped");
        let local = make(BYTES as u64).expect("a file");
        local.write_all_at(&[7; BYTES], 0).expect("is written");
        let path = |file: &File| format!("/proc/self/fd/{}", file.as_raw_fd());
        let pid = std::process::id();
        let agent = Path::new("/proc/self/no-agent");
        let place = Place {
            path: path(&home).into(),
            extent: Extent {
                offset: 0,
                bytes: BYTES as u64,
            },
            align: None,
        };
        let away = restore_of(agent, pid, &place);
        assert_eq!(away.expect("is found"), 0);
        let mut content = [0; BYTES];
        local.read_exact_at(&mut content, 0).expect("is read");
        assert!(content == [7; BYTES], "it is as it was");
        // SAFETY: the range was mapped above, and nothing refers to it.
        unsafe { munmap(mapped, BYTES) }.expect("is unmapped");
    }
}
