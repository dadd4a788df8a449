//! Holds back the packets of network cards that QEMU itself serves, until the checkpoint of their epoch is acknowledged.
//!
//! Each card's back end has three of QEMU's packet buffers in a row: one for the epoch under way, one for the last epoch,
//! and one for the epochs before. The end of an epoch moves packets from the first buffer to the second.

use serde_json::json;

use crate::cards;
use crate::machine::Machine;
use crate::monitor::qmp::{Qmp, QmpError};

/// The buffers on the way from the guest to the network.
const EPOCH: &str = "godwit-epoch";
const LAST: &str = "godwit-last";
const BEFORE: &str = "godwit-before";
/// A buffer that is made to see if QEMU can hold the packets of a card back.
const PROBE: &str = "godwit-probe";
/// Time after which a buffer releases its packets without a command, if none was given meanwhile: 71 minutes, the longest
/// time that QEMU takes.
const INTERVAL_US: u32 = u32::MAX;

/// The cards of a machine whose packets QEMU holds back.
#[derive(Debug)]
pub struct HeldCards {
    qmp: Qmp,
    /// Ids of the cards' network back ends.
    backends: Vec<String>,
    waiting: Waiting,
}

/// The youngest epochs in the buffers behind the first one.
#[derive(Debug, Default)]
struct Waiting {
    last: Option<u64>,
    before: Option<u64>,
}

impl Waiting {
    /// Ends an epoch. Returns the buffers to empty into the next ones, in this order.
    fn end_epoch(&mut self, number: u64) -> &'static [&'static str] {
        let has_last = self.last.is_some();
        if has_last {
            self.before = self.before.max(self.last);
        }
        self.last = Some(number);
        match has_last {
            true => &[LAST, EPOCH],
            false => &[EPOCH],
        }
    }

    /// Releases the packets of all epochs up to this one. Returns the buffers to empty into the next ones, in this order.
    fn release(&mut self, through: u64) -> &'static [&'static str] {
        let is_held = |epoch: Option<u64>| epoch.is_some_and(|epoch| epoch > through);
        if is_held(self.before) {
            return &[];
        }
        let before = self.before.take();
        if is_held(self.last) {
            return before.map_or(&[], |_| &[BEFORE]);
        }
        match (before, self.last.take()) {
            (Some(_), _) => &[BEFORE, LAST, BEFORE],
            (None, Some(_)) => &[LAST, BEFORE],
            (None, None) => &[],
        }
    }
}

impl HeldCards {
    /// Finds the cards of a machine that QEMU itself serves.
    ///
    /// # Errors
    /// The cards whose back ends have no names.
    pub fn of(machine: &Machine, qmp: &Qmp) -> Result<Self, Vec<String>> {
        Ok(Self {
            qmp: qmp.clone(),
            backends: cards::backends(machine)?,
            waiting: Waiting::default(),
        })
    }

    /// Checks that QEMU can hold the packets back.
    ///
    /// # Errors
    /// [`QmpError`]: the kernel forwards the packets past QEMU, or the card has several queues.
    pub async fn check(&self) -> Result<(), QmpError> {
        for backend in &self.backends {
            self.add(PROBE, backend).await?;
            self.remove(&name(PROBE, backend)).await?;
        }
        Ok(())
    }

    /// Holds packets back from now on. Packets that an earlier call has held back leave with the next epoch.
    ///
    /// # Errors
    /// [`QmpError`].
    pub async fn hold(&mut self) -> Result<(), QmpError> {
        let known = self.buffers().await?;
        for backend in &self.backends {
            // QEMU asks the youngest buffer first. A prefix of these is there if an earlier call was interrupted.
            for buffer in [BEFORE, LAST, EPOCH] {
                if !known.contains(&name(buffer, backend)) {
                    self.add(buffer, backend).await?;
                }
            }
        }
        self.waiting = Waiting {
            last: Some(0),
            before: Some(0),
        };
        Ok(())
    }

    /// Ends an epoch of a stopped guest: further packets belong to the next one. `number` is that of its checkpoint, above
    /// zero and all earlier ones.
    ///
    /// # Errors
    /// [`QmpError`].
    pub async fn end_epoch(&mut self, number: u64) -> Result<(), QmpError> {
        let buffers = self.waiting.end_epoch(number);
        self.empty(buffers).await
    }

    /// Releases the packets of all epochs up to this one. Those of an epoch may stay until a later one is released.
    ///
    /// # Errors
    /// [`QmpError`].
    pub async fn release(&mut self, through: u64) -> Result<(), QmpError> {
        let buffers = self.waiting.release(through);
        self.empty(buffers).await
    }

    /// Releases all packets, and holds none back any more.
    ///
    /// # Errors
    /// [`QmpError`].
    pub async fn stop(&self) -> Result<(), QmpError> {
        if self.backends.is_empty() {
            return Ok(());
        }
        let known = self.buffers().await?;
        for backend in &self.backends {
            for buffer in [EPOCH, LAST, BEFORE].map(|buffer| name(buffer, backend)) {
                if known.contains(&buffer) {
                    self.remove(&buffer).await?;
                }
            }
        }
        Ok(())
    }

    async fn add(&self, buffer: &str, backend: &str) -> Result<(), QmpError> {
        let buffer = json!({
            "qom-type": "filter-buffer", "id": name(buffer, backend), "netdev": backend,
            // The packets that the back end receives are those that the guest sends.
            "queue": "rx", "interval": INTERVAL_US,
        });
        self.qmp.execute("object-add", buffer).await.map(drop)
    }

    /// Removes a buffer, whose packets go on to the next one.
    async fn remove(&self, buffer: &str) -> Result<(), QmpError> {
        let buffer = json!({ "id": buffer });
        self.qmp.execute("object-del", buffer).await.map(drop)
    }

    /// Empties buffers into the next ones.
    async fn empty(&self, buffers: &[&str]) -> Result<(), QmpError> {
        for buffer in buffers {
            for backend in &self.backends {
                let path = format!("/objects/{}", name(buffer, backend));
                let set = |status| {
                    let status = json!({ "path": path, "property": "status", "value": status });
                    self.qmp.execute("qom-set", status)
                };
                // A buffer that is switched off keeps nothing.
                let (off, on) = tokio::join!(set("off"), set("on"));
                off?;
                on?;
            }
        }
        Ok(())
    }

    /// Returns the names of all objects that users or this program have made.
    async fn buffers(&self) -> Result<Vec<String>, QmpError> {
        let objects = json!({ "path": "/objects" });
        let found = self.qmp.execute("qom-list", objects).await?;
        let names = found.as_array().into_iter().flatten();
        let names = names.filter_map(|object| object["name"].as_str());
        Ok(names.map(str::to_owned).collect())
    }
}

fn name(buffer: &str, backend: &str) -> String {
    format!("{buffer}-{backend}")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// Buffers with the epochs of their packets, and the network.
    #[derive(Debug, Default)]
    struct Line {
        waiting: Waiting,
        packets: BTreeMap<&'static str, Vec<u64>>,
        left: Vec<u64>,
    }

    impl Line {
        fn empty(&mut self, buffers: &[&'static str]) {
            for &buffer in buffers {
                let packets = self.packets.remove(buffer).unwrap_or_default();
                match buffer {
                    EPOCH => self.packets.entry(LAST).or_default().extend(packets),
                    LAST => self.packets.entry(BEFORE).or_default().extend(packets),
                    _ => self.left.extend(packets),
                }
            }
        }

        fn end_epoch(&mut self, number: u64) {
            self.packets.entry(EPOCH).or_default().push(number);
            let buffers = self.waiting.end_epoch(number);
            self.empty(buffers);
        }

        fn release(&mut self, through: u64) {
            let buffers = self.waiting.release(through);
            self.empty(buffers);
            assert!(self.left.iter().all(|epoch| *epoch <= through), "{self:?}");
            assert!(self.left.is_sorted(), "{self:?}");
        }
    }

    #[test]
    fn packets_leave_in_order_and_not_before_their_checkpoint() {
        // Each step ends the next epoch or releases the oldest one, with at most two in flight.
        for steps in 0..1_u32 << 16 {
            let mut line = Line::default();
            let (mut ended, mut released) = (0, 0);
            for step in 0..16 {
                if steps >> step & 1 == 0 && ended - released < 2 {
                    ended += 1;
                    line.end_epoch(ended);
                } else if released < ended {
                    released += 1;
                    line.release(released);
                    assert_eq!(line.left.len() as u64, released, "{line:?}");
                }
            }
        }
    }

    #[test]
    fn packets_of_an_earlier_session_leave_with_the_first_epoch() {
        let mut line = Line {
            waiting: Waiting {
                last: Some(0),
                before: Some(0),
            },
            packets: BTreeMap::from([(BEFORE, vec![0]), (LAST, vec![0]), (EPOCH, vec![0])]),
            left: Vec::new(),
        };
        line.end_epoch(1);
        assert!(line.left.is_empty());
        line.release(1);
        assert_eq!(line.left, [0, 0, 0, 1]);
    }
}
