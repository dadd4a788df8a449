//! Takes VMs in.

use std::sync::Arc;

use godwit_core::wire::Hello;
use serde_json::json;

use super::decide::Incoming;
use super::link::Link;
use super::orders::{self, Answer, MachineOffer, Order, SILENCE};
use super::process;
use super::vm::{Qemu, Vm, VmActivity, VmMark, VmOrigin};
use super::{memory, preflight, run, tunnel, watch};
use crate::api::{ErrorBody, ErrorCode};
use crate::node::Node;
use crate::peers::PeerConnection;

/// Takes a control connection whose hello was welcomed: the offer of a VM follows.
pub(crate) async fn take_machine(node: Arc<Node>, mut connection: PeerConnection, hello: Hello) {
    let offer = tokio::time::timeout(SILENCE, orders::read(&mut connection)).await;
    let Ok(Ok(Order::Offer(offer))) = offer else {
        tracing::debug!(peer = hello.node, "no offer of a VM followed the hello");
        return;
    };
    let link = Link::open(
        connection,
        || Answer::Pong,
        |order| matches!(order, Order::Ping),
    );
    tracing::info!(peer = hello.node, vm = hello.disk, migration = %hello.migration, "offered a VM");
    let blockers = preflight::coming(&node, &hello.disk, &offer).await;
    if !blockers.is_empty() {
        tracing::warn!(vm = hello.disk, ?blockers, "the VM cannot come");
        link.say(Answer::Blocked(blockers)).await;
        return;
    }
    let vm = match reserve(&node, &hello, &offer).await {
        Ok(vm) => vm,
        Err(error) => {
            link.say(Answer::Blocked(vec![error.message])).await;
            return;
        }
    };
    let activity = VmActivity::Incoming(hello.migration);
    let guard = match vm.begin(activity, |_| Ok(())) {
        Ok(guard) => guard,
        Err(error) => {
            link.say(Answer::Blocked(vec![error.message])).await;
            return;
        }
    };
    link.say(Answer::Ready).await;
    let door = node.memory_doors.open(hello.migration, &hello.node);
    Incoming::new(&node, &vm, *offer, link, door)
        .decide(guard)
        .await;
}

async fn reserve(
    node: &Arc<Node>,
    hello: &Hello,
    offer: &MachineOffer,
) -> Result<Arc<Vm>, ErrorBody> {
    let origin = VmOrigin::Received {
        from: hello.node.clone(),
    };
    let mark = VmMark::Incoming {
        migration: hello.migration.to_string(),
    };
    run::reserve(node, &hello.disk, offer.machine.clone(), origin, mark).await
}

/// Starts a QEMU that waits for the VM's memory.
///
/// # Errors
/// It does not start, or cannot do what the move needs.
pub(crate) async fn start(
    node: &Arc<Node>,
    vm: &Arc<Vm>,
    offer: &MachineOffer,
) -> Result<Qemu, ErrorBody> {
    let machine = &offer.machine;
    let socket = |disk: &str| node.config.vhost_socket(disk);
    let mut line = machine.command_line(&vm.places, socket, offer.machine_type.as_deref());
    line.extend(["-incoming", "defer", "-S"].map(str::to_owned));
    run::make_folder(&vm.name, vm.places.clone()).await?;
    let (process, qmp) = process::start(&vm.name, &machine.program, &line, &vm.places).await?;
    let qemu = Qemu {
        qmp,
        process: Arc::new(process),
    };
    let ready = async {
        memory::set_capabilities(&qemu.qmp, offer.memory, false).await?;
        memory::listen(&qemu.qmp, &vm.places.incoming()).await
    };
    if let Err(error) = ready.await {
        qemu.process.kill().await;
        let text = format!("VM {} cannot be received: {error}", vm.name);
        return Err(ErrorBody::new(ErrorCode::Internal, text));
    }
    watch::attach(node, vm, qemu.clone()).await;
    Ok(qemu)
}

/// Carries the VM's memory into its QEMU.
pub(crate) fn pour(vm: &Arc<Vm>, connection: PeerConnection) {
    let vm = Arc::clone(vm);
    tokio::spawn(async move {
        let socket = vm.places.incoming();
        if let Err(error) = tunnel::receive(connection, &socket).await {
            tracing::info!(vm = vm.name, %error, "the memory's connection ended");
        }
    });
}

/// Lets the guest run.
///
/// # Errors
/// QEMU does not let it.
pub(crate) async fn let_run(qemu: &Qemu) -> Result<(), super::qmp::QmpError> {
    qemu.qmp.execute("cont", json!({})).await.map(drop)
}
