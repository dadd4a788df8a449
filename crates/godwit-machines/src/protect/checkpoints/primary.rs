//! The checkpoints of a primary's sessions.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::time::Instant;

use super::sending::{self, Sending};
use crate::protect::messages::Say;
use crate::protect::primary::PrimaryActor;
use crate::vms::lifecycle::watch;
use godwit_protect::PrimaryState;

/// Longest wait for the end of a QEMU whose monitor is gone.
const ENDS: Duration = Duration::from_millis(500);
/// Longest wait for the reason of QEMU's end.
const NOTICES: Duration = Duration::from_secs(5);
/// Time between two looks at QEMU.
const LOOK: Duration = Duration::from_millis(5);

impl PrimaryActor {
    /// Begins to take checkpoints, if this protection has any and the session takes none yet. All disks follow.
    pub(in crate::protect) fn begin_checkpoints(&mut self, session: u64) {
        let (Some(per_second), None) = (self.entry.checkpoints_per_second, &self.sending) else {
            return;
        };
        let Some(vm) = self.here.machine() else {
            return;
        };
        let inputs = self.here.inputs.clone();
        let (vms, entry) = (&self.here.vms, &self.entry);
        let after = self.ending.take();
        let sending = Sending::start(vms, &vm, entry, per_second, (session, inputs), after);
        self.sending = Some(sending);
    }

    /// Leaves a machine whose QEMU has ended by itself to the backup, which has its last checkpoint. Returns false if the
    /// QEMU lives, its guest has shut down, or the backup may not take the machine.
    pub(in crate::protect) async fn leave_dead_machine(&mut self) -> bool {
        let Some(vm) = self.here.machine() else {
            return false;
        };
        let process = vm
            .lock()
            .qemu
            .as_ref()
            .map(|qemu| Arc::clone(&qemu.process));
        if let Some(process) = process {
            // The end of QEMU's monitor shows before the end of QEMU.
            let ends = tokio::time::timeout(ENDS, process.ended()).await;
            if ends.is_err() {
                return false;
            }
        }
        let until = Instant::now() + NOTICES;
        while vm.lock().qemu.is_some() && Instant::now() < until {
            tokio::time::sleep(LOOK).await;
        }
        let died = {
            let inner = vm.lock();
            let ended = inner.entry.ended.as_deref().unwrap_or_default();
            inner.qemu.is_none() && ended.starts_with(watch::QEMU_ENDED)
        };
        let orders = match died {
            true => self.primary.machine_died(),
            false => Vec::new(),
        };
        if orders.is_empty() {
            return false;
        }
        tracing::warn!(
            vm = vm.name,
            to = self.entry.peer,
            "the VM has died, and is left to its backup"
        );
        let timeout = Duration::from_millis(self.entry.timeout_ms);
        self.leaves_until = Instant::now() + 2 * timeout;
        self.end_checkpoints();
        self.obey(orders).await;
        if let Some(session) = &self.session {
            session.control.say(Say::MachineDied).await;
        }
        true
    }

    /// Takes no further checkpoint. Packets stay held back.
    pub(in crate::protect) fn end_checkpoints(&mut self) {
        if let Some(sending) = self.sending.take() {
            self.ending = Some(sending.end());
        }
    }

    /// Lets all packets leave, because the machine depends on no backup.
    pub(in crate::protect) fn stop_holding_packets(&mut self) {
        self.here.vms.protections.hold_packets(&self.here.vm, false);
        if let (Some(vm), Some(_)) = (self.here.machine(), self.entry.checkpoints_per_second) {
            self.ending = Some(sending::stop_holding(&vm, self.ending.take()));
        }
    }

    /// Lets a guest go on that an earlier process of this node had stopped for a checkpoint, once its QEMU answers.
    pub(in crate::protect) fn end_interrupted_checkpoint(&mut self) {
        let runs_here = !matches!(
            self.primary.state(),
            PrimaryState::Severed | PrimaryState::Ended
        );
        let machine = self.here.machine().filter(|vm| vm.lock().qemu.is_some());
        let Some(vm) = machine.filter(|_| self.interrupted && runs_here) else {
            return;
        };
        self.interrupted = false;
        if self.primary.state() == PrimaryState::Alone && self.sending.is_none() {
            // QEMU's buffers outlive a node that was about to remove them.
            self.stop_holding_packets();
        }
        let qemu = {
            let inner = vm.lock();
            let is_stopped = matches!(inner.run_state.as_deref(), Some("paused" | "save-vm"));
            inner
                .qemu
                .clone()
                .filter(|_| is_stopped && inner.stands_still.is_none())
        };
        if let Some(qemu) = qemu {
            tokio::spawn(async move {
                match qemu.qmp.execute("cont", json!({})).await {
                    // While checkpoints are taken, news of the run state count for nothing.
                    Ok(_) => vm.lock().run_state = Some(String::from("running")),
                    Err(error) => {
                        tracing::error!(vm = vm.name, %error, "the guest does not go on");
                    }
                }
            });
        }
    }
}
