//! The memory of VMs in memory pools: a VM's segment, and this node's right to run the guest on the segment.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use godwit_memory::ownership::{Arrival, Title};
use godwit_memory::pool::proof::{self, Question};
use godwit_memory::pool::segment::Segment;
use godwit_memory::pool::{Place, Pool, PoolError};
use serde::{Deserialize, Serialize};

use crate::vms::Vms;
use crate::vms::memory::pools::{open, refused};
use crate::vms::memory::{released, relocated};
use crate::vms::vm::Vm;
use godwit_api::{ErrorBody, ErrorCode};
use godwit_context::blocking;
use godwit_context::config::NodeConfig;
use godwit_context::store::machine::{PooledMemory, VmEntry, VmMark};
use godwit_peers::names;
use godwit_qemu::QemuUser;
use godwit_qemu::machine::{MemoryPart, PoolMemory};

/// Time between two attempts to write a title.
const RETRY: Duration = Duration::from_secs(1);

/// The source's offer of memory that stays where it is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PoolOffer {
    /// The pool, which has the same name at both nodes.
    pub pool: String,
    /// The id of the segment in the pool.
    pub id: String,
    /// Size of the memory in bytes.
    pub bytes: u64,
    /// The epoch of the offered title.
    pub epoch: u64,
    /// True if the memory stays in the pool for good.
    #[serde(default)]
    pub stays: bool,
    /// The nonce that the source wrote into the pool for the destination to find.
    pub(crate) nonce: String,
}

/// Allocates a segment for a new VM, which its QEMU may map.
///
/// # Errors
/// The pool is missing or full, or the name is taken.
pub(crate) async fn allocate(
    vms: &Arc<Vms>,
    vm: &str,
    entry: &mut VmEntry,
) -> Result<(), ErrorBody> {
    let Some(memory) = &mut entry.memory else {
        return Ok(());
    };
    let pool = open(&vms.context.config, &memory.pool)?;
    let (shared, name, bytes) = (Arc::clone(vms), vm.to_owned(), memory.bytes);
    let pool_name = memory.pool.clone();
    let allocated = blocking(move || {
        let here = &shared.context.config.name;
        let failed = |error| refused(here, &pool_name, &error);
        // The node has no VM of the name, so its segment there is a leftover of a crash, or of devices that do not end.
        if let Ok(left) = Segment::open(&pool, &name)
            && left.title().is_ok_and(|title| title.owner == *here)
        {
            if !released::settled(left.place()) {
                return Err(released::still_in_use(&name, &pool_name));
            }
            let _ = relocated::forget(left.place());
            left.remove(&pool).map_err(failed)?;
        }
        Segment::clear(&pool, &name, here).map_err(failed)?;
        let ends = || shared.context.is_closing();
        Segment::allocate_unless(&pool, &name, bytes, here, &ends).map_err(failed)
    })
    .await??;
    memory.id = allocated.id();
    if let Some(user) = &vms.context.config.qemu_user {
        give_to(user, vm, allocated.place())?;
    }
    Ok(())
}

/// Gives the file of a VM's memory to the user that QEMU runs as. A device or file with further segments is not the
/// user's alone, and must be open to the user.
pub(super) fn give_to(user: &QemuUser, vm: &str, memory: &Place) -> Result<(), ErrorBody> {
    if memory.align.is_some() {
        return match closed_to(user, &memory.path) {
            Some(why) => Err(
                ErrorBody::new(ErrorCode::Conflict, format!("VM {vm}: {why}"))
                    .hint("let that user read and write it: as its owner, or by its group"),
            ),
            None => Ok(()),
        };
    }
    user.own(&memory.path).map_err(|error| {
        let text = format!(
            "VM {vm}: cannot give its memory to user {}: {error}",
            user.name()
        );
        ErrorBody::new(ErrorCode::Internal, text)
    })
}

/// Returns a sentence if the user that QEMU runs as may not map a device or file.
fn closed_to(user: &QemuUser, path: &Path) -> Option<String> {
    (!user.may_write(path)).then(|| {
        format!(
            "user {}, as which QEMU runs, may not read and write {}",
            user.name(),
            path.display()
        )
    })
}

/// Returns the stored segment of a VM.
///
/// # Errors
/// The segment is gone, or another segment has its name.
pub(super) fn segment(
    vms: &Vms,
    vm: &str,
    memory: &PooledMemory,
) -> Result<(Pool, Segment), ErrorBody> {
    let pool = open(&vms.context.config, &memory.pool)?;
    let failed = |error| refused(&vms.context.config.name, &memory.pool, &error);
    let segment = Segment::open(&pool, vm).map_err(failed)?;
    if !memory.id.is_empty() && segment.id() != memory.id {
        let why = "another machine's segment has its name";
        return Err(failed(PoolError::Damaged {
            name: vm.to_owned(),
            why,
        }));
    }
    Ok((pool, segment))
}

/// Returns the place of a VM's memory in its pool.
///
/// # Errors
/// The segment is gone.
pub(super) fn place_of(vms: &Vms, vm: &str, memory: &PooledMemory) -> Result<Place, ErrorBody> {
    segment(vms, vm, memory).map(|(_, segment)| segment.place().clone())
}

/// Returns the pool memory that the QEMU of a VM maps at its start here.
///
/// # Errors
/// The segment is gone.
pub async fn mapped(vms: &Arc<Vms>, vm: &Vm) -> Result<Option<PoolMemory>, ErrorBody> {
    let memory = vm.lock().entry.memory.clone();
    let Some(memory) = memory else {
        return Ok(None);
    };
    let (shared, name) = (Arc::clone(vms), vm.name.clone());
    let place = blocking(move || {
        let place = place_of(&shared, &name, &memory)?;
        // A file system reuses the inode number of a deleted file, and a device reuses its parts: the local memory of
        // an earlier guest does not belong to this guest.
        let _ = relocated::forget(&place);
        Ok::<_, ErrorBody>(place)
    });
    let place = place.await??;
    let offset = place.extent.offset;
    Ok(Some(PoolMemory {
        path: place.path,
        part: place.align.map(|align| MemoryPart { offset, align }),
    }))
}

/// Checks that this node may run the VM's guest, as far as the memory decides.
///
/// # Errors
/// The memory belongs to another node, or is unreadable.
pub(crate) fn may_run(vms: &Vms, vm: &Vm) -> Result<(), ErrorBody> {
    let (memory, gone) = {
        let inner = vm.lock();
        (inner.entry.memory.clone(), inner.entry.moved_to.is_some())
    };
    let Some(memory) = memory else {
        return Ok(());
    };
    let (_, segment) = segment(vms, &vm.name, &memory)?;
    let title = segment
        .title()
        .map_err(|error| refused(&vms.context.config.name, &memory.pool, &error))?;
    if title.may_run(&vms.context.config.name, gone) {
        return Ok(());
    }
    let text = format!(
        "the memory of VM {} belongs to node '{}': its guest must not run here",
        vm.name, title.owner
    );
    Err(ErrorBody::new(ErrorCode::Conflict, text)
        .hint(format!("see 'godwit vm show {}' there", vm.name)))
}

/// Returns the title of the memory of a VM that is here, or `None` if the memory is in no pool or unreadable.
pub fn owner(vms: &Vms, vm: &Vm) -> Option<Title> {
    let memory = {
        let inner = vm.lock();
        let is_here = inner.entry.moved_to.is_none();
        inner.entry.memory.clone().filter(|_| is_here)?
    };
    let (_, segment) = segment(vms, &vm.name, &memory).ok()?;
    segment.title().ok()
}

/// Returns a sentence if a pool's memory cannot move out of the pool while a guest runs.
pub(super) fn immovable(config: &NodeConfig, name: &str) -> Option<String> {
    let moves = open(config, name).and_then(|pool| {
        let moves = pool.lets_memory_move();
        moves.map_err(|error| refused(&config.name, name, &error))
    });
    match moves {
        Ok(true) => None,
        Ok(false) => Some(format!(
            "memory pool {name} is not on tmpfs, and no other memory can move under a guest: leave it in the pool with \
             --stay-in-pool"
        )),
        Err(error) => Some(sentence(error)),
    }
}

/// Returns a blocker of one sentence: the error and the remedy.
fn sentence(error: ErrorBody) -> String {
    match error.hint {
        Some(hint) => format!("{}; {hint}", error.message),
        None => error.message,
    }
}

/// Offers the VM's title. Writes the question for the destination into the pool.
///
/// # Errors
/// A sentence with the blocker of moving the memory.
pub fn offer(
    vms: &Vms,
    vm: &str,
    entry: &mut VmEntry,
    migration: &str,
) -> Result<(PoolOffer, Question), String> {
    let Some(memory) = &mut entry.memory else {
        return Err(String::from(
            "its memory is in no memory pool: start it with 'godwit vm run --memory-pool', or, to adopt it, with -object \
             memory-backend-file whose mem-path is NAME.memory in the pool's folder; or use another way of moving memory",
        ));
    };
    let failed =
        |error: PoolError| sentence(refused(&vms.context.config.name, &memory.pool, &error));
    let (pool, segment) = segment(vms, vm, memory).map_err(sentence)?;
    let title = segment.title().map_err(failed)?;
    if title.owner != vms.context.config.name {
        return Err(format!("its memory belongs to node '{}'", title.owner));
    }
    let question = Question::ask(&pool, vm, migration).map_err(failed)?;
    memory.epoch = title.epoch;
    let offer = PoolOffer {
        pool: memory.pool.clone(),
        id: segment.id(),
        bytes: segment.bytes(),
        epoch: title.epoch,
        stays: false,
        nonce: question.nonce(),
    };
    Ok((offer, question))
}

/// Destination: checks an offered segment, and proves to the source that both nodes see the same memory.
///
/// # Errors
/// A sentence with the blocker here.
pub(crate) fn take_up(
    vms: &Vms,
    vm: &str,
    migration: &str,
    offer: &PoolOffer,
) -> Result<(), String> {
    let failed =
        |error: PoolError| sentence(refused(&vms.context.config.name, &offer.pool, &error));
    // The name becomes part of file names.
    names::check("VM", vm).map_err(|error| error.message)?;
    let pool = open(&vms.context.config, &offer.pool).map_err(sentence)?;
    proof::answer(&pool, vm, migration, &offer.nonce, &vms.context.config.name).map_err(failed)?;
    let (_, segment) = segment(vms, vm, &offer.expected()).map_err(sentence)?;
    let title = segment.title().map_err(failed)?;
    if title.epoch != offer.epoch || segment.bytes() != offer.bytes {
        return Err(format!(
            "the segment of VM {vm} in memory pool {} is not the one that was offered",
            offer.pool
        ));
    }
    let user = vms
        .context
        .config
        .qemu_user
        .as_ref()
        .filter(|_| pool.is_device());
    match user.and_then(|user| closed_to(user, pool.path())) {
        Some(why) => Err(format!("node '{}': {why}: let it", vms.context.config.name)),
        None => Ok(()),
    }
}

impl PoolOffer {
    /// Returns the record that the destination stores.
    pub fn expected(&self) -> PooledMemory {
        PooledMemory {
            pool: self.pool.clone(),
            id: self.id.clone(),
            bytes: self.bytes,
            epoch: self.epoch,
            given_to: None,
        }
    }
}

/// Destination: returns the present word of the title, or `None` if the memory is in no pool. An unreadable title is
/// undecided.
pub fn arrival(vms: &Vms, vm: &Vm) -> Option<Arrival> {
    let memory = vm.lock().entry.memory.clone()?;
    let title = segment(vms, &vm.name, &memory).and_then(|(_, segment)| {
        segment
            .title()
            .map_err(|error| refused(&vms.context.config.name, &memory.pool, &error))
    });
    match title {
        Ok(title) => Some(title.arrival(&vms.context.config.name, memory.epoch)),
        Err(error) => {
            tracing::debug!(vm = vm.name, %error, "the VM's memory cannot be looked at");
            Some(Arrival::Undecided)
        }
    }
}

/// Destination: takes the title by an operator's order, while the source is undecided. If the source decides at the
/// same moment, only one of both titles is written.
///
/// # Errors
/// The segment is unreadable now, or has gone elsewhere.
pub fn claim(vms: &Vms, vm: &str, memory: &PooledMemory) -> Result<(), ErrorBody> {
    let here = &vms.context.config.name;
    let failed = |error: PoolError| refused(here, &memory.pool, &error);
    let (_, segment) = segment(vms, vm, memory)?;
    let title = segment.title().map_err(failed)?;
    if title.owner == *here {
        return Ok(());
    }
    let claimed = segment.decide(&title.owner, memory.epoch, here);
    claimed.map(drop).map_err(failed)
}

/// Source: writes the durably stored handover of the VM into the title. Tries again until the write works or the node
/// closes; the node's next run then goes on.
pub(crate) async fn hand_over(vms: &Arc<Vms>, vm: &str, gone: &VmEntry) {
    let mut said = false;
    let try_once = || {
        let (vms, vm, gone) = (Arc::clone(vms), vm.to_owned(), gone.clone());
        async move { blocking(move || give(&vms, &vm, &gone)).await.flatten() }
    };
    while let Err(error) = try_once().await {
        // Logged only once: a pool may stay away for long.
        if !std::mem::replace(&mut said, true) {
            tracing::error!(vm, %error, "cannot give the VM's memory away; trying again");
        }
        tokio::select! {
            () = tokio::time::sleep(RETRY) => {}
            () = vms.context.closed() => return,
        }
    }
}

/// Writes the memory's new owner into the title, if the memory was given away and the title does not say so yet.
///
/// # Errors
/// The segment is unreadable now.
pub(super) fn give(vms: &Vms, vm: &str, gone: &VmEntry) -> Result<(), ErrorBody> {
    let Some((memory, to)) = given(gone) else {
        return Ok(());
    };
    let pool = open(&vms.context.config, &memory.pool)?;
    let decided = Segment::open(&pool, vm).and_then(|segment| {
        if segment.id() != memory.id {
            tracing::info!(
                vm,
                "another machine's memory has the name of the VM's, which has gone on since"
            );
            return Ok(());
        }
        segment
            .decide(&vms.context.config.name, memory.epoch, to)
            .map(drop)
    });
    match decided {
        // The handover is stored, so no other node could have decided: the title has moved on from there.
        Err(PoolError::Refused { why, .. }) => {
            tracing::info!(vm, %why, "the VM's memory has gone on since it was given away");
            Ok(())
        }
        // A pool that is not mounted also looks like a missing segment.
        decided => decided.map_err(|error| refused(&vms.context.config.name, &memory.pool, &error)),
    }
}

/// Returns the memory that goes with a VM given to another node, and the node.
pub(super) fn given(entry: &VmEntry) -> Option<(&PooledMemory, &str)> {
    let memory = entry.memory.as_ref()?;
    Some((memory, memory.given_to.as_deref()?))
}

/// Source: ends an offer in this node's own favour. The destination then knows that the VM does not come.
pub fn keep(vms: &Vms, vm: &str, entry: &VmEntry) {
    let Some(memory) = &entry.memory else { return };
    if !matches!(entry.mark, Some(VmMark::Outgoing { .. })) {
        return;
    }
    let kept = segment(vms, vm, memory).and_then(|(_, segment)| {
        segment
            .decide(
                &vms.context.config.name,
                memory.epoch,
                &vms.context.config.name,
            )
            .map_err(|error| refused(&vms.context.config.name, &memory.pool, &error))
    });
    if let Err(error) = kept {
        // The title is this node's all the same.
        tracing::warn!(vm, %error, "cannot note that the VM's memory stays");
    }
}
