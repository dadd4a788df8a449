//! The memory of a VM that somebody else started, where that is a file of a memory pool: it becomes a segment of the VM's
//! name, and the VM can move without its memory like one that this node started.

use std::path::Path;
use std::sync::Arc;

use godwit_core::units::Bytes;
use godwit_memory::pool::Pool;
use godwit_memory::pool::segment::Segment;

use crate::config::NodeConfig;
use crate::node::{Node, blocking};
use crate::store::machine::PooledMemory;
use crate::vms::memory::{pooled, relocated};
use godwit_api::{ErrorBody, ErrorCode};
use godwit_qemu::inspect::Facts;
use godwit_qemu::machine::{Machine, field};

/// Takes the memory of a VM's QEMU for a segment of the memory pool that its file is in. Nothing when it is in none.
///
/// # Errors
/// It is in a pool, and could not be given to another node like that: what to change.
pub(crate) async fn take(
    node: &Arc<Node>,
    vm: &str,
    pid: u32,
    machine: &mut Machine,
    facts: &Facts,
) -> Result<Option<PooledMemory>, ErrorBody> {
    let Some((file, told)) = machine.memory_file() else {
        return Ok(None);
    };
    let Some((name, opened)) = pool_of(&node.config, &file) else {
        return Ok(None);
    };
    let told = told.to_owned();
    let wanted = opened.memory_path(vm);
    if file.file_name() != wanted.file_name() {
        let text = format!(
            "cannot adopt VM {vm}: its memory is the file {} of memory pool {name}, where a machine named {vm} has {}",
            file.display(),
            wanted.display()
        );
        return Err(ErrorBody::new(ErrorCode::Conflict, text).hint(
            "adopt it under the name of its file, or start it with memory that is in no pool",
        ));
    }
    let refused = |why: String, hint: &str| {
        let text = format!(
            "cannot adopt VM {vm}: its memory in memory pool {name} cannot move with it: {why}"
        );
        ErrorBody::new(ErrorCode::Conflict, text).hint(hint)
    };
    let set = |key| field(&told, key).map(|(_, value)| value);
    let is_on = |key| set(key).is_some_and(|value| !matches!(value.as_str(), "off" | "no"));
    if !is_on("share") {
        let why = String::from("it is not shared, so what the guest writes is not in the file");
        return Err(refused(why, "start QEMU with share=on behind its mem-path"));
    }
    if is_on("discard-data") {
        let why = String::from("QEMU would wipe it when it ends (discard-data)");
        return Err(refused(why, "start QEMU without discard-data"));
    }
    let in_file = std::fs::metadata(&wanted).map_or(0, |metadata| metadata.len());
    if in_file != facts.memory_bytes {
        let why = format!(
            "the guest has {}, and its file {}",
            Bytes(facts.memory_bytes),
            Bytes(in_file)
        );
        return Err(refused(
            why,
            "start QEMU with all of its memory in one file of the pool",
        ));
    }
    let (here, segment) = (node.config.name.clone(), vm.to_owned());
    let made = blocking(move || {
        // A file that took the place of QEMU's would be given away in its stead.
        relocated::find(pid, &wanted, in_file).map_err(|error| error.to_string())?;
        Ok(Segment::adopt(&opened, &segment, &here))
    });
    let made = made
        .await?
        .map_err(|why| refused(why, "start QEMU anew, with its memory in that file"))?;
    let failed = |error| pooled::refused(&node.config.name, &name, &error);
    let made = made.map_err(failed)?;
    let title = made.title().map_err(failed)?;
    if let Some(user) = &node.config.qemu_user {
        pooled::give_to(user, vm, made.memory())?;
    }
    machine.take_memory_file();
    Ok(Some(PooledMemory {
        pool: name,
        id: made.id(),
        bytes: made.bytes(),
        epoch: title.epoch,
        given_to: None,
    }))
}

/// The memory pool in whose folder a file is, if its name ends as those of memory do.
fn pool_of(config: &NodeConfig, file: &Path) -> Option<(String, Pool)> {
    if !Pool::is_memory(file) {
        return None;
    }
    let folder = std::fs::canonicalize(file.parent()?).ok()?;
    let pools = config.memory_pools.iter();
    let mut opened =
        pools.filter_map(|pool| Some((pool.name.clone(), Pool::open(&pool.folder).ok()?)));
    opened.find(|(_, pool)| std::fs::canonicalize(pool.folder()).is_ok_and(|own| own == folder))
}
