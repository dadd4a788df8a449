//! A NIC that is served: from before its machine's QEMU starts until that has ended.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use godwit_api::{ErrorBody, ErrorCode};
use godwit_net::device::handle::{NetDevice, NetThread};
use godwit_net::mac::Mac;
use godwit_net::state::nic::Nic;
use godwit_qemu::machine::MachineNic;
use godwit_vhost::VhostUserServer;
use tokio::sync::oneshot;

use crate::disks::vhost::listen;
use crate::nics::uplinks;
use crate::node::{Node, blocking};
use crate::store::machine::VmMark;
use crate::vms::vm::Vm;

/// How long a NIC's thread may take to close its uplink.
const END_TIMEOUT: Duration = Duration::from_secs(2);

/// How long it may take to answer what it does between two of its turns.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// A NIC that is served.
#[derive(Debug)]
pub(crate) struct ServedNic {
    /// What it is.
    pub(crate) nic: MachineNic,
    /// Its tap.
    pub(crate) tap: String,
    /// Its thread, to be asked.
    pub(crate) device: NetDevice,
    parts: Mutex<Option<(VhostUserServer, NetThread)>>,
}

impl Drop for ServedNic {
    fn drop(&mut self) {
        let parts = self
            .parts
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some((server, thread)) = parts {
            drop(server);
            self.device.end();
            // Whoever uses the tap next finds it closed.
            thread.join_within(END_TIMEOUT);
        }
    }
}

impl ServedNic {
    /// Asks the NIC's thread; nothing when it has ended, or does not answer in time: a guest may stand still meanwhile.
    pub(crate) async fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&NetDevice, Box<dyn FnOnce(T) + Send>),
    ) -> Option<T> {
        let (reply, answer) = oneshot::channel();
        let reply = Box::new(move |answered| {
            let _ = reply.send(answered);
        });
        question(&self.device, reply);
        let answered = tokio::time::timeout(ANSWER_TIMEOUT, answer).await;
        answered.ok()?.ok()
    }
}

/// Serves the NICs of a VM, unless they are. Its folder must be there.
///
/// # Errors
/// [`ErrorCode::Conflict`] when an uplink cannot be used, with what to do.
pub(crate) async fn serve(node: &Arc<Node>, vm: &Arc<Vm>) -> Result<(), ErrorBody> {
    let (wanted, arrives) = {
        let inner = vm.lock();
        if !inner.nics.is_empty() {
            return Ok(());
        }
        let arrives = matches!(inner.entry.mark, Some(VmMark::Incoming { .. }));
        (inner.entry.machine.nics.clone(), arrives)
    };
    let mut served = Vec::with_capacity(wanted.len());
    if let Err(error) = serve_all(node, vm, wanted, arrives, &mut served).await {
        // Those that are served already end, for which their threads are waited for.
        let _ = blocking(move || drop(served)).await;
        return Err(error);
    }
    vm.lock().nics = served;
    Ok(())
}

async fn serve_all(
    node: &Arc<Node>,
    vm: &Arc<Vm>,
    wanted: Vec<MachineNic>,
    arrives: bool,
    served: &mut Vec<Arc<ServedNic>>,
) -> Result<(), ErrorBody> {
    for (number, nic) in wanted.into_iter().enumerate() {
        let failed = |why: &dyn std::fmt::Display| {
            let text = format!("VM {}: NIC {number} cannot be served: {why}", vm.name);
            ErrorBody::new(ErrorCode::Conflict, text)
        };
        let opened = uplinks::open(&node.config.name, &vm.name, number, &nic).await;
        let opened = opened.map_err(|why| failed(&why))?;
        let mac: Mac = nic.mac.parse().map_err(|error| failed(&error))?;
        let state = if arrives {
            Nic::arriving(mac)
        } else {
            Nic::new(mac)
        };
        let name = format!("{}/{number}", vm.name);
        let socket = vm.places.nic(number);
        let made = start(node, &name, &socket, state, opened.uplink);
        let (device, server, thread) = made.map_err(|error| failed(&error))?;
        served.push(Arc::new(ServedNic {
            nic,
            tap: opened.tap,
            device,
            parts: Mutex::new(Some((server, thread))),
        }));
    }
    Ok(())
}

fn start(
    node: &Node,
    name: &str,
    socket: &Path,
    state: Nic,
    uplink: godwit_net::device::uplink::Uplink,
) -> std::io::Result<(NetDevice, VhostUserServer, NetThread)> {
    let listener = listen(socket, node.config.qemu_user.as_ref())?;
    let (device, thread) = NetDevice::spawn(name, state, uplink)?;
    match godwit_vhost::serve(listener, device.clone()) {
        Ok(server) => Ok((device, server, thread)),
        Err(error) => {
            device.end();
            Err(error)
        }
    }
}

/// Serves a VM's NICs no more, and returns when their uplinks are closed.
pub(crate) async fn end(vm: &Vm) {
    let nics = std::mem::take(&mut vm.lock().nics);
    if !nics.is_empty() {
        // Whoever still asks one of them is told that it has ended.
        let _ = blocking(move || drop(nics)).await;
    }
}
