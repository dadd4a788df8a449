//! The NICs of a machine that moves. What they hold for the guest is small, and moves while the guest stands still;
//! what comes to them here until the network knows the machine's new place follows the guest.

use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_api::{ErrorBody, ErrorCode};
use godwit_net::clone::encode_packets;
use godwit_net::device::handle::LatePackets;
use godwit_qemu::inspect::Facts;
use godwit_qemu::machine::Machine;
use tokio::sync::mpsc;

use crate::nics::pieces::{Content, cut};
use crate::nics::served::ServedNic;
use crate::vms::messages::Order;
use crate::vms::outgoing::departure::{Departure, SourceLink};
use crate::vms::outgoing::planes::Plane;
use crate::vms::vm::Vm;

/// How often the NICs are asked whether something came.
const LOOK: Duration = Duration::from_millis(1);

/// How long the destination's announcements may take to reach this node's uplinks. A network that does not bring
/// them here does not tell when nothing more comes, either.
const ANNOUNCED: Duration = Duration::from_millis(250);

/// The plane of NICs.
#[derive(Debug, Default)]
pub(in crate::vms::outgoing) struct Nics;

fn served(vm: &Vm) -> Vec<Arc<ServedNic>> {
    vm.lock().nics.clone()
}

impl Nics {
    /// The machine is the destination's: sends what still comes here, until nothing more can.
    pub(in crate::vms::outgoing) fn forward(of: &Departure, speaker: mpsc::Sender<Order>) {
        let nics = served(&of.vm);
        if nics.is_empty() {
            return;
        }
        tokio::spawn(async move {
            let mut open: Vec<usize> = (0..nics.len()).collect();
            let began = Instant::now();
            while !open.is_empty() {
                // What came until the end of the wait is still asked for.
                let is_last = began.elapsed() >= ANNOUNCED;
                let mut quiet = Vec::new();
                for &number in &open {
                    let answer = nics[number]
                        .ask(|device, reply| device.copy_late(reply))
                        .await;
                    let Some(LatePackets { packets, is_all }) = answer else {
                        quiet.push(number);
                        continue;
                    };
                    if !packets.is_empty() {
                        for piece in cut(number, Content::Late, &encode_packets(&packets)) {
                            let _ = speaker.send(Order::Nic(piece)).await;
                        }
                    }
                    if is_all || is_last {
                        quiet.push(number);
                    }
                }
                open.retain(|number| !quiet.contains(number));
                if !open.is_empty() {
                    tokio::time::sleep(LOOK).await;
                }
            }
            let _ = speaker.send(Order::NicsQuiet).await;
        });
    }
}

impl Plane for Nics {
    fn preflight(of: &Departure, machine: &Machine, facts: &Facts) -> Vec<String> {
        let mut blockers = Vec::new();
        let served = served(&of.vm).len();
        if served != machine.nics.len() {
            let here = &of.node.config.name;
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

    async fn start(&mut self, _: &Departure) -> Result<(), ErrorBody> {
        Ok(())
    }

    async fn converged(&mut self, _: &Departure) -> Result<(), ErrorBody> {
        Ok(())
    }

    async fn broken(&self, _: &Departure) -> ErrorBody {
        std::future::pending().await
    }

    /// Holds packets back from now on, and sends each NIC's state with those that it holds.
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

    /// They are where the disks are.
    async fn hand_over(&mut self, _: &Departure) -> Result<(), ErrorBody> {
        Ok(())
    }

    /// Everything that was held goes to the guest here, in order.
    async fn take_back(&mut self, of: &Departure) {
        for nic in served(&of.vm) {
            nic.device.release();
        }
    }

    async fn clear(&mut self, _: &Departure) {}
}
