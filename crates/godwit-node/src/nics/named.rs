//! NICs with names of their own, for virtual machines started outside the node, with QEMU alone or with libvirt. Such a
//! NIC is served from its creation to its removal, also after a restart of the node. After the adoption of its machine,
//! the NIC belongs to the machine and moves along.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use godwit_api::{CreateNic, ErrorBody, ErrorCode};
use godwit_qemu::mac;
use godwit_qemu::machine::MachineNic;

use crate::disks::vhost;
use crate::names;
use crate::nics::request::{self, Odd};
use crate::nics::served::{self, NicPlace, ServedNic};
use crate::node::{Node, blocking};
use crate::store::StoreError;

/// Most NICs with names on one node.
const MOST: usize = 1024;

/// Time between two attempts to serve a NIC whose uplink was missing when the node started.
const RETRY: Duration = Duration::from_secs(2);

/// A NIC with a name.
#[derive(Debug)]
pub(crate) struct NamedNic {
    pub(crate) name: String,
    /// The configuration.
    pub(crate) nic: MachineNic,
    /// The served NIC, or the reason why the NIC is not served.
    served: Mutex<Result<Arc<ServedNic>, String>>,
}

impl NamedNic {
    fn new(name: String, nic: MachineNic, served: Result<Arc<ServedNic>, String>) -> Arc<Self> {
        Arc::new(Self {
            name,
            nic,
            served: Mutex::new(served),
        })
    }

    /// Returns the served NIC.
    ///
    /// # Errors
    /// The reason why the NIC is not served.
    pub(crate) fn served(&self) -> Result<Arc<ServedNic>, String> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Result<Arc<ServedNic>, String>> {
        self.served.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The NICs with names of a node.
#[derive(Debug, Default)]
pub(crate) struct NamedNics {
    by_name: Mutex<BTreeMap<String, Arc<NamedNic>>>,
    /// Held while a NIC is created, removed or adopted.
    changing: tokio::sync::Mutex<()>,
}

impl NamedNics {
    /// Returns all NICs in the order of their names.
    pub(crate) fn all(&self) -> Vec<Arc<NamedNic>> {
        self.lock().values().cloned().collect()
    }

    /// Returns the NIC of this name.
    ///
    /// # Errors
    /// [`ErrorCode::NotFound`].
    pub(crate) fn get(&self, name: &str) -> Result<Arc<NamedNic>, ErrorBody> {
        self.lock().get(name).cloned().ok_or_else(|| {
            let shown: String = name.chars().take(128).collect();
            let text = format!("this node serves no NIC {shown:?}");
            ErrorBody::new(ErrorCode::NotFound, text).hint("see 'godwit nic list'")
        })
    }

    /// Returns the NIC with this MAC address.
    pub(crate) fn with_address(&self, mac: &str) -> Option<Arc<NamedNic>> {
        let nics = self.lock();
        nics.values().find(|nic| nic.nic.mac == mac).cloned()
    }

    /// Removes a NIC unless another has its name now.
    pub(crate) fn remove(&self, nic: &Arc<NamedNic>) {
        let mut nics = self.lock();
        if nics
            .get(&nic.name)
            .is_some_and(|kept| Arc::ptr_eq(kept, nic))
        {
            nics.remove(&nic.name);
        }
    }

    /// Locks out the creation, removal and adoption of NICs until the returned guard is dropped.
    pub(crate) async fn change(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.changing.lock().await
    }

    fn has(&self, nic: &Arc<NamedNic>) -> bool {
        let nics = self.lock();
        nics.get(&nic.name)
            .is_some_and(|kept| Arc::ptr_eq(kept, nic))
    }

    fn insert(&self, nic: Arc<NamedNic>) {
        self.lock().insert(nic.name.clone(), nic);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<NamedNic>>> {
        self.by_name.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Creates and serves a NIC.
///
/// # Errors
/// The request is invalid, the name or address is taken, or the uplink or socket cannot be used. Nothing is left then.
pub(crate) async fn create(
    node: &Arc<Node>,
    request: CreateNic,
) -> Result<Arc<NamedNic>, ErrorBody> {
    let CreateNic { name, nic } = request;
    names::check("NIC", &name)?;
    let refused = |code, why: &str| ErrorBody::new(code, format!("NIC {name}: {why}"));
    let host = mac::host();
    // No VM has such a name.
    let vm = owner(&name);
    let owner = mac::Owner {
        host: &host,
        node: &node.config.name,
        vm: &vm,
    };
    let _changing = node.nics.change().await;
    free(node, &name)?;
    // An earlier NIC of this name keeps its address wherever its machine has moved.
    let mut number = 0;
    while request::is_known(node, &owner.served(number)) {
        number += 1;
    }
    let address = || owner.served(number);
    let nic = request::one(&nic, address)
        .map_err(|Odd { why, hint }| refused(ErrorCode::Invalid, &why).hint(hint))?;
    if let Some(taken) = request::address_taken(node, "", std::slice::from_ref(&nic)) {
        return Err(refused(ErrorCode::Conflict, &taken)
            .hint("give it another with mac=, or leave it out and the node chooses one"));
    }
    let served = serve(node, &name, &nic)
        .await
        .map_err(|why| refused(ErrorCode::Conflict, &format!("it cannot be served: {why}")))?;
    let named = NamedNic::new(name, nic, Ok(served));
    if let Err(error) = node.store.put_nic(&named.name, &named.nic).await {
        let failed = stored_badly(&named.name, &error);
        end(node, named).await;
        return Err(failed);
    }
    tracing::info!(nic = named.name, "created the NIC");
    node.nics.insert(Arc::clone(&named));
    Ok(named)
}

/// Removes a NIC.
///
/// # Errors
/// The NIC does not exist, or a machine uses it; `force` overrides the latter.
pub(crate) async fn remove(node: &Arc<Node>, name: &str, force: bool) -> Result<(), ErrorBody> {
    let _changing = node.nics.change().await;
    let nic = node.nics.get(name)?;
    let is_used = nic.served().is_ok_and(|nic| nic.device.snapshot().attached);
    if is_used && !force {
        let text = format!("NIC {name} is used by a virtual machine");
        return Err(ErrorBody::new(ErrorCode::Conflict, text)
            .hint("end the machine first; --force takes its network away"));
    }
    let removed = node.store.remove_nic(name).await;
    removed.map_err(|error| stored_badly(name, &error))?;
    node.nics.remove(&nic);
    end(node, nic).await;
    tracing::info!(nic = name, force, "removed the NIC");
    Ok(())
}

/// Serves the stored NICs. A failure is retried: the tap may be made later than the node starts.
pub(crate) async fn recover(node: &Arc<Node>, stored: Vec<(String, MachineNic)>) {
    for (name, nic) in stored {
        let served = serve(node, &name, &nic).await;
        if let Err(why) = &served {
            tracing::warn!(
                nic = name,
                why,
                "the NIC cannot be served yet; trying again"
            );
        }
        let is_served = served.is_ok();
        let nic = NamedNic::new(name, nic, served);
        node.nics.insert(Arc::clone(&nic));
        if !is_served {
            tokio::spawn(serve_patiently(Arc::clone(node), nic));
        }
    }
}

async fn serve_patiently(node: Arc<Node>, nic: Arc<NamedNic>) {
    loop {
        tokio::select! {
            () = node.closed() => return,
            () = tokio::time::sleep(RETRY) => {}
        }
        let _changing = node.nics.change().await;
        if !node.nics.has(&nic) {
            return;
        }
        let served = serve(&node, &nic.name, &nic.nic).await;
        let is_served = served.is_ok();
        *nic.lock() = served;
        if is_served {
            tracing::info!(nic = nic.name, "the NIC is served");
            return;
        }
    }
}

/// Returns the owner of a NIC of this name, in place of a VM's name. No VM has such a name.
fn owner(name: &str) -> String {
    format!("nic/{name}")
}

async fn serve(node: &Node, name: &str, nic: &MachineNic) -> Result<Arc<ServedNic>, String> {
    let place = NicPlace {
        label: name.to_owned(),
        owner: &owner(name),
        number: 0,
        socket: node.config.nic_socket(name),
    };
    served::open(node, nic.clone(), place, false).await
}

/// Refuses the name of an existing NIC, or of an adopted NIC whose QEMU still uses the socket.
fn free(node: &Node, name: &str) -> Result<(), ErrorBody> {
    let here = &node.config.name;
    let nics = node.nics.lock();
    if nics.contains_key(name) {
        let text = format!("node '{here}' has a NIC {name} already");
        return Err(ErrorBody::new(ErrorCode::Exists, text).hint("choose another name"));
    }
    if nics.len() >= MOST {
        let text = format!("this node has {MOST} NICs with names, the most it can");
        return Err(ErrorBody::new(ErrorCode::Busy, text));
    }
    match node.vms.user_of_nic(name) {
        None => Ok(()),
        Some(vm) => {
            let text = format!("NIC {name} is VM {vm}'s, whose QEMU uses its socket");
            Err(ErrorBody::new(ErrorCode::Exists, text).hint("choose another name"))
        }
    }
}

/// Stops serving a NIC, and returns when its uplink is closed.
async fn end(node: &Node, nic: Arc<NamedNic>) {
    let _ = vhost::remove(&node.config.nic_socket(&nic.name));
    let served = std::mem::replace(&mut *nic.lock(), Err(String::from("it is removed")));
    let _ = blocking(move || drop(served)).await;
}

fn stored_badly(nic: &str, error: &StoreError) -> ErrorBody {
    let text = format!("NIC {nic} cannot be stored: {error}");
    ErrorBody::new(ErrorCode::Internal, text)
        .hint("see the node's log, and whether its data directory has space")
}
