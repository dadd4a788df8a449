//! A NIC that is served: from before its machine's QEMU starts until that has ended.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use godwit_api::{ErrorBody, ErrorCode};
use godwit_net::device::handle::{NetDevice, NetThread};
use godwit_net::mac::Mac;
use godwit_net::state::nic::Nic;
use godwit_qemu::machine::MachineNic;
use godwit_vhost::VhostUserServer;
use tokio::sync::oneshot;

use crate::disks::vhost::{self, listen};
use crate::failpoint;
use crate::nics::links::{Links, Way};
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
    /// Where QEMU uses it.
    pub(crate) socket: PathBuf,
    /// Its thread, to be asked.
    pub(crate) device: NetDevice,
    /// Its name in logs.
    label: String,
    /// By which number the kernel knows its tap.
    index: AtomicU32,
    /// What keeps its packets from the network.
    problem: Mutex<Option<String>>,
    parts: Mutex<Option<(VhostUserServer, NetThread)>>,
}

impl Drop for ServedNic {
    fn drop(&mut self) {
        self.close();
    }
}

impl ServedNic {
    /// Serves it no more. Its uplink is closed then, unless its thread takes too long.
    fn close(&self) {
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

    /// What keeps its packets from the network, if anything does.
    pub(crate) fn problem(&self) -> Option<String> {
        self.problem
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn set_problem(&self, now: Option<String>) {
        let mut problem = self.problem.lock().unwrap_or_else(PoisonError::into_inner);
        if *problem == now {
            return;
        }
        match &now {
            Some(why) => tracing::warn!(nic = self.label, why, "the NIC has no network"),
            None => tracing::info!(nic = self.label, "the NIC has its network again"),
        }
        *problem = now;
    }

    /// Looks for its tap and its bridge, of which either may have been made again, and uses those that are there. Gives how it
    /// is then.
    pub(crate) async fn follow(&self, links: &Links) -> Way {
        if self.parts.lock().is_ok_and(|parts| parts.is_none()) {
            // It has ended.
            return Way::Passes;
        }
        let index = self.index.load(Ordering::Relaxed);
        let mut way = links.way(&self.nic, &self.tap, index);
        let mended = match way {
            Way::Gone => self.open_again().await,
            Way::Unplugged => uplinks::plug(&self.nic, &self.tap).await,
            _ => Ok(()),
        };
        if let Err(why) = mended {
            way = Way::Blocked(why);
        }
        self.set_problem(match &way {
            Way::Passes | Way::Begins | Way::Gone | Way::Unplugged => None,
            Way::Comes(why) | Way::Blocked(why) => Some(why.clone()),
        });
        way
    }

    async fn open_again(&self) -> Result<(), String> {
        let opened = uplinks::open(&self.nic, &self.tap).await?;
        self.device.replace_uplink(opened.uplink);
        self.index.store(opened.index, Ordering::Relaxed);
        tracing::info!(nic = self.label, tap = self.tap, "opened the tap again");
        Ok(())
    }

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
    let (wanted, named, arrives) = {
        let inner = vm.lock();
        if !inner.nics.is_empty() {
            return Ok(());
        }
        let entry = &inner.entry;
        let arrives = matches!(entry.mark, Some(VmMark::Incoming { .. }));
        let named = entry.named_nics.clone();
        (entry.machine.nics.clone(), named, arrives)
    };
    let mut served = Vec::with_capacity(wanted.len());
    if let Err(error) = serve_all(node, vm, (wanted, named), arrives, &mut served).await {
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
    (wanted, named): (Vec<MachineNic>, Vec<String>),
    arrives: bool,
    served: &mut Vec<Arc<ServedNic>>,
) -> Result<(), ErrorBody> {
    for (number, nic) in wanted.into_iter().enumerate() {
        let place = NicPlace {
            label: format!("{}/{number}", vm.name),
            owner: &vm.name,
            number,
            // A QEMU that was adopted uses the socket that it was given.
            socket: match named.get(number) {
                Some(name) => node.config.nic_socket(name),
                None => vm.places.nic(number),
            },
        };
        let opened = open(node, nic, place, arrives).await.map_err(|why| {
            let text = format!("VM {}: NIC {number} cannot be served: {why}", vm.name);
            ErrorBody::new(ErrorCode::Conflict, text)
        })?;
        served.push(opened);
    }
    Ok(())
}

/// Where a NIC is served, and for whom.
pub(super) struct NicPlace<'a> {
    /// Its name in logs.
    pub(super) label: String,
    /// Whose it is, and which of the NICs of that: the name of a tap that is made follows from both.
    pub(super) owner: &'a str,
    /// See `owner`.
    pub(super) number: usize,
    /// Where QEMU uses it.
    pub(super) socket: PathBuf,
}

/// Opens a NIC's uplink and serves it.
///
/// # Errors
/// Why that is not possible, in a sentence.
pub(super) async fn open(
    node: &Node,
    nic: MachineNic,
    place: NicPlace<'_>,
    arrives: bool,
) -> Result<Arc<ServedNic>, String> {
    let NicPlace {
        label,
        owner,
        number,
        socket,
    } = place;
    let tap = uplinks::tap_of(&node.config.name, owner, number, &nic);
    let opened = uplinks::open(&nic, &tap).await?;
    let mac: Mac = nic.mac.parse().map_err(|error| format!("{error}"))?;
    let state = if arrives {
        Nic::arriving(mac)
    } else {
        Nic::new(mac)
    };
    let made = start(node, &label, &socket, state, opened.uplink);
    let (device, server, thread) =
        made.map_err(|error| format!("its socket {}: {error}", socket.display()))?;
    Ok(Arc::new(ServedNic {
        nic,
        tap,
        socket,
        device,
        label,
        index: AtomicU32::new(opened.index),
        problem: Mutex::default(),
        parts: Mutex::new(Some((server, thread))),
    }))
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
    // Whoever comes while another ends them returns when they have ended, too.
    let _turn = vm.nics_end.lock().await;
    let nics = {
        let mut inner = vm.lock();
        let nics = std::mem::take(&mut inner.nics);
        // Not once they are taken out: then somebody else may listen there.
        for nic in &nics {
            let _ = vhost::remove(&nic.socket);
        }
        nics
    };
    if !nics.is_empty() {
        failpoint::reach(String::from("nics::ending")).await;
        // Whoever still asks one of them is told that it has ended.
        let _ = blocking(move || nics.iter().for_each(|nic| nic.close())).await;
    }
}
