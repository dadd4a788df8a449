//! The primary's connections to the backup.

use std::sync::Arc;
use std::time::Duration;

use godwit_api::{ErrorBody, ErrorCode, MemoryMode, MigrateRequest, MoveOptions, Policy};
use godwit_context::blocking;
use godwit_context::store::machine::VmEntry;
use godwit_context::store::machine::protections::ProtectionEntry;
use godwit_core::units::MigrationId;
use godwit_core::wire::{Features, Purpose, TrafficClass};
use godwit_disks::disks::storage::image;
use godwit_disks::migrations::outgoing::{self, End};
use godwit_peers::{PeerConnection, greeting};
use godwit_qemu::inspect::Facts;

use super::messages::{Hear, Opening, PrimaryLink, ProtectionOffer, primary_link};
use crate::vms::Vms;
use crate::vms::messages::{self, MachineOffer, Order};
use crate::vms::outgoing::nic_mtus;
use crate::vms::vm::Vm;

/// Longest wait for the backup's search for blockers.
const OFFER_TIMEOUT: Duration = Duration::from_secs(45);

/// Connections to a backup that takes the machine's disks.
#[derive(Debug)]
pub(crate) struct Connected {
    pub(super) control: PrimaryLink,
    pub(super) beats: PrimaryLink,
}

/// Opens a connection about the protection.
pub(super) async fn open(
    vms: &Arc<Vms>,
    vm: &str,
    entry: &ProtectionEntry,
    opening: Opening,
) -> Result<PeerConnection, ErrorBody> {
    let attempted = format!("protect VM {vm}");
    let peer = vms.context.peer(&entry.peer)?;
    let id = entry.id.parse::<MigrationId>().unwrap_or_default();
    let name = &vms.context.config.name;
    let hello = greeting::hello(name, vm, TrafficClass::Control, Purpose::Machine, id);
    let dialled = vms.context.dialer.dial(peer, hello).await;
    let (mut connection, agreed) =
        dialled.map_err(|error| error.into_body(&peer.name, &attempted))?;
    if !agreed.features.contain(Features::FOLLOWS) {
        let text = format!(
            "cannot {attempted}: node '{}' is older and is no backup of machines",
            peer.name
        );
        return Err(ErrorBody::new(ErrorCode::Conflict, text)
            .hint("update that node, or choose another backup"));
    }
    if entry.checkpoints_per_second.is_some() && !agreed.features.contain(Features::CHECKPOINTS) {
        let text = format!(
            "cannot {attempted}: node '{}' is older and takes no checkpoints",
            peer.name
        );
        return Err(
            ErrorBody::new(ErrorCode::Conflict, text).hint("update that node, or give --restart")
        );
    }
    let order = Order::Protection(Box::new(opening));
    messages::write(&mut connection, &order)
        .await
        .map_err(|error| lost(vm, &peer.name, &error))?;
    Ok(connection)
}

fn lost(vm: &str, peer: &str, why: &dyn std::fmt::Display) -> ErrorBody {
    let text = format!("cannot protect VM {vm}: node '{peer}' did not answer: {why}");
    ErrorBody::new(ErrorCode::PeerUnreachable, text).hint("see the log of the other node")
}

/// Offers the machine to its backup.
///
/// # Errors
/// The backup cannot be reached, or names what stands in the way.
pub(super) async fn connect(
    vms: &Arc<Vms>,
    vm: &str,
    machine: &VmEntry,
    entry: &ProtectionEntry,
) -> Result<Connected, ErrorBody> {
    let offer = offer(vms, vm, machine, entry).await?;
    let connection = open(vms, vm, entry, Opening::Offer(Box::new(offer))).await?;
    let mut control = primary_link(connection);
    match control.hear_within(OFFER_TIMEOUT).await {
        Some(Hear::Ready) => {}
        Some(Hear::Refused(blockers)) => {
            let list = blockers.join("\n- ");
            let text = format!("cannot protect VM {vm} by node '{}':\n- {list}", entry.peer);
            return Err(ErrorBody::new(ErrorCode::Conflict, text)
                .hint("nothing was changed; put this right and try again"));
        }
        _ => return Err(lost(vm, &entry.peer, &"the connection ended")),
    }
    let beats = primary_link(open(vms, vm, entry, Opening::Beats).await?);
    Ok(Connected { control, beats })
}

/// Asks the other node who has the machine, with [`Opening::Question`] or [`Opening::Look`].
pub(super) async fn question(
    vms: &Arc<Vms>,
    vm: &str,
    entry: &ProtectionEntry,
    question: Opening,
) -> Result<Hear, String> {
    let opened = open(vms, vm, entry, question).await;
    let mut connection = opened.map_err(|error| error.message)?;
    messages::read(&mut connection)
        .await
        .map_err(|error| format!("node '{}' did not answer: {error}", entry.peer))
}

/// Reads the facts of a machine whose checkpoints are taken.
pub(super) async fn facts(vm: &Vm, entry: &ProtectionEntry) -> Result<Facts, ErrorBody> {
    let qemu = vm.qemu()?;
    let facts = Facts::read(&qemu.qmp).await;
    facts.map_err(|error| {
        let text = format!(
            "cannot protect VM {} by node '{}': {error}",
            vm.name, entry.peer
        );
        ErrorBody::new(ErrorCode::Conflict, text)
    })
}

async fn offer(
    vms: &Arc<Vms>,
    vm: &str,
    machine: &VmEntry,
    entry: &ProtectionEntry,
) -> Result<ProtectionOffer, ErrorBody> {
    let (mut sizes, mut ids, mut epochs) = (Vec::new(), Vec::new(), Vec::new());
    for name in &machine.machine.disks {
        let disk = vms.disks.get(name)?;
        let (path, id, epoch) = {
            let inner = disk.lock();
            let id = inner.entry.id.map(|id| id.to_string());
            (inner.entry.path.clone(), id, inner.record.epoch.0)
        };
        let size = blocking(move || image::allocated(&path)).await?;
        sizes.push((name.clone(), size.unwrap_or(0)));
        ids.extend(id);
        epochs.push(epoch);
    }
    let known = entry.primary().map(|record| record.known);
    let (mut machine_type, mut qemu, mut memory_bytes) = (None, [0; 3], 0);
    // Nothing of the memory is copied without checkpoints.
    let mut memory = MemoryMode::ZeroCopy;
    if entry.checkpoints_per_second.is_some() {
        let vm = vms.get(vm)?;
        let facts = facts(&vm, entry).await?;
        let version = vm.qemu()?.qmp.version().clone();
        qemu = [version.major, version.minor, version.micro];
        (machine_type, memory_bytes) = (facts.machine_type, facts.memory_bytes);
        memory = MemoryMode::PreCopy;
    }
    Ok(ProtectionOffer {
        checkpoints_per_second: entry.checkpoints_per_second,
        machine: MachineOffer {
            id: machine.id.clone(),
            epoch: machine.epoch,
            machine: machine.machine.clone(),
            machine_type,
            qemu,
            memory_bytes,
            memory,
            pool: None,
            disks: sizes,
            disk_ids: ids,
            nic_mtus: nic_mtus(&machine.machine),
            nic_placings: Vec::new(),
        },
        disk_epochs: epochs,
        you: entry.me.other(),
        known: known.unwrap_or(godwit_protect::Grant::FIRST),
        witness: entry.witness.clone(),
        when_alone: entry.when_alone,
        timeout_ms: entry.timeout_ms,
        max_bandwidth: entry.max_bandwidth,
    })
}

/// Begins the migration of each disk. Returns the disks' names and migrations; those that have begun are cancelled if
/// one does not.
pub(super) async fn start_disks(
    vms: &Arc<Vms>,
    disks: &[String],
    entry: &ProtectionEntry,
) -> Result<Vec<(String, String)>, ErrorBody> {
    let mut started = Vec::new();
    for disk in disks {
        let request = MigrateRequest {
            disk: disk.clone(),
            to: entry.peer.clone(),
            pool: entry.pool.clone(),
            into: None,
            with_guest: true,
            options: MoveOptions {
                policy: Some(Policy::default()),
                max_bandwidth: entry.max_bandwidth,
                ..MoveOptions::default()
            },
        };
        match outgoing::start_in(
            &vms.disk_migrations,
            request,
            End::Stays {
                checkpoints: entry.checkpoints_per_second.is_some(),
            },
        )
        .await
        {
            Ok(migration) => started.push((disk.clone(), migration.id)),
            Err(error) => {
                cancel(vms, started);
                return Err(error);
            }
        }
    }
    Ok(started)
}

/// Cancels migrations, without waiting for their end.
pub(super) fn cancel(vms: &Arc<Vms>, started: Vec<(String, String)>) {
    for (_, id) in started {
        let migrations = Arc::clone(&vms.disk_migrations);
        tokio::spawn(async move {
            // A migration that has ended needs no cancellation.
            let _ = outgoing::cancel(&migrations, &id).await;
        });
    }
}
