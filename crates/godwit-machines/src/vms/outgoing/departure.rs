//! The shared state of a VM's move, for its planes and their coordinator.

use std::sync::Arc;
use std::time::Duration;

use godwit_core::units::MigrationId;

use crate::vms::Vms;
use crate::vms::control::Link;
use crate::vms::lifecycle::run::stored_badly;
use crate::vms::messages::{Answer, Order};
use crate::vms::vm::{Qemu, Vm};
use godwit_api::{ErrorBody, ErrorCode, MigrateVm, VmMigrationPhase as Phase};
use godwit_context::blocking;
use godwit_context::store::machine::{VmEntry, VmMark};
use godwit_disks::disks::storage::image;
use godwit_peers::config::PeerConfig;

/// Time between two checks of the parts that move.
pub(super) const POLL: Duration = Duration::from_millis(20);

/// The source's end of a move's control connection.
pub(super) type SourceLink = Link<Order, Answer>;

/// The VM that leaves this node, with its destination.
pub(super) struct Departure {
    pub(super) vms: Arc<Vms>,
    pub(super) vm: Arc<Vm>,
    pub(super) peer: PeerConfig,
    pub(super) id: MigrationId,
    pub(super) request: MigrateVm,
    pub(super) qemu: Qemu,
}

impl Departure {
    /// Returns the error of a move that was cancelled, or that the closing node ended.
    pub(super) fn given_up(&self) -> ErrorBody {
        match self.vms.context.is_closing() {
            true => self
                .error(ErrorCode::ShuttingDown, &"this node was stopped meanwhile")
                .hint("start the migration again when the node is back"),
            false => self.error(ErrorCode::Conflict, &"it was cancelled"),
        }
    }

    pub(super) fn error(&self, code: ErrorCode, why: &dyn std::fmt::Display) -> ErrorBody {
        let (vm, to) = (&self.vm.name, &self.peer.name);
        ErrorBody::new(code, format!("VM {vm} was not moved to node '{to}': {why}"))
    }

    /// Returns the error for an unexpected answer of the destination, or for none: `what` names the failed step.
    pub(super) fn unwilling(&self, answer: Option<Answer>, what: &str) -> ErrorBody {
        match answer {
            Some(Answer::Failed(why)) => {
                self.error(ErrorCode::PeerRefused, &format!("it {what}: {why}"))
            }
            _ => self.error(ErrorCode::PeerUnreachable, &format!("it {what}: no answer")),
        }
        .hint(format!("see the log of node '{}'", self.peer.name))
    }

    pub(super) fn enter(&self, phase: Phase) {
        tracing::info!(vm = self.vm.name, phase = phase.name(), "migration of a VM");
        self.vms
            .migrations
            .change(self.id, |view| view.phase = phase);
    }

    /// Adds a warning to the move's view.
    pub(super) fn warn(&self, warning: String) {
        self.vms
            .migrations
            .change(self.id, |view| view.warnings.push(warning));
    }

    /// Returns the names of the VM's disks.
    pub(super) fn disks(&self) -> Vec<String> {
        self.vm.lock().entry.machine.disks.clone()
    }

    /// Returns each disk's name and the bytes occupied by its image.
    pub(super) async fn disk_sizes(&self) -> Result<Vec<(String, u64)>, ErrorBody> {
        let mut sizes = Vec::new();
        for name in self.disks() {
            let disk = self.vms.disks.find(&name);
            let path = disk.map(|disk| disk.lock().entry.path.clone());
            let size = blocking(move || path.and_then(|path| image::allocated(&path))).await?;
            sizes.push((name, size.unwrap_or(0)));
        }
        Ok(sizes)
    }

    /// Returns the ids of the disks, in their order; none if any disk lacks an id.
    pub(super) fn disk_ids(&self) -> Vec<String> {
        let id = |name: &String| {
            let disk = self.vms.disks.find(name)?;
            let id = disk.lock().entry.id?;
            Some(id.to_string())
        };
        let ids: Option<Vec<_>> = self.disks().iter().map(id).collect();
        ids.unwrap_or_default()
    }

    pub(super) async fn store(&self, entry: &VmEntry) -> Result<(), ErrorBody> {
        self.vms
            .context
            .store
            .put_vm(&self.vm.name, entry)
            .await
            .map_err(|error| stored_badly(&self.vm.name, &error))?;
        self.vm.lock().entry = entry.clone();
        Ok(())
    }

    /// Stores if the guest runs, or would run without the move, for the node's next run.
    pub(super) async fn store_ran(&self, ran: bool) -> Result<(), ErrorBody> {
        let mut entry = self.vm.lock().entry.clone();
        match &mut entry.mark {
            Some(VmMark::Outgoing { runs, .. }) if *runs != ran => *runs = ran,
            _ => return Ok(()),
        }
        self.store(&entry).await
    }
}
