//! NICs with names of their own, for virtual machines started outside the node, with QEMU alone or with libvirt. Such a
//! NIC is served from its creation to its removal, also after a restart of the node. After the adoption of its machine,
//! the NIC belongs to the machine and moves along.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use godwit_api::{CreateNic, ErrorBody, ErrorCode};
use godwit_qemu::mac;
use godwit_qemu::machine::MachineNic;

use crate::nics::request::{self, Odd};
use crate::nics::served::{self, NicPlace, ServedNic};
use godwit_context::store::StoreError;
use godwit_context::{Context, blocking};
use godwit_disks::disks::vhost;
use godwit_peers::names;

/// Most NICs with names on one node.
const MOST: usize = 1024;

/// Time between two attempts to serve a NIC whose uplink was missing when the node started.
const RETRY: Duration = Duration::from_secs(2);

/// A NIC with a name.
#[derive(Debug)]
pub struct NamedNic {
    /// The NIC's name, unique on the node.
    pub name: String,
    /// The configuration.
    pub nic: MachineNic,
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
    pub fn served(&self) -> Result<Arc<ServedNic>, String> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Result<Arc<ServedNic>, String>> {
        self.served.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The machines, as NICs know them.
pub trait NicUsers: fmt::Debug + Send + Sync {
    /// Returns the NICs of each machine known to this node.
    fn nics(&self) -> Vec<MachineNics>;

    /// Returns the machine whose QEMU uses the socket of the NIC with this name.
    fn machine_with(&self, nic: &str) -> Option<String>;
}

/// The NICs of a machine.
#[derive(Debug)]
pub struct MachineNics {
    /// The machine's name.
    pub vm: String,
    /// True while this node has the machine's disks.
    pub is_here: bool,
    /// The machine's NICs, in the order of its devices.
    pub nics: Vec<MachineNic>,
    /// The served ones, empty while the machine does not run here.
    pub served: Vec<Arc<ServedNic>>,
}

/// The NICs with names of a node.
#[derive(Debug)]
pub struct NamedNics {
    /// Configuration, store and connections of the node.
    pub context: Arc<Context>,
    users: OnceLock<Box<dyn NicUsers>>,
    by_name: Mutex<BTreeMap<String, Arc<NamedNic>>>,
    /// Held while a NIC is created, removed or adopted.
    changing: tokio::sync::Mutex<()>,
}

impl NamedNics {
    /// Creates the empty table. [`Self::set_users`] completes it.
    pub fn new(context: Arc<Context>) -> Self {
        Self {
            context,
            users: OnceLock::new(),
            by_name: Mutex::default(),
            changing: tokio::sync::Mutex::default(),
        }
    }

    /// Sets the users of NICs, once, before the first NIC is served.
    pub fn set_users(&self, users: Box<dyn NicUsers>) {
        let earlier = self.users.set(users);
        debug_assert!(earlier.is_ok(), "the users of NICs are set once");
    }

    /// Returns the machines' NICs.
    pub(super) fn of_machines(&self) -> Vec<MachineNics> {
        let users = self.users.get();
        users.map(|users| users.nics()).unwrap_or_default()
    }

    /// Returns all NICs in the order of their names.
    pub fn all(&self) -> Vec<Arc<NamedNic>> {
        self.lock().values().cloned().collect()
    }

    /// Returns the NIC of this name.
    ///
    /// # Errors
    /// [`ErrorCode::NotFound`].
    pub fn get(&self, name: &str) -> Result<Arc<NamedNic>, ErrorBody> {
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
    pub fn remove(&self, nic: &Arc<NamedNic>) {
        let mut nics = self.lock();
        if nics
            .get(&nic.name)
            .is_some_and(|kept| Arc::ptr_eq(kept, nic))
        {
            nics.remove(&nic.name);
        }
    }

    /// Locks out the creation, removal and adoption of NICs until the returned guard is dropped.
    pub async fn change(&self) -> tokio::sync::MutexGuard<'_, ()> {
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
pub async fn create(nics: &Arc<NamedNics>, request: CreateNic) -> Result<Arc<NamedNic>, ErrorBody> {
    let CreateNic { name, nic } = request;
    names::check("NIC", &name)?;
    let refused = |code, why: &str| ErrorBody::new(code, format!("NIC {name}: {why}"));
    let host = mac::host();
    // No VM has such a name.
    let vm = owner(&name);
    let owner = mac::Owner {
        host: &host,
        node: &nics.context.config.name,
        vm: &vm,
    };
    let _changing = nics.change().await;
    free(nics, &name)?;
    // An earlier NIC of this name keeps its address wherever its machine has moved.
    let mut number = 0;
    while request::is_known(nics, &owner.served(number)) {
        number += 1;
    }
    let address = || owner.served(number);
    let nic = request::one(&nic, address)
        .map_err(|Odd { why, hint }| refused(ErrorCode::Invalid, &why).hint(hint))?;
    if let Some(taken) = request::address_taken(nics, "", std::slice::from_ref(&nic)) {
        return Err(refused(ErrorCode::Conflict, &taken)
            .hint("give it another with mac=, or leave it out and the node chooses one"));
    }
    let served = serve(nics, &name, &nic)
        .await
        .map_err(|why| refused(ErrorCode::Conflict, &format!("it cannot be served: {why}")))?;
    let named = NamedNic::new(name, nic, Ok(served));
    if let Err(error) = nics.context.store.put_nic(&named.name, &named.nic).await {
        let failed = stored_badly(&named.name, &error);
        end(nics, named).await;
        return Err(failed);
    }
    tracing::info!(nic = named.name, "created the NIC");
    nics.insert(Arc::clone(&named));
    Ok(named)
}

/// Removes a NIC.
///
/// # Errors
/// The NIC does not exist, or a machine uses it; `force` overrides the latter.
pub async fn remove(nics: &Arc<NamedNics>, name: &str, force: bool) -> Result<(), ErrorBody> {
    let _changing = nics.change().await;
    let nic = nics.get(name)?;
    let is_used = nic.served().is_ok_and(|nic| nic.device.snapshot().attached);
    if is_used && !force {
        let text = format!("NIC {name} is used by a virtual machine");
        return Err(ErrorBody::new(ErrorCode::Conflict, text)
            .hint("end the machine first; --force takes its network away"));
    }
    let removed = nics.context.store.remove_nic(name).await;
    removed.map_err(|error| stored_badly(name, &error))?;
    nics.remove(&nic);
    end(nics, nic).await;
    tracing::info!(nic = name, force, "removed the NIC");
    Ok(())
}

/// Serves the stored NICs. A failure is retried: the tap may be made later than the node starts.
pub async fn recover(nics: &Arc<NamedNics>, stored: Vec<(String, MachineNic)>) {
    for (name, nic) in stored {
        let served = serve(nics, &name, &nic).await;
        if let Err(why) = &served {
            tracing::warn!(
                nic = name,
                why,
                "the NIC cannot be served yet; trying again"
            );
        }
        let is_served = served.is_ok();
        let nic = NamedNic::new(name, nic, served);
        nics.insert(Arc::clone(&nic));
        if !is_served {
            godwit_context::spawn(serve_patiently(Arc::clone(nics), nic));
        }
    }
}

async fn serve_patiently(nics: Arc<NamedNics>, nic: Arc<NamedNic>) {
    loop {
        tokio::select! {
            () = nics.context.closed() => return,
            () = tokio::time::sleep(RETRY) => {}
        }
        let _changing = nics.change().await;
        if !nics.has(&nic) {
            return;
        }
        let served = serve(&nics, &nic.name, &nic.nic).await;
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

async fn serve(nics: &NamedNics, name: &str, nic: &MachineNic) -> Result<Arc<ServedNic>, String> {
    let place = NicPlace {
        label: name.to_owned(),
        owner: &owner(name),
        number: 0,
        socket: nics.context.config.nic_socket(name),
        holds_packets: false,
    };
    served::open(nics, nic.clone(), place, false).await
}

/// Refuses the name of an existing NIC, or of an adopted NIC whose QEMU still uses the socket.
fn free(nics: &NamedNics, name: &str) -> Result<(), ErrorBody> {
    let here = &nics.context.config.name;
    // Not under the table's lock: the machines have locks of their own.
    let user = nics.users.get().and_then(|users| users.machine_with(name));
    let nics = nics.lock();
    if nics.contains_key(name) {
        let text = format!("node '{here}' has a NIC {name} already");
        return Err(ErrorBody::new(ErrorCode::Exists, text).hint("choose another name"));
    }
    if nics.len() >= MOST {
        let text = format!("this node has {MOST} NICs with names, the most it can");
        return Err(ErrorBody::new(ErrorCode::Busy, text));
    }
    match user {
        None => Ok(()),
        Some(vm) => {
            let text = format!("NIC {name} is VM {vm}'s, whose QEMU uses its socket");
            Err(ErrorBody::new(ErrorCode::Exists, text).hint("choose another name"))
        }
    }
}

/// Stops serving a NIC, and returns when its uplink is closed.
async fn end(nics: &NamedNics, nic: Arc<NamedNic>) {
    let _ = vhost::remove(&nics.context.config.nic_socket(&nic.name));
    let served = std::mem::replace(&mut *nic.lock(), Err(String::from("it is removed")));
    let _ = blocking(move || drop(served)).await;
}

fn stored_badly(nic: &str, error: &StoreError) -> ErrorBody {
    let text = format!("NIC {nic} cannot be stored: {error}");
    ErrorBody::new(ErrorCode::Internal, text)
        .hint("see the node's log, and whether its data directory has space")
}
