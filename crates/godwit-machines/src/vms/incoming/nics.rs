//! Destination: the NICs of an incoming VM.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_net::clone::{State, decode_packets};

use crate::nics::pieces::{Content, NicPiece, Pieces};
use crate::nics::served::ServedNic;
use crate::vms::incoming::arrival::DestinationLink;
use crate::vms::messages::{Answer, Order};
use crate::vms::vm::Vm;

/// Longest wait for the source's late packets.
const LATE: Duration = Duration::from_secs(3);

/// The pieces received for each NIC.
#[derive(Debug, Default)]
pub(super) struct ArrivingNics(HashMap<usize, Pieces>);

impl ArrivingNics {
    /// Takes a piece of a NIC's state or of late packets.
    ///
    /// # Errors
    /// The piece is invalid.
    pub(super) async fn take(&mut self, vm: &Vm, piece: &NicPiece) -> Result<(), String> {
        let nic: Arc<ServedNic> = vm
            .lock()
            .nics
            .get(piece.nic)
            .cloned()
            .ok_or_else(|| format!("there is no NIC {} here", piece.nic))?;
        let Some(bytes) = self.0.entry(piece.nic).or_default().take(piece)? else {
            return Ok(());
        };
        match piece.content {
            Content::State => {
                let state = State::decode(&bytes).map_err(|error| error.to_string())?;
                let written = nic.ask(|device, reply| device.restore(state, reply)).await;
                let written = written.ok_or("a NIC is not served any more")?;
                written.map_err(|error| error.to_string())
            }
            Content::Late => {
                let packets = decode_packets(&bytes).map_err(|error| error.to_string())?;
                nic.device.late(packets);
                Ok(())
            }
        }
    }

    /// Announces the NICs to the network once the VM belongs to this node, before the guest runs.
    pub(super) async fn take_over(vm: &Vm, link: Option<&DestinationLink>) {
        let nics = vm.lock().nics.clone();
        let awaits_late = link.is_some();
        for nic in &nics {
            let take_over = nic.ask(|device, reply| device.take_over(awaits_late, reply));
            if take_over.await.is_none() {
                tracing::error!(vm = vm.name, "a NIC is not served any more");
            }
        }
        if let Some(link) = link.filter(|_| !nics.is_empty()) {
            link.say(Answer::Announced).await;
        }
    }

    /// Gives the running guest the source's late packets, before the packets held at this node.
    pub(super) async fn take_late(mut self, vm: &Vm, link: &mut DestinationLink) {
        let nics = vm.lock().nics.clone();
        if nics.is_empty() {
            return;
        }
        let until = Instant::now() + LATE;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match link.hear_within(left).await {
                Some(Order::Nic(piece)) => {
                    if let Err(why) = self.take(vm, &piece).await {
                        tracing::warn!(vm = vm.name, why, "late packets are lost");
                    }
                }
                Some(Order::NicsQuiet) => {
                    nics.iter().for_each(|nic| nic.device.late_ended());
                }
                Some(Order::NicsDone) | None => break,
                Some(_) => {}
            }
        }
        for nic in nics {
            nic.device.late_ended();
        }
    }
}
