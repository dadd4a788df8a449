//! The checkpoints that a backup keeps.

use std::sync::Arc;

use godwit_api::ErrorBody;
use godwit_peers::PeerConnection;
use tokio::sync::mpsc;

use super::receiving::{Image, Mark, Receiving};
use super::waiting::Waiting;
use crate::protect::Input;
use crate::protect::backup::BackupActor;
use crate::protect::messages::Hear;
use crate::vms::messages::MachineOffer;

/// A backup's part in a session of checkpoints.
#[derive(Debug, Default)]
pub(in crate::protect) struct Keeping {
    /// Number of the session, to tell its news from those of earlier ones.
    session: u64,
    /// The offer, until its QEMU is being started. `None` also if the machine would be started anew.
    offer: Option<MachineOffer>,
    connection: Option<PeerConnection>,
    marks: Option<mpsc::Receiver<Mark>>,
    waiting: Option<Waiting>,
    receiving: Option<Receiving>,
    /// The checkpoint to go on from, once the primary is lost.
    image: Option<Image>,
}

impl Keeping {
    /// Returns the machine that waits.
    pub(in crate::protect) const fn waiting(&self) -> Option<&Waiting> {
        self.waiting.as_ref()
    }

    /// Takes the QEMU that waits and the checkpoint to go on from.
    pub(in crate::protect) fn take(&mut self) -> Option<(Waiting, Image)> {
        Some((self.waiting.take()?, self.image.take()?))
    }
}

impl BackupActor {
    /// Returns true if the machine goes on from checkpoints.
    pub(in crate::protect) const fn has_checkpoints(&self) -> bool {
        self.entry.checkpoints_per_second.is_some()
    }

    /// Prepares for the checkpoints of an offered machine, if there are to be any.
    pub(in crate::protect) fn expect_checkpoints(&mut self, offer: &MachineOffer) {
        if self.has_checkpoints() {
            self.keeping = Keeping {
                session: self.keeping.session + 1,
                offer: Some(offer.clone()),
                marks: Some(self.here.listen_for_marks()),
                ..Keeping::default()
            };
        }
    }

    /// Gives up everything that has come.
    pub(in crate::protect) async fn drop_checkpoints(&mut self) {
        let kept = std::mem::take(&mut self.keeping);
        self.keeping.session = kept.session + 1;
        drop(kept.receiving);
        if let Some(waiting) = kept.waiting {
            waiting.end().await;
        }
    }

    /// Starts the QEMU that waits, once all disks follow.
    pub(in crate::protect) fn prepare_machine(&mut self) {
        let Some(offer) = self.keeping.offer.take() else {
            return;
        };
        let (here, session) = (self.here.clone(), self.keeping.session);
        let (id, from) = (self.entry.id.clone(), self.entry.peer.clone());
        godwit_context::spawn(async move {
            let started = Waiting::start(&here.vms, &here.vm, (&id, &from), offer).await;
            let told = here.inputs.send(Input::Waiting(session, started)).await;
            // The protection has ended meanwhile.
            if let Err(mpsc::error::SendError(Input::Waiting(_, Ok(waiting)))) = told {
                waiting.end().await;
            }
        });
    }

    pub(in crate::protect) async fn machine_waits(
        &mut self,
        session: u64,
        started: Result<Waiting, ErrorBody>,
    ) {
        let waiting = match started {
            Ok(waiting) if session == self.keeping.session => waiting,
            Ok(stale) => return stale.end().await,
            Err(error) => return self.checkpoints_ended(session, error.message).await,
        };
        let (inputs, watched) = (self.here.inputs.clone(), waiting.clone());
        tokio::spawn(async move {
            watched.ended().await;
            let why = String::from("the QEMU that waits for the machine has ended");
            let _ = inputs.send(Input::CheckpointsEnded(session, why)).await;
        });
        self.keeping.waiting = Some(waiting);
        self.receive();
    }

    /// Takes the primary's connection for checkpoints.
    pub(in crate::protect) fn checkpoints_come(&mut self, connection: PeerConnection) {
        self.keeping.connection = Some(connection);
        self.receive();
    }

    /// Receives checkpoints once there is a connection and a place for them.
    fn receive(&mut self) {
        let keeping = &mut self.keeping;
        let (Some(waiting), true) = (&keeping.waiting, keeping.connection.is_some()) else {
            return;
        };
        let (Some(marks), Some(connection)) = (keeping.marks.take(), keeping.connection.take())
        else {
            return;
        };
        let disks = self.here.disks().into_iter().map(|disk| {
            let migration = self.follows.get(&disk.name).cloned();
            (disk, migration.unwrap_or_default())
        });
        let memory = Arc::clone(&waiting.memory);
        let session = (keeping.session, self.here.inputs.clone());
        let receiving = Receiving::start(connection, memory, disks.collect(), marks, session);
        keeping.receiving = Some(receiving);
    }

    /// Follows once the first checkpoint is whole.
    pub(in crate::protect) fn first_checkpoint(&mut self, session: u64) {
        if session == self.keeping.session {
            self.in_sync();
        }
    }

    pub(in crate::protect) async fn checkpoints_ended(&mut self, session: u64, why: String) {
        let took = self.backup.state() == godwit_protect::BackupState::Took;
        if session != self.keeping.session || took {
            return;
        }
        self.problem = Some(why.clone());
        self.say(Hear::Behind(why.clone()));
        self.start_over(&why).await;
    }

    /// Takes no further part of a checkpoint. Returns false if there is none to go on from.
    pub(in crate::protect) async fn sever_checkpoints(&mut self) -> bool {
        if !self.has_checkpoints() {
            return true;
        }
        if let Some(receiving) = self.keeping.receiving.take() {
            self.keeping.image = receiving.finish().await;
        }
        self.keeping.image.is_some()
    }
}
