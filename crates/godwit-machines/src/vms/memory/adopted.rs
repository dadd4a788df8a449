//! The memory of an adopted VM in a file of a memory pool. The file becomes a segment of the VM's name, so the VM can
//! move without the memory, like a VM started by this node.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use godwit_core::units::Bytes;
use godwit_memory::pool::device::space::Extent;
use godwit_memory::pool::segment::Segment;
use godwit_memory::pool::{Place, Pool};

use crate::vms::Vms;
use crate::vms::memory::{pooled, pools, relocated};
use godwit_api::{ErrorBody, ErrorCode};
use godwit_context::blocking;
use godwit_context::config::NodeConfig;
use godwit_context::store::machine::PooledMemory;
use godwit_qemu::inspect::Facts;
use godwit_qemu::machine::{Machine, MemoryFile, is_set};

/// Makes the memory of a VM's QEMU a segment of the file's memory pool. Returns `None` for memory outside all pools.
///
/// # Errors
/// The memory is in a pool, or may be, and could not be given to another node in this state: the required change.
pub async fn take(
    vms: &Arc<Vms>,
    vm: &str,
    pid: u32,
    machine: &mut Machine,
    facts: &Facts,
) -> Result<Option<PooledMemory>, ErrorBody> {
    let Some(found) = find(&vms.context.config, vm, pid, machine)? else {
        return Ok(None);
    };
    let Found {
        told,
        name,
        pool: opened,
    } = found;
    let refused = |why: String, hint: &str| {
        let text = format!(
            "cannot adopt VM {vm}: its memory in memory pool {name} cannot move with it: {why}"
        );
        ErrorBody::new(ErrorCode::Conflict, text).hint(hint)
    };
    if opened.is_device() {
        // The next guest to start there, at any node, would get the same part.
        let why = String::from(
            "nobody reserved that part of the device for it, so another machine may get it",
        );
        let hint = format!(
            "end it now, and start it with 'godwit vm run --memory-pool {name}', which reserves its memory there"
        );
        return Err(refused(why, &hint));
    }
    if !told.is_replaceable() {
        let why = String::from("QEMU was told of it in JSON");
        let hint =
            "start QEMU with -object memory-backend-file,id=ID,size=SIZE,mem-path=FILE,share=on";
        return Err(refused(why, hint));
    }
    let path = opened.memory_path(vm);
    let bytes = std::fs::metadata(&path).map_or(0, |metadata| metadata.len());
    let place = Place {
        path,
        extent: Extent { offset: 0, bytes },
        align: None,
    };
    if bytes != facts.memory_bytes {
        let (has, in_pool) = (Bytes(facts.memory_bytes), Bytes(bytes));
        let why = format!("the guest has {has}, and its file {in_pool}");
        let hint = "start QEMU with all of its memory in one file of the pool";
        return Err(refused(why, hint));
    }
    if !facts.memory_shared {
        let why = String::from("it is not shared, so what the guest writes is not in the file");
        return Err(refused(why, "start QEMU with share=on behind its mem-path"));
    }
    if is_set(&told.told, "discard-data") {
        let why = String::from("QEMU would wipe it when it ends (discard-data)");
        return Err(refused(why, "start QEMU without discard-data"));
    }
    let (here, segment) = (vms.context.config.name.clone(), vm.to_owned());
    let made = blocking(move || {
        // A file in the place of QEMU's file would be given away instead.
        relocated::find(pid, &place).map_err(|error| error.to_string())?;
        Ok::<_, String>(Segment::adopt(&opened, &segment, &here))
    });
    let made = made
        .await?
        .map_err(|why| refused(why, "start QEMU anew, with its memory in that file"))?;
    let failed = |error| pools::refused(&vms.context.config.name, &name, &error);
    let made = made.map_err(failed)?;
    let title = made.title().map_err(failed)?;
    if let Some(user) = &vms.context.config.qemu_user {
        pooled::give_to(user, vm, made.place())?;
    }
    machine.take_memory_file(&told);
    Ok(Some(PooledMemory {
        pool: name,
        id: made.id(),
        bytes: made.bytes(),
        epoch: title.epoch,
        given_to: None,
    }))
}

/// A VM's memory in a memory pool.
struct Found {
    told: MemoryFile,
    /// The pool's name.
    name: String,
    pool: Pool,
}

/// Finds the file of a memory pool with memory of a QEMU.
///
/// # Errors
/// The file belongs to another VM's name, or the file's pool cannot be found out.
fn find(
    config: &NodeConfig,
    vm: &str,
    pid: u32,
    machine: &Machine,
) -> Result<Option<Found>, ErrorBody> {
    let mut found = None;
    if config.memory_pools.is_empty() {
        return Ok(None);
    }
    for told in machine.memory_files() {
        let file = whole_path(vm, pid, &told.path)?;
        // QEMU's file in a folder has no name.
        if file.is_dir() {
            continue;
        }
        let Some((name, pool, place)) = pool_of(config, &file)? else {
            continue;
        };
        let wanted = pool.memory_path(vm);
        if !pool.is_device() && wanted.file_name() != Some(place.as_os_str()) {
            let text = format!(
                "cannot adopt VM {vm}: its memory is the file {} of memory pool {name}, where a machine named {vm} has {}",
                file.display(),
                wanted.display()
            );
            return Err(ErrorBody::new(ErrorCode::Conflict, text).hint(
                "adopt it under the name of its file, or start it with memory in that file or in no pool",
            ));
        }
        found = Some(Found { told, name, pool });
    }
    Ok(found)
}

/// Returns the path of QEMU's file without links, also if the file is gone by now.
///
/// # Errors
/// The path is relative to QEMU's folder at its start, and QEMU has changed the folder since.
fn whole_path(vm: &str, pid: u32, told: &Path) -> Result<PathBuf, ErrorBody> {
    if told.is_absolute() {
        let folder = told.parent().zip(told.file_name());
        let folder = folder.and_then(|(folder, name)| Some(folder.canonicalize().ok()?.join(name)));
        return Ok(std::fs::canonicalize(told)
            .ok()
            .or(folder)
            .unwrap_or_else(|| told.to_owned()));
    }
    let found = std::fs::read_link(format!("/proc/{pid}/cwd"))
        .and_then(|folder| std::fs::canonicalize(folder.join(told)));
    found.map_err(|error| {
        let text = format!(
            "cannot adopt VM {vm}: its memory is in the file {}, which is not found from QEMU's folder: {error}",
            told.display()
        );
        ErrorBody::new(ErrorCode::Conflict, text).hint("start QEMU with the whole path behind mem-path")
    })
}

/// Returns the memory pool with a file in or below the pool's folder, and the file's path from there: empty for the
/// pool itself.
///
/// # Errors
/// A pool is unusable now, so the file may be in the pool.
fn pool_of(config: &NodeConfig, file: &Path) -> Result<Option<(String, Pool, PathBuf)>, ErrorBody> {
    for pool in &config.memory_pools {
        let opened = pools::open(config, &pool.name)?;
        let folder = std::fs::canonicalize(opened.path());
        let folder = folder.unwrap_or_else(|_| opened.path().to_owned());
        if let Ok(place) = file.strip_prefix(&folder) {
            return Ok(Some((pool.name.clone(), opened, place.to_owned())));
        }
    }
    Ok(None)
}
