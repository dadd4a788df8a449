//! Receives of each queue pair, or of the shared queue.

use std::io;

use super::content::ledger::{InOrder, Once};
use super::device::{Device, RECEIVES, Slot};

/// The receives still to complete.
pub(crate) enum Receives {
    /// In order, for each queue pair.
    Own(Vec<InOrder>),
    /// Each once, by their slots.
    Shared(Once),
}

impl Receives {
    /// Posts as many receives as there is room for.
    pub(crate) fn fill(device: &Device) -> io::Result<Self> {
        let count = device.pairs.len();
        let mut receives = if device.shared.is_null() {
            Self::Own((0..count).map(|_| InOrder::default()).collect())
        } else {
            Self::Shared(Once::default())
        };
        for slot in 0..count as u64 * RECEIVES {
            receives.post(device, (slot / RECEIVES) as usize, slot)?;
        }
        Ok(receives)
    }

    /// Posts the receive of the shared queue whose place in memory is `slot`, or the queue pair's next one.
    pub(crate) fn post(&mut self, device: &Device, pair: usize, slot: u64) -> io::Result<()> {
        match self {
            Self::Shared(shared) => {
                shared.post(slot);
                device.post_receive(pair, slot, Slot::Receive(0, slot))
            }
            Self::Own(pairs) => {
                let number = pairs[pair].post();
                device.post_receive(pair, number, Slot::Receive(pair, number % RECEIVES))
            }
        }
    }

    /// Records the completion of receive `number` of the queue pair. Returns the slot of the receive.
    pub(crate) fn complete(&mut self, pair: usize, number: u64) -> Result<Slot, String> {
        match self {
            Self::Shared(shared) => {
                shared.complete(number)?;
                Ok(Slot::Receive(0, number))
            }
            Self::Own(pairs) => {
                pairs[pair]
                    .complete(number)
                    .map_err(|error| format!("queue pair {pair}, receives: {error}"))?;
                Ok(Slot::Receive(pair, number % RECEIVES))
            }
        }
    }
}
