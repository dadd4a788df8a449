//! The plane of a moving VM's NICs. Packets held for the guest are few, and move while the guest stands still. Packets
//! that arrive here before the network knows the VM's new place follow the guest.

use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_api::{ErrorBody, ErrorCode};
use godwit_core::wire::Features;
use godwit_net::clone::encode_packets;
use godwit_net::device::handle::LatePackets;
use godwit_qemu::cards;
use godwit_qemu::inspect::Facts;
use godwit_qemu::machine::{Machine, NicUplink};
use tokio::sync::{mpsc, watch};

use crate::nics::pieces::{Content, cut};
use crate::nics::served::ServedNic;
use crate::vms::messages::Order;
use crate::vms::outgoing::departure::{Departure, SourceLink};
use crate::vms::outgoing::planes::Plane;
use crate::vms::vm::{Qemu, Vm};

/// Time between two checks of the NICs for packets.
const LOOK: Duration = Duration::from_millis(1);

/// Time for the destination's announcements to reach this node's uplinks. A network that does not deliver them here
/// gives no sign of the last packet, either.
const ANNOUNCED: Duration = Duration::from_millis(250);

/// Longest wait for the destination to announce the VM.
const ANNOUNCES: Duration = Duration::from_secs(2);

/// Time for packets that an announcement has overtaken.
const OVERTAKEN: Duration = Duration::from_millis(100);

/// Further time while packets still come. Multicast packets come here until the switches know that the guest listens
/// elsewhere.
const GROUPS: Duration = Duration::from_secs(1);

/// The plane of NICs.
#[derive(Debug, Default)]
pub(in crate::vms::outgoing) struct Nics;

fn served(vm: &Vm) -> Vec<Arc<ServedNic>> {
    vm.lock().nics.clone()
}

/// Announces the place of the cards that QEMU itself serves, in the background.
pub(crate) fn announce_cards(vm: &str, machine: &Machine, qemu: &Qemu) {
    if cards::own(machine).is_empty() {
        return;
    }
    let (vm, qmp) = (vm.to_owned(), qemu.qmp.clone());
    godwit_context::spawn(async move {
        if let Err(error) = cards::announce(&qmp).await {
            tracing::warn!(vm, %error, "QEMU does not announce the machine's network cards");
        }
    });
}

impl Nics {
    /// Returns the notice on the packets that a move loses for cards that QEMU itself serves.
    pub(in crate::vms::outgoing) fn notice(machine: &Machine) -> Option<String> {
        let cards = cards::own(machine);
        (!cards.is_empty()).then(|| {
            format!(
                "what comes to its network card while the guest stands still is lost ({}): QEMU itself serves it; a \
                 machine that is run with --nic loses nothing",
                cards.join(", ")
            )
        })
    }

    /// Returns the VM for the destination, where its taps and bridges may have other names.
    ///
    /// # Errors
    /// The request renames an uplink that the VM does not have.
    pub(in crate::vms::outgoing) fn elsewhere(
        of: &Departure,
        machine: &Machine,
    ) -> Result<Machine, ErrorBody> {
        let mut machine = machine.clone();
        for (here, there) in &of.request.uplinks {
            let mut found = false;
            for nic in &mut machine.nics {
                let (NicUplink::Tap(name) | NicUplink::Bridge(name)) = &mut nic.uplink;
                if name == here {
                    name.clone_from(there);
                    found = true;
                }
            }
            if !found {
                let why = format!("it has no NIC on {here}, for which --uplink names {there}");
                return Err(of
                    .error(ErrorCode::Invalid, &why)
                    .hint("see 'godwit nic list'"));
            }
        }
        Ok(machine)
    }

    /// Returns the reason if a node with these features cannot receive the VM's NICs.
    pub(in crate::vms::outgoing) fn unknown(
        peer: &str,
        knows: Features,
        machine: &Machine,
    ) -> Option<String> {
        let knows = machine.nics.is_empty() || knows.contain(Features::ANNOUNCING_GUESTS);
        (!knows).then(|| {
            format!(
                "node '{peer}' has an older version of Godwit, which cannot take a machine with NICs from this one: \
                 upgrade it"
            )
        })
    }

    /// Sends packets that still arrive here after the handover, until no more can come. `announced` gives the time of
    /// the destination's announcement.
    pub(in crate::vms::outgoing) fn forward(
        of: &Departure,
        speaker: mpsc::Sender<Order>,
        announced: watch::Receiver<Option<Instant>>,
    ) {
        let nics = served(&of.vm);
        if nics.is_empty() {
            return;
        }
        godwit_context::spawn(async move {
            let began = Instant::now();
            let mut quiet: Option<Instant> = None;
            let mut came = began;
            loop {
                // Packets that arrived until the end of a wait are still sent.
                let waited = announced
                    .borrow()
                    .is_some_and(|at: Instant| at.elapsed() >= ANNOUNCED);
                let gives_up = waited || began.elapsed() >= ANNOUNCES;
                let ends = quiet.is_some_and(|since| {
                    let nothing_comes = since.max(came).elapsed() >= OVERTAKEN;
                    nothing_comes || since.elapsed() >= GROUPS
                });
                let New { any, is_all } = send_new(&nics, &speaker).await;
                if any {
                    came = Instant::now();
                }
                if ends {
                    break;
                }
                if quiet.is_none() && (is_all || gives_up) {
                    let _ = speaker.send(Order::NicsQuiet).await;
                    quiet = Some(Instant::now());
                }
                tokio::time::sleep(LOOK).await;
            }
            let _ = speaker.send(Order::NicsDone).await;
        });
    }
}

/// The packets that have come to the NICs.
struct New {
    /// True if any packet has come.
    any: bool,
    /// True if the announcement has come to all NICs.
    is_all: bool,
}

/// Sends the packets that have come to the NICs since the last call.
async fn send_new(nics: &[Arc<ServedNic>], speaker: &mpsc::Sender<Order>) -> New {
    let (mut any, mut all) = (false, true);
    for (number, nic) in nics.iter().enumerate() {
        let answer = nic.ask(|device, reply| device.copy_late(reply)).await;
        // An ended NIC gets no packets.
        let Some(LatePackets { packets, is_all }) = answer else {
            continue;
        };
        all &= is_all;
        if packets.is_empty() {
            continue;
        }
        any = true;
        for piece in cut(number, Content::Late, &encode_packets(&packets)) {
            let _ = speaker.send(Order::Nic(piece)).await;
        }
    }
    New { any, is_all: all }
}

impl Plane for Nics {
    fn preflight(of: &Departure, machine: &Machine, facts: &Facts) -> Vec<String> {
        let mut blockers = Vec::new();
        let served = served(&of.vm).len();
        if served != machine.nics.len() {
            let here = &of.vms.context.config.name;
            let count = machine.nics.len();
            blockers.push(format!(
                "node '{here}' serves {served} of its {count} NICs: see 'godwit vm show {}'",
                of.vm.name
            ));
        }
        if !machine.nics.is_empty() && machine.disks.is_empty() && !facts.memory_shared {
            blockers.push(String::from(
                "its memory is not shared: QEMU needs -object memory-backend-memfd,...,share=on",
            ));
        }
        blockers
    }

    /// Holds packets back from now on, and sends each NIC's state with the held packets.
    async fn freeze(
        &mut self,
        of: &Departure,
        destination: &mut SourceLink,
    ) -> Result<(), ErrorBody> {
        for (number, nic) in served(&of.vm).iter().enumerate() {
            let state = nic.ask(|device, reply| device.freeze(reply)).await;
            let state = state.ok_or_else(|| {
                let why = format!("NIC {number} is not served any more");
                of.error(ErrorCode::Conflict, &why)
            })?;
            for piece in cut(number, Content::State, &state.encode()) {
                destination.say(Order::Nic(piece)).await;
            }
        }
        Ok(())
    }

    /// Gives all held packets to the guest here, in order.
    async fn take_back(&mut self, of: &Departure) {
        for nic in served(&of.vm) {
            nic.device.release();
        }
    }

    /// The destination's QEMU may have announced its own cards to the network.
    async fn clear(&mut self, of: &Departure) {
        let machine = of.vm.lock().entry.machine.clone();
        announce_cards(&of.vm.name, &machine, &of.qemu);
    }
}
