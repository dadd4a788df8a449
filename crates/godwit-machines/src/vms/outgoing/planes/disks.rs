//! The plane of a moving VM's disks. Each disk has a migration of its own; the group makes all of them switch over
//! together.

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::oneshot;

use crate::vms::outgoing::SWITCH_TIMEOUT;
use crate::vms::outgoing::departure::{Departure, POLL};
use crate::vms::outgoing::planes::Plane;
use crate::vms::outgoing::preflight;
use godwit_api::{ErrorBody, ErrorCode, MigrationPhase};
use godwit_disks::disks::disk::{Activity, Disk};
use godwit_disks::disks::following;
use godwit_disks::disks::group::{GroupState, SwitchGroup};
use godwit_disks::migrations::outgoing::{self, End};
use godwit_qemu::inspect::Facts;
use godwit_qemu::machine::Machine;

/// The plane of disks.
pub(in crate::vms::outgoing) struct Disks {
    pub(in crate::vms::outgoing) group: Arc<SwitchGroup>,
    /// The ids of the disks' migrations.
    moves: Vec<String>,
}

impl Disks {
    pub(in crate::vms::outgoing) const fn new(group: Arc<SwitchGroup>) -> Self {
        Self {
            group,
            moves: Vec::new(),
        }
    }

    /// Returns the error if a disk cannot move any more, or must not: requests that wait for room are not part of the
    /// moving state.
    fn trouble(&self, of: &Departure) -> Option<ErrorBody> {
        let full = of.disks().into_iter().find(|disk| {
            let disk = of.vms.disks.find(disk);
            disk.is_some_and(|disk| disk.lock().lacks_room())
        });
        if let Some(disk) = full {
            let why = format!("no space is left for disk {disk} here, and writes wait for it");
            return Some(
                of.error(ErrorCode::NoSpace, &why)
                    .hint("free space where its image is, and start the migration again"),
            );
        }
        self.moves.iter().find_map(|id| {
            let (_, view) = of.vms.disk_migrations.get(id).ok()?;
            (view.phase == MigrationPhase::Aborted).then(|| {
                let why = view.error.map(|error| error.message);
                let why = why.unwrap_or_else(|| format!("disk {} did not move", view.disk));
                of.error(ErrorCode::Conflict, &why)
            })
        })
    }

    /// Tells the engines of all disks to switch over.
    async fn switch_over(of: &Departure) -> Result<(), ErrorBody> {
        let mut answers = Vec::new();
        for name in of.disks() {
            let engine = of.vms.disks.find(&name).and_then(|disk| disk.engine());
            let Some(engine) = engine else {
                let why = format!("disk {name} is not served any more");
                return Err(of.error(ErrorCode::Conflict, &why));
            };
            let (reply, answer) = oneshot::channel();
            engine.switch_over(Box::new(move |leaves| {
                let _ = reply.send(leaves);
            }));
            answers.push((name, answer));
        }
        // All disks are told before the first answer is awaited: the guest stands still.
        for (name, answer) in answers {
            if !answer.await.unwrap_or(false) {
                let why = format!("disk {name} does not move any more");
                return Err(of.error(ErrorCode::Conflict, &why));
            }
        }
        Ok(())
    }

    /// Waits until all disks are given away, durably.
    pub(in crate::vms::outgoing) async fn given(&self) {
        let mut state = self.group.state();
        // Never fails: the group outlives the wait.
        let _ = state.wait_for(|state| *state == GroupState::Given).await;
    }

    /// Has all disks given away, and the VM with them. Returns once that is decided, and maybe not stored yet.
    ///
    /// # Errors
    /// The disks were not given away in time.
    pub(in crate::vms::outgoing) async fn hand_over(
        &self,
        of: &Departure,
    ) -> Result<(), ErrorBody> {
        let told = Instant::now();
        Self::switch_over(of).await?;
        self.group.ask_without_disks(&of.vms.disks);
        let mut state = self.group.state();
        let decided = |state: &GroupState| *state != GroupState::Gathering;
        loop {
            tokio::select! {
                decided = state.wait_for(decided) => {
                    return match decided.map(|state| *state) {
                        Ok(GroupState::Storing | GroupState::Given) => Ok(()),
                        _ => Err(of.error(ErrorCode::Conflict, &"its disks were not given away")),
                    };
                }
                () = tokio::time::sleep(POLL) => {
                    if let Some(trouble) = self.trouble(of) {
                        return Err(trouble);
                    }
                    if told.elapsed() >= SWITCH_TIMEOUT {
                        let why = "the destination did not accept all disks in time";
                        return Err(of.error(ErrorCode::PeerUnreachable, &why));
                    }
                }
            }
        }
    }
}

impl Plane for Disks {
    fn preflight(of: &Departure, machine: &Machine, facts: &Facts) -> Vec<String> {
        preflight::disks_leaving(&of.vms, machine, facts)
    }

    async fn start(&mut self, of: &Departure) -> Result<(), ErrorBody> {
        for disk in of.disks() {
            let request = of.request.for_disk(&disk);
            let group = Some(Arc::clone(&self.group));
            let started =
                outgoing::start_in(&of.vms.disk_migrations, request, End::Leaves(group)).await?;
            for warning in &started.warnings {
                of.warn(format!("disk {disk}: {warning}"));
            }
            of.vms.migrations.add_disk(of.id, started.id.clone());
            self.moves.push(started.id);
        }
        Ok(())
    }

    async fn converged(&mut self, of: &Departure) -> Result<(), ErrorBody> {
        loop {
            if let Some(trouble) = self.trouble(of) {
                return Err(trouble);
            }
            let converged = self.moves.iter().all(|id| {
                let found = of.vms.disk_migrations.get(id);
                found.is_ok_and(|(_, view)| view.phase == MigrationPhase::Converged)
            });
            if converged {
                return Ok(());
            }
            tokio::time::sleep(POLL).await;
        }
    }

    async fn broken(&self, of: &Departure) -> ErrorBody {
        loop {
            if let Some(trouble) = self.trouble(of) {
                return trouble;
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Cancels in the engines first: the disks take requests again at once, and the guest must not wait for the rest.
    async fn take_back(&mut self, of: &Departure) {
        for disk in of.disks() {
            let disk = of.vms.disks.find(&disk);
            let leaves = |disk: &Arc<Disk>| matches!(disk.lock().activity, Activity::Outgoing(_));
            if let Some(disk) = disk.filter(leaves) {
                following::give_up(&disk).await;
            }
        }
    }

    /// Also cancels a disk whose offer is still being made: the disk's task does not see the end of the VM's move.
    async fn clear(&mut self, of: &Departure) {
        for disk in of.disks() {
            let disk = of.vms.disks.find(&disk);
            let leaves = disk.and_then(|disk| disk.lock().activity.migration());
            if let Some(id) = leaves {
                // A migration that has ended meanwhile needs no cancellation.
                let _ = outgoing::cancel(&of.vms.disk_migrations, &id.to_string()).await;
            }
        }
    }
}
