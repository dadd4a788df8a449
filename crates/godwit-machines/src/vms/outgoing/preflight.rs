//! The search for all blockers of a VM's move, before anything moves.

use std::path::Path;
use std::sync::Arc;

use godwit_core::units::Bytes;

use crate::nics::links::Links;
use crate::nics::{request, uplinks};
use crate::vms::Vms;
use crate::vms::memory::{pools, qemu_fits};
use crate::vms::messages::MachineOffer;
use crate::vms::outgoing::planes::rollback::BOUND;
use crate::vms::vm::Vm;
use godwit_api::{DiskState, ErrorBody, MemoryMode};
use godwit_context::blocking;
use godwit_disks::disks::disk::Activity;
use godwit_disks::disks::storage::image;
use godwit_net::mac::Mac;
use godwit_peers::names;
use godwit_qemu::QemuUser;
use godwit_qemu::inspect::Facts;
use godwit_qemu::kvm;
use godwit_qemu::machine::{Machine, MemoryFile, Places};
use godwit_qemu::version::{Version, printed};

/// The first QEMU without a TCG fault that loses writes to memory copied while the guest runs.
const FIRST_SOUND_TCG: Version = Version([10, 0, 0]);

/// Source: returns the blockers of the disks here.
pub(crate) fn disks_leaving(vms: &Vms, machine: &Machine, facts: &Facts) -> Vec<String> {
    let here = &vms.context.config.name;
    let mut blockers = Vec::new();
    for disk in &machine.disks {
        let Some(found) = vms.disks.find(disk) else {
            blockers.push(format!("disk {disk} is missing on node '{here}'"));
            continue;
        };
        let inner = found.lock();
        if inner.state() != DiskState::Serving {
            let state = inner.state().name();
            blockers.push(format!("disk {disk} is {state} on node '{here}'"));
        } else if inner.activity != Activity::Idle {
            blockers.push(format!("disk {disk} is {}", inner.activity.describe()));
        } else if let Err(error) = inner.may_leave(disk) {
            blockers.push(error.message);
        } else if inner.lacks_room() {
            blockers.push(format!(
                "no space is left for disk {disk} on node '{here}', and writes wait for it"
            ));
        }
    }
    if !machine.disks.is_empty() && !facts.memory_shared {
        blockers.push(String::from(
            "its memory is not shared: QEMU needs -object memory-backend-memfd,...,share=on",
        ));
    }
    for drive in &facts.drives {
        blockers.push(format!(
            "drive {drive} is not a disk of node '{here}', so it would stay behind"
        ));
    }
    blockers
}

/// Source: returns the blockers of the memory and the devices here.
pub(super) fn memory_leaving(machine: &Machine, facts: &Facts) -> Vec<String> {
    let mut blockers = facts.devices.changes(machine);
    for reason in &facts.blocked {
        blockers.push(format!("QEMU refuses to migrate it: {reason}"));
    }
    blockers.extend(facts.bound.then(|| String::from(BOUND)));
    for reason in &machine.bound_here {
        blockers.push(format!(
            "QEMU cannot be started like that elsewhere: {reason}"
        ));
    }
    blockers
}

/// Destination: returns the blockers here.
pub async fn coming(vms: &Arc<Vms>, vm: &str, offer: &MachineOffer) -> Vec<String> {
    let here = &vms.context.config.name;
    let mut blockers = Vec::new();
    if let Err(error) = names::check("VM", vm) {
        return vec![error.message];
    }
    if let Err(error) = vms.context.check_open() {
        return vec![error.message];
    }
    if let Some(other) = vms.find(vm) {
        blockers.extend(taken(here, &other));
    }
    let places = Places {
        folder: vms.context.config.vms_dir().join(vm),
    };
    blockers.extend(paths(vms, vm, &offer.machine, &places));
    blockers.extend(disks(vms, vm, offer).await);
    blockers.extend(nics(vms, vm, offer).await);
    blockers.extend(files(here, &offer.machine));
    blockers.extend(memory_files(here, &offer.machine, &places));
    let stays = offer.pool.as_ref().is_some_and(|pool| pool.stays);
    if !stays
        && offer.pool.is_some()
        && let Err(error) = godwit_vhost::may_wait_for_pages()
    {
        blockers.push(format!(
            "node '{here}' may not hold pages of memory that follows a VM (userfaultfd: {error}): give it \
             CAP_SYS_PTRACE or access to /dev/userfaultfd, or leave the memory in its pool with --stay-in-pool"
        ));
    }
    if !stays
        && let Some(free) = free_memory()
        && free < offer.memory_bytes
    {
        blockers.push(format!(
            "node '{here}' has {} of memory available, the VM needs {}",
            Bytes(free),
            Bytes(offer.memory_bytes)
        ));
    }
    let pool = offer.pool.as_ref();
    let pool = pool.and_then(|offer| pools::open(&vms.context.config, &offer.pool).ok());
    let in_part = pool.is_some_and(|pool| pool.is_device());
    blockers.extend(qemu(here, offer, vms.context.config.qemu_user.as_ref(), in_part).await);
    blockers
}

fn taken(here: &str, other: &Arc<Vm>) -> Option<String> {
    let inner = other.lock();
    inner.holds_disks().then(|| {
        let state = inner.state().name();
        format!(
            "node '{here}' has a VM named {}, which is {state}",
            other.name
        )
    })
}

fn paths(vms: &Vms, vm: &str, machine: &Machine, places: &Places) -> Vec<String> {
    let sockets = machine
        .disks
        .iter()
        .map(|disk| vms.context.config.vhost_socket(disk));
    let nics = (0..machine.nics.len()).map(|nic| places.nic(nic));
    sockets
        .chain(nics)
        .chain([places.qmp(), places.console(), places.incoming()])
        .filter_map(|path| crate::vms::lifecycle::run::check_socket_path(vm, &path).err())
        .map(|error| format!("on node '{}': {}", vms.context.config.name, error.message))
        .collect()
}

async fn disks(vms: &Arc<Vms>, vm: &str, offer: &MachineOffer) -> Vec<String> {
    let here = &vms.context.config.name;
    let mut blockers = Vec::new();
    let mut wanted = 0_u64;
    for (disk, allocated) in &offer.disks {
        if let Err(error) = names::check("disk", disk) {
            blockers.push(error.message);
            continue;
        }
        let mut held = 0;
        match vms.disks.find(disk) {
            None if image::managed_path(&vms.context.config.disks_dir(), disk).exists() => {
                blockers.push(format!(
                    "node '{here}' has a file for a disk {disk} already"
                ));
            }
            None => {}
            Some(found) => {
                let inner = found.lock();
                held = image::allocated(&inner.entry.path).unwrap_or(0);
                if inner.state() != DiskState::Departed || inner.activity != Activity::Idle {
                    let state = inner.state().name();
                    blockers.push(format!("node '{here}' has a disk {disk}, which is {state}"));
                }
            }
        }
        if let Some(user) = vms.user_of(disk, Some(vm)) {
            blockers.push(format!(
                "VM {user} of node '{here}' uses a disk named {disk}"
            ));
        }
        wanted = wanted.saturating_add(allocated.saturating_sub(held));
    }
    if offer.memory.pulls()
        && !offer.disks.is_empty()
        && let Err(error) = godwit_vhost::may_wait_for_pages()
    {
        blockers.push(format!(
            "node '{here}' may not wait for memory that follows a VM ({error}): give it \
             CAP_SYS_PTRACE or access to /dev/userfaultfd, or use pre-copy"
        ));
    }
    let folder = vms.context.config.disks_dir();
    let name = here.clone();
    let names: Vec<_> = offer.disks.iter().map(|(disk, _)| disk.as_str()).collect();
    let names = names.join(", ");
    let space = blocking(move || image::check_space(&name, &names, &folder, wanted)).await;
    if let Err(ErrorBody { message, .. }) = space.flatten() {
        blockers.push(message);
    }
    blockers
}

/// Returns the blockers of the NICs: the uplinks must exist, and match the source's.
async fn nics(vms: &Vms, vm: &str, offer: &MachineOffer) -> Vec<String> {
    let here = &vms.context.config.name;
    let nics = &offer.machine.nics;
    if nics.len() > request::MOST_NICS {
        return vec![format!(
            "{} NICs are more than node '{here}' serves",
            nics.len()
        )];
    }
    let links = Links::read().await.unwrap_or_default();
    let uplinks = nics.iter().enumerate().filter_map(|(number, nic)| {
        let mtu = offer.nic_mtus.get(number).copied();
        let why = match nic.mac.parse::<Mac>() {
            Ok(_) => uplinks::blocker(nic, mtu, &links)?,
            Err(error) => error.to_string(),
        };
        Some(format!(
            "NIC {number} cannot be served at node '{here}': {why}"
        ))
    });
    let mut blockers: Vec<String> = uplinks.collect();
    blockers.extend(request::address_taken(&vms.nics, vm, nics));
    blockers
}

/// Returns the notices for the user of a VM that can come.
pub(crate) async fn notices(vms: &Vms, offer: &MachineOffer) -> Vec<String> {
    if offer.nic_placings.is_empty() {
        return Vec::new();
    }
    let links = Links::read().await.unwrap_or_default();
    links.notices(
        &vms.context.config.name,
        &offer.machine.nics,
        &offer.nic_placings,
    )
}

/// Names the missing files that QEMU reads when it starts.
fn files(here: &str, machine: &Machine) -> Vec<String> {
    ["kernel", "initrd", "bios", "dtb"]
        .iter()
        .filter_map(|option| machine.last_value(&[option]))
        .filter(|file| file.starts_with('/') && !Path::new(file).exists())
        .map(|file| format!("node '{here}' has no file {file}"))
        .collect()
}

/// Names the existing files that QEMU would write the VM's memory into, as at the source: both nodes may see the same
/// file.
fn memory_files(here: &str, machine: &Machine, places: &Places) -> Vec<String> {
    let files = machine.memory_files().into_iter();
    // In a folder QEMU makes a file of its own.
    let is_there = |file: &MemoryFile| {
        let found = std::fs::metadata(places.folder.join(&file.path));
        file.is_shared && found.is_ok_and(|found| !found.is_dir())
    };
    let sentences = files.filter(is_there).map(|file| {
        let file = file.path.display();
        format!(
            "node '{here}' has the file {file}, in which the machine's memory would be; if both nodes see it, both would \
             write to it: remove it there if it is that node's alone, or start the machine with other memory"
        )
    });
    sentences.collect()
}

/// Returns the bytes of memory available without swapping.
fn free_memory() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kilobytes << 10)
}

async fn qemu(
    here: &str,
    offer: &MachineOffer,
    user: Option<&QemuUser>,
    in_part: bool,
) -> Vec<String> {
    let program = &offer.machine.program;
    let file = Path::new(program).file_name().unwrap_or_default();
    if !file.as_encoded_bytes().starts_with(b"qemu-system-") {
        return vec![format!(
            "node '{here}' runs no program but qemu-system-*, and this is {file:?}"
        )];
    }
    let own = match Version::of(program, user).await {
        Ok(own) => own,
        Err(why) => return vec![format!("node '{here}': {why}")],
    };
    let mut blockers = Vec::new();
    if in_part && let Some(why) = qemu_fits::unfit(own) {
        blockers.push(format!("node '{here}': {why}"));
    }
    let accelerator = offer.machine.accelerator();
    if accelerator == Some("kvm")
        && let Err(why) = usable_kvm(user).await
    {
        blockers.push(format!(
            "the VM runs with KVM, which node '{here}' cannot use: {why}"
        ));
    }
    let copies = matches!(offer.memory, MemoryMode::PreCopy | MemoryMode::Hybrid);
    let sent_by = Version(offer.qemu);
    for (version, node) in [(own, here), (sent_by, "the source")] {
        if accelerator == Some("tcg") && copies && version < FIRST_SOUND_TCG {
            blockers.push(format!(
                "QEMU {version} at {node} can damage the memory of a guest that runs \
                 with TCG while it is copied: use 10.0 or later"
            ));
        }
    }
    if let Some(wanted) = &offer.machine_type {
        match printed(program, &["-machine", "help"], user).await {
            Ok(text) if names_first(&text, wanted) => {}
            Ok(_) => blockers.push(format!(
                "QEMU {own} of node '{here}' has no machine type {wanted}"
            )),
            Err(why) => blockers.push(format!("{program} of node '{here}': {why}")),
        }
    }
    let model = offer.machine.last_value(&["cpu"]);
    let model = model.and_then(|value| value.split(',').next());
    if accelerator == Some("tcg") {
        blockers.extend(lesser_translator(model, own, sent_by));
    }
    if let Some(model) = model
        && !matches!(model, "host" | "max")
    {
        match printed(program, &["-cpu", "help"], user).await {
            Ok(text) if names_first(&text, model) => {}
            Ok(_) => blockers.push(format!(
                "QEMU {own} of node '{here}' has no processor model {model}"
            )),
            Err(why) => blockers.push(format!("{program} of node '{here}': {why}")),
        }
    }
    blockers
}

/// Returns the error if KVM is unusable for this user's QEMU, or for the node's own.
async fn usable_kvm(user: Option<&QemuUser>) -> Result<(), String> {
    let user = user.cloned();
    let checked = blocking(move || kvm::check(user.as_ref())).await;
    checked.unwrap_or_else(|error| Err(error.message))
}

/// Returns the reason if this QEMU cannot run a guest with all processor features of the source's translator: an older
/// QEMU translates less.
fn lesser_translator(model: Option<&str>, own: Version, sent_by: Version) -> Option<String> {
    let minor = |Version([major, minor, _]): Version| [major, minor];
    (model == Some("max") && minor(own) < minor(sent_by)).then(|| {
        format!(
            "the VM has the processor model max, which in QEMU {own} is less than in QEMU {sent_by} at the source: \
             run it with a model that both know, such as -cpu Nehalem, or move it to a later QEMU"
        )
    })
}

/// Returns true if a line begins with this word, or with a kind and this word.
fn names_first(text: &str, name: &str) -> bool {
    text.lines()
        .any(|line| line.split_whitespace().take(2).any(|word| word == name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read() {
        let text = "Supported:\npc-q35-10.0    Standard PC\nx86 qemu64  (alias)\n  486  x\n";
        for (name, there) in [
            ("pc-q35-10.0", true),
            ("qemu64", true),
            ("486", true),
            ("pc-q35-9.0", false),
            ("(alias)", false),
        ] {
            assert_eq!(names_first(text, name), there, "{name}");
        }
    }

    #[test]
    fn an_older_translator_does_not_take_all_of_a_later_one() {
        let (old, new, newer) = (
            Version([7, 2, 22]),
            Version([10, 0, 2]),
            Version([10, 0, 5]),
        );
        let refused = |model, own, sent_by| lesser_translator(Some(model), own, sent_by).is_some();
        assert!(refused("max", old, new));
        assert!(!refused("max", new, old) && !refused("max", new, newer));
        assert!(!refused("Nehalem", old, new) && lesser_translator(None, old, new).is_none());
    }

    #[test]
    fn memory_in_a_file_that_both_nodes_may_see_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let places = Places {
            folder: folder.path().join("vms/v"),
        };
        let file = folder.path().join("v.memory");
        std::fs::write(&file, "").expect("writes");
        let file = file.display();
        let refused = |memory: String| {
            let words = ["q", "-object", &memory].map(str::to_owned);
            let machine = Machine::adopt(&words, |_| None).expect("a machine");
            memory_files("b", &machine, &places)
        };
        let options = format!("id=m,size=1M,mem-path={file},share=on");
        for memory in [
            format!("memory-backend-file,{options}"),
            format!("qom-type=memory-backend-file,{options}"),
            format!(r#"{{"qom-type":"memory-backend-file","mem-path":"{file}","share":true}}"#),
        ] {
            let refused = refused(memory);
            let said = format!("node 'b' has the file {file}, in which the machine's memory");
            assert!(
                refused.len() == 1 && refused[0].starts_with(&said),
                "{refused:?}"
            );
        }
        for other in [
            format!("memory-backend-file,mem-path={file},share=off"),
            format!("memory-backend-file,mem-path={file}.other,share=on"),
            format!(
                "memory-backend-file,mem-path={},share=on",
                folder.path().display()
            ),
        ] {
            assert_eq!(refused(other.clone()), [""; 0], "{other}");
        }
    }

    #[test]
    fn free_memory_can_be_told_here() {
        assert!(free_memory().expect("is told") > 0);
    }
}
