//! A served NIC: from before the start of its machine's QEMU until QEMU has ended.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use godwit_net::device::handle::{NetDevice, NetThread};
use godwit_net::mac::Mac;
use godwit_net::state::nic::Nic;
use godwit_qemu::machine::MachineNic;
use godwit_vhost::VhostUserServer;
use tokio::sync::oneshot;

use crate::nics::links::{Links, Way};
use crate::nics::named::NamedNics;
use crate::nics::uplinks;
use godwit_disks::disks::vhost::listen;

/// Time limit for a NIC's thread to close its uplink.
const END_TIMEOUT: Duration = Duration::from_secs(2);

/// Time limit for an answer, which a NIC's thread gives between two turns.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// A served NIC.
#[derive(Debug)]
pub struct ServedNic {
    /// The configuration.
    pub nic: MachineNic,
    /// Name of the tap.
    pub tap: String,
    /// The socket for QEMU.
    pub socket: PathBuf,
    /// Handle of the NIC's thread.
    pub device: NetDevice,
    /// Name in logs.
    label: String,
    /// The kernel's index of the tap.
    index: AtomicU32,
    /// The reason why packets do not reach the network.
    problem: Mutex<Option<String>>,
    parts: Mutex<Option<(VhostUserServer, NetThread)>>,
}

impl Drop for ServedNic {
    fn drop(&mut self) {
        self.close();
    }
}

impl ServedNic {
    /// Stops serving. The uplink is closed afterwards, unless the thread takes too long.
    pub fn close(&self) {
        let parts = self
            .parts
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some((server, thread)) = parts {
            drop(server);
            self.device.end();
            // The next user must find the tap closed.
            thread.join_within(END_TIMEOUT);
        }
    }

    /// Returns the reason why packets do not reach the network, if any.
    pub fn problem(&self) -> Option<String> {
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

    /// Looks for the tap and the bridge. If either was made again, uses the new one. Returns the way of the packets
    /// afterwards.
    pub async fn follow(&self, links: &Links) -> Way {
        if self.parts.lock().is_ok_and(|parts| parts.is_none()) {
            // The NIC has ended.
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

    /// Asks the NIC's thread. Returns nothing if the thread has ended, or does not answer in time: a guest may stand
    /// still meanwhile.
    pub async fn ask<T: Send + 'static>(
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

/// The place and the owner of a served NIC.
pub(crate) struct NicPlace<'a> {
    /// Name in logs.
    pub(crate) label: String,
    /// The owner. A tap's name is made from the owner and `number`.
    pub owner: &'a str,
    /// The number among the owner's NICs.
    pub number: usize,
    /// The socket for QEMU.
    pub socket: PathBuf,
    /// True if the guest's packets are held back from the start: a backup may have the guest.
    pub(crate) holds_packets: bool,
}

/// Opens a NIC's uplink and serves the NIC.
///
/// # Errors
/// The reason for the failure, in a sentence.
pub(crate) async fn open(
    nics: &NamedNics,
    nic: MachineNic,
    place: NicPlace<'_>,
    arrives: bool,
) -> Result<Arc<ServedNic>, String> {
    let NicPlace {
        label,
        owner,
        number,
        socket,
        holds_packets,
    } = place;
    let tap = uplinks::tap_of(&nics.context.config.name, owner, number, &nic);
    let opened = uplinks::open(&nic, &tap).await?;
    let mac: Mac = nic.mac.parse().map_err(|error| format!("{error}"))?;
    let state = if arrives {
        Nic::arriving(mac)
    } else {
        Nic::new(mac)
    };
    let made = start(nics, (&label, holds_packets), &socket, state, opened.uplink);
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
    nics: &NamedNics,
    (name, holds_packets): (&str, bool),
    socket: &Path,
    state: Nic,
    uplink: godwit_net::device::uplink::Uplink,
) -> std::io::Result<(NetDevice, VhostUserServer, NetThread)> {
    let listener = listen(socket, nics.context.config.qemu_user.as_ref())?;
    let (device, thread) = NetDevice::spawn(name, state, uplink)?;
    if holds_packets {
        // Before a front end can attach: the thread takes commands in order.
        device.hold_back(Box::new(|()| {}));
    }
    match godwit_vhost::serve(listener, device.clone()) {
        Ok(server) => Ok((device, server, thread)),
        Err(error) => {
            device.end();
            Err(error)
        }
    }
}
