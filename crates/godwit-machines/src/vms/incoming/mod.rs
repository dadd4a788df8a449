//! Receives VMs.

pub(crate) mod arrival;
mod asking;
pub(crate) mod doubt;
mod nics;
pub(crate) mod post_copy_destination;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_core::wire::Hello;
use serde_json::json;
use tokio::task::AbortHandle;

use crate::nics::follow;
use crate::protect;
use crate::vms::Vms;
use crate::vms::control::Link;
use crate::vms::incoming::arrival::{DestinationLink, Incoming};
use crate::vms::lifecycle::run;
use crate::vms::lifecycle::watch;
use crate::vms::memory::page_tables;
use crate::vms::memory::pooled::{self, PoolOffer};
use crate::vms::memory::qemu_fits;
use crate::vms::messages::{self, Answer, MachineOffer, Order, SILENCE};
use crate::vms::outgoing::{given, preflight};
use crate::vms::tunnel;
use crate::vms::view::{pull, shared};
use crate::vms::vm::{Qemu, Vm, VmActivity, VmGuard};
use godwit_api::{ErrorBody, ErrorCode, VmState};
use godwit_context::store::machine::{VmMark, VmOrigin};
use godwit_disks::disks::disk::{Activity, Disk};
use godwit_peers::PeerConnection;
use godwit_qemu::migration;
use godwit_qemu::monitor::qmp::QmpError;
use godwit_qemu::monitor::spare;
use godwit_qemu::monitor::spare::Spare;
use godwit_qemu::process::sandbox;
use godwit_qemu::process::{self, Unwatched};

/// Longest wait for the rest of an earlier attempt to go.
const LEFTOVERS: Duration = Duration::from_secs(10);

/// Time between two checks for the rest.
const LOOK: Duration = Duration::from_millis(50);

/// Handles a welcomed control connection: an offer of a VM follows, or a question or order about an earlier move.
pub async fn take_machine(vms: Arc<Vms>, mut connection: PeerConnection, hello: Hello) {
    let order = tokio::time::timeout(SILENCE, messages::read(&mut connection)).await;
    let link = |connection| {
        Link::open(
            connection,
            || Answer::Pong,
            |order| matches!(order, Order::Ping),
        )
    };
    let offer = match order {
        Ok(Ok(Order::Offer(offer))) => offer,
        Ok(Ok(Order::Ask { id })) => {
            let word = given::word(&vms, &hello, &id);
            tracing::info!(peer = hello.node, vm = hello.disk, migration = %hello.migration, ?word, "asked who has the VM");
            // A node without the answer asks again.
            let _ = messages::write(&mut connection, &Answer::Word(word)).await;
            return;
        }
        Ok(Ok(Order::Protection(opening))) => {
            return protect::welcome(&vms, connection, hello, *opening).await;
        }
        Ok(Ok(order @ (Order::Resume | Order::Lost { .. }))) => {
            return let_return(&vms, link(connection), order, &hello).await;
        }
        _ => {
            tracing::debug!(peer = hello.node, "no offer of a VM followed the hello");
            return;
        }
    };
    let link = link(connection);
    tracing::info!(peer = hello.node, vm = hello.disk, migration = %hello.migration, "offered a VM");
    outlive_leftovers(&vms, &hello.disk, &offer).await;
    let mut blockers = preflight::coming(&vms, &hello.disk, &offer).await;
    if let Some(pool) = &offer.pool {
        let migration = hello.migration.to_string();
        blockers.extend(pooled::take_up(&vms, &hello.disk, &migration, pool).err());
    }
    if !blockers.is_empty() {
        tracing::warn!(vm = hello.disk, ?blockers, "the VM cannot come");
        link.say(Answer::Blocked(blockers)).await;
        return;
    }
    let most = vms.context.config.incoming.count as usize;
    if vms.memory_doors.open_for(&hello.node) >= most {
        let why = format!(
            "node '{}' receives {most} virtual machines of node '{}' already, the most that its \
             --max-incoming allows: wait until one has arrived",
            vms.context.config.name, hello.node
        );
        tracing::warn!(vm = hello.disk, why, "the VM cannot come");
        link.say(Answer::Blocked(vec![why])).await;
        return;
    }
    let (vm, guard) = match reserve(&vms, &hello, &offer).await {
        Ok(reserved) => reserved,
        Err(error) => {
            link.say(Answer::Blocked(vec![error.message])).await;
            return;
        }
    };
    let notices = preflight::notices(&vms, &offer).await;
    if !notices.is_empty() {
        link.say(Answer::Notices(notices)).await;
    }
    link.say(Answer::Ready).await;
    let door = vms.memory_doors.open(hello.migration, &hello.node);
    Incoming::new(&vms, &vm, *offer, link, door)
        .decide(guard)
        .await;
}

/// Waits until the rest of an earlier attempt to bring the VM here is gone. The rest goes once this node knows the
/// attempt's end, such as a moment after a restart.
async fn outlive_leftovers(vms: &Vms, vm: &str, offer: &MachineOffer) {
    let until = Instant::now() + LEFTOVERS;
    let is_left = || {
        let comes = |vm: &Arc<Vm>| vm.lock().state() == VmState::Incoming;
        let goes = |disk: &Arc<Disk>| {
            let inner = disk.lock();
            matches!(inner.activity, Activity::Incoming(_) | Activity::Removing)
        };
        let mut disks = offer.disks.iter();
        vms.find(vm).is_some_and(|vm| comes(&vm))
            || disks.any(|(disk, _)| vms.disks.find(disk).is_some_and(|disk| goes(&disk)))
    };
    while is_left() && Instant::now() < until {
        tokio::time::sleep(LOOK).await;
    }
}

/// Handles a source with lost connections or lost memory, for a VM pulling memory from there.
async fn let_return(vms: &Vms, link: DestinationLink, order: Order, hello: &Hello) {
    if let Some(returns) = vms.memory_doors.returns(hello) {
        // A single queued return is enough: the source tries again.
        let _ = returns.try_send((link, order));
        return;
    }
    if let Some(answer) = without_door(vms, hello) {
        let migration = hello.migration.to_string();
        tracing::info!(
            peer = hello.node,
            vm = hello.disk,
            migration,
            ?answer,
            "nothing is pulled"
        );
        link.say(answer).await;
    }
}

/// Returns the answer to the source of a VM without a door for memory, or `None` if the source should try again.
fn without_door(vms: &Vms, hello: &Hello) -> Option<Answer> {
    let Some(vm) = vms.find(&hello.disk) else {
        let why = String::from("it is not there any more");
        return Some(Answer::Failed(why));
    };
    let inner = vm.lock();
    let id = hello.migration.to_string();
    match &inner.entry.mark {
        // This node is starting, and looks for the VM's QEMU.
        Some(VmMark::Incoming { migration, .. } | VmMark::Pulling { migration, .. })
            if *migration == id =>
        {
            None
        }
        _ if inner.qemu.is_some() => Some(Answer::Pulled),
        _ => {
            let why = String::from("its QEMU there has ended");
            Some(Answer::Failed(why))
        }
    }
}

async fn reserve(
    vms: &Arc<Vms>,
    hello: &Hello,
    offer: &MachineOffer,
) -> Result<(Arc<Vm>, VmGuard), ErrorBody> {
    let origin = VmOrigin::Received {
        from: hello.node.clone(),
    };
    let mark = VmMark::Incoming {
        migration: hello.migration.to_string(),
        pulls: offer.memory.pulls(),
        runs: true,
    };
    let memory = offer.pool.as_ref().map(PoolOffer::expected);
    let machine = offer.machine.clone();
    let id = (offer.id.clone(), offer.epoch);
    let mut entry = run::entry(vms, &hello.disk, machine, id, (origin, mark), memory)?;
    entry.disk_ids.clone_from(&offer.disk_ids);
    let activity = VmActivity::Incoming(hello.migration);
    run::reserve(vms, &hello.disk, entry, activity).await
}

/// Starts a QEMU for the VM's incoming memory. Dropping the future ends the QEMU.
///
/// # Errors
/// QEMU does not start, or cannot do the kind of move.
pub(crate) async fn start(
    vms: &Arc<Vms>,
    vm: &Arc<Vm>,
    offer: MachineOffer,
) -> Result<Qemu, ErrorBody> {
    let machine = &offer.machine;
    let socket = |disk: &str| vms.context.config.vhost_socket(disk);
    let expected = offer.pool.as_ref().map(PoolOffer::expected);
    let version = run::version(vms, &vm.name, &machine.program).await?;
    qemu_fits::check(vms, &vm.name, version, expected.as_ref())?;
    let memory = pooled::mapped(vms, vm).await?;
    let machine_type = offer.machine_type.as_deref();
    let mut line = machine.command_line(version, &vm.places, socket, machine_type, memory.as_ref());
    if vms.context.config.qemu_sandbox {
        line.extend(sandbox::words(&line));
    }
    line.extend(["-incoming", "defer", "-S"].map(str::to_owned));
    run::make_folder(vms, &vm.name, vm.places.clone()).await?;
    super::nics::serve(vms, vm).await?;
    let pulls = offer.memory.pulls();
    let failed = |error: &dyn std::fmt::Display| {
        let text = format!("VM {} cannot be received: {error}", vm.name);
        ErrorBody::new(ErrorCode::Internal, text)
    };
    if pulls {
        spare::make_pipes(&vm.places, vms.context.config.qemu_user.as_ref())
            .map_err(|error| failed(&error))?;
        line.extend(spare::arguments(&vm.places));
    }
    let user = vms.context.config.qemu_user.as_ref();
    let started = process::start(&machine.program, &line, &vm.places, user, run::PRELOAD);
    let (process, qmp) = started
        .await
        .map_err(|error| run::not_started(&vm.name, &error))?;
    let qemu = Qemu { qmp, process };
    let unwatched = Unwatched::new(&qemu.process);
    let ready = async {
        if pulls {
            begin_spare(vm).await?;
        }
        let (pull, shared) = (pull(offer.memory), shared(offer.memory));
        migration::set_capabilities(&qemu.qmp, pull, shared, false).await?;
        migration::listen(&qemu.qmp, &vm.places.incoming()).await
    };
    if let Err(error) = ready.await {
        qemu.process.kill().await;
        return Err(failed(&error));
    }
    let nics = vm.lock().nics.clone();
    if let Err(why) = follow::until_passing(&nics).await {
        qemu.process.kill().await;
        return Err(failed(&why));
    }
    watch::attach(vms, vm, qemu.clone()).await;
    unwatched.keep();
    page_tables::fill(vms, vm, qemu.process.pid).await;
    Ok(qemu)
}

async fn begin_spare(vm: &Vm) -> Result<(), QmpError> {
    let spare = Spare::open(&vm.places).map_err(|error| QmpError::Closed(error.to_string()))?;
    spare.begin().await?;
    vm.lock().spare = Some(spare);
    Ok(())
}

/// Carries the VM's memory into the QEMU listening at this socket. Returns the carrying task.
pub(crate) fn pour(vm: &Arc<Vm>, connection: PeerConnection, socket: PathBuf) -> AbortHandle {
    let vm = Arc::clone(vm);
    let carrying = godwit_context::spawn(async move {
        if let Err(error) = tunnel::receive(connection, &socket).await {
            tracing::info!(vm = vm.name, %error, "the memory's connection ended");
        }
    });
    carrying.abort_handle()
}

/// Resumes the guest.
///
/// # Errors
/// QEMU refuses.
pub(crate) async fn let_run(qemu: &Qemu) -> Result<(), QmpError> {
    qemu.qmp.execute("cont", json!({})).await.map(drop)
}
