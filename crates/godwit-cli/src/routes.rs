//! Routes of the API.

use std::time::Duration;

use crate::client::segment;

pub(crate) const DISKS: &str = "/v1/disks";
pub(crate) const IMPORTS: &str = "/v1/disks/import";
pub(crate) const MIGRATIONS: &str = "/v1/migrations";
pub(crate) const VMS: &str = "/v1/vms";
pub(crate) const NICS: &str = "/v1/nics";
pub(crate) const VM_ADOPTIONS: &str = "/v1/vms/adopt";
pub(crate) const MEMORY_POOLS: &str = "/v1/memory-pools";
pub(crate) const PROCESSES: &str = "/v1/processes";
pub(crate) const CONTAINERS: &str = "/v1/containers";
pub(crate) const PEERS: &str = "/v1/peers";

pub(crate) fn disk(name: &str) -> String {
    format!("{DISKS}/{}", segment(name))
}

pub(crate) fn disk_removal(name: &str, force: bool) -> String {
    let path = disk(name);
    if force {
        format!("{path}?force=true")
    } else {
        path
    }
}

pub(crate) fn disk_export(name: &str) -> String {
    format!("{}/export", disk(name))
}

pub(crate) fn disk_resize(name: &str) -> String {
    format!("{}/resize", disk(name))
}

pub(crate) fn disk_abandon(name: &str) -> String {
    format!("{}/abandon", disk(name))
}

pub(crate) fn disk_claim(name: &str) -> String {
    format!("{}/claim", disk(name))
}

pub(crate) fn migration(id: &str) -> String {
    format!("{MIGRATIONS}/{}", segment(id))
}

/// Returns the route that answers when the migration ends, or after `wait`.
pub(crate) fn migration_within(id: &str, wait: Duration) -> String {
    format!("{}?wait_ms={}", migration(id), wait.as_millis())
}

pub(crate) fn migration_cancel(id: &str) -> String {
    format!("{}/cancel", migration(id))
}

pub(crate) fn migration_switch(id: &str) -> String {
    format!("{}/switch", migration(id))
}

/// Returns the route of a NIC, named by VM and number or by its own name.
pub(crate) fn nic(name: &str) -> String {
    match name.rsplit_once('/') {
        Some((vm, number)) => format!("{NICS}/{}/{}", segment(vm), segment(number)),
        None => format!("{NICS}/{}", segment(name)),
    }
}

pub(crate) fn nic_removal(name: &str, force: bool) -> String {
    format!("{NICS}/{}?force={force}", segment(name))
}

pub(crate) fn vm(name: &str) -> String {
    format!("{VMS}/{}", segment(name))
}

pub(crate) fn vm_forget(name: &str, force: bool) -> String {
    format!("{}?force={force}", vm(name))
}

pub(crate) fn vm_stop(name: &str) -> String {
    format!("{}/stop", vm(name))
}

pub(crate) fn vm_resume(name: &str, force: bool) -> String {
    let insisting = if force { "?force=true" } else { "" };
    format!("{}/resume{insisting}", vm(name))
}

pub(crate) fn vm_memory(name: &str) -> String {
    format!("{}/memory", vm(name))
}

pub(crate) fn vm_memory_cancel(name: &str) -> String {
    format!("{}/cancel", vm_memory(name))
}

pub(crate) fn vm_migrate(name: &str) -> String {
    format!("{}/migrate", vm(name))
}

pub(crate) fn vm_protection(name: &str) -> String {
    format!("{}/protection", vm(name))
}

pub(crate) fn vm_unprotection(name: &str, force: bool) -> String {
    format!("{}?force={force}", vm_protection(name))
}

pub(crate) fn vm_failover(name: &str) -> String {
    format!("{}/failover", vm(name))
}

pub(crate) fn memory_pool(name: &str) -> String {
    format!("{MEMORY_POOLS}/{}", segment(name))
}

pub(crate) fn memory_pool_format(name: &str) -> String {
    format!("{}/format", memory_pool(name))
}

pub(crate) fn process(pid: u32) -> String {
    format!("{PROCESSES}/{pid}")
}

pub(crate) fn process_migrate(pid: u32) -> String {
    format!("{}/migrate", process(pid))
}

pub(crate) fn container_migrate(id: &str) -> String {
    format!("{CONTAINERS}/{}/migrate", segment(id))
}

pub(crate) fn job(id: &str) -> String {
    format!("/v1/jobs/{}", segment(id))
}
