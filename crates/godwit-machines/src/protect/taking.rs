//! The takeover: a backup owns the machine's disks in one durable step, or gives the machine back.

use std::sync::Arc;

use godwit_api::ErrorBody;
use godwit_api::ErrorCode;
use godwit_context::store::machine::protections::{ProtectionEntry, ProtectionPart};
use godwit_context::store::machine::{VmMark, VmOrigin};
use godwit_core::event::AbortReason;
use godwit_disks::disks::following;
use godwit_disks::disks::group::{GroupState, SwitchGroup};
use godwit_protect::{Backup, Primary};

use super::Input;
use super::backup::BackupActor;
use crate::vms::lifecycle::{run, taken};
use crate::vms::vm::{Vm, VmActivity, VmGuard};

/// A machine while its disks are being taken.
pub(super) struct Taking {
    vm: Arc<Vm>,
    guard: VmGuard,
    protection: ProtectionEntry,
    group: Arc<SwitchGroup>,
}

impl BackupActor {
    /// Owns the disks in one durable step together with the machine and its protection; [`Input::Given`] follows.
    pub(super) async fn take_over(&mut self) -> Result<(), ErrorBody> {
        let ProtectionPart::Backup(known) = &self.entry.part else {
            return Ok(());
        };
        let vms = Arc::clone(&self.here.vms);
        let from = self.entry.peer.clone();
        let id = (known.machine_id.clone(), known.epoch + 1);
        let state = (VmOrigin::Received { from }, VmMark::Taken);
        let machine = run::entry(&vms, &self.here.vm, known.machine.clone(), id, state, None)?;
        let protection = ProtectionEntry {
            part: ProtectionPart::Primary(
                Primary::new(self.entry.me, self.backup.known()).record(),
            ),
            ..self.entry.clone()
        };
        let vm = match self.keeping.waiting() {
            Some(waiting) => {
                waiting.vm.lock().entry = machine.clone();
                Arc::clone(&waiting.vm)
            }
            None => Vm::new(&vms.context.config, self.here.vm.clone(), machine.clone()),
        };
        let (claim, guard) = vms.claim(&vm, VmActivity::Starting)?;
        claim.keep();
        let disks = self.here.disks();
        let count = self.here.disk_names().len();
        let group = SwitchGroup::taking(self.here.vm.clone(), machine, protection.clone(), count);
        self.taking = Some(Taking {
            vm,
            guard,
            protection,
            group: Arc::clone(&group),
        });
        for disk in disks {
            if !following::take(&disk, &group).await {
                let text = format!("disk {} cannot be taken over", disk.name);
                return Err(ErrorBody::new(ErrorCode::Internal, text));
            }
        }
        let (mut state, inputs) = (group.state(), self.here.inputs.clone());
        tokio::spawn(async move {
            if state
                .wait_for(|state| *state == GroupState::Given)
                .await
                .is_ok()
            {
                let _ = inputs.send(Input::Given).await;
            }
        });
        Ok(())
    }

    /// Gives the machine back, because a disk cannot be taken over. Does nothing once the records are being stored.
    pub(super) async fn give_back(&mut self, why: String) {
        if let Some(taking) = self.taking.take() {
            if !taking.group.fail(AbortReason::DestinationDisk) {
                self.taking = Some(taking);
                return;
            }
            self.here.vms.remove(&taking.vm);
        }
        tracing::error!(vm = self.here.vm, why, "cannot take the VM over");
        let (backup, orders) = Backup::new(self.entry.me, self.backup.known());
        (self.backup, self.asking) = (backup, false);
        self.start_over("the machine cannot be taken over").await;
        self.problem = Some(format!("the VM cannot be taken over: {why}"));
        self.obey(orders).await;
    }

    /// Starts the machine, whose disks are this node's, and the primary's part. Returns true if so.
    pub(super) fn became_primary(&mut self) -> bool {
        let Some(taking) = self.taking.take() else {
            return false;
        };
        let Taking {
            vm,
            guard,
            protection,
            ..
        } = taking;
        let vms = &self.here.vms;
        let primary = Primary::new(self.entry.me, self.backup.known());
        super::spawn_primary(vms, &self.here.vm, protection, primary, None);
        match self.keeping.take() {
            Some((waiting, image)) => tokio::spawn(waiting.go_on(Arc::clone(vms), image, guard)),
            None => tokio::spawn(taken::start(Arc::clone(vms), vm, guard)),
        };
        for reply in self.waiting.drain(..) {
            let _ = reply.send(Ok(()));
        }
        true
    }
}
