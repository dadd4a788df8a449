//! Incoming migrations without all of their connections.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use godwit_core::units::MigrationId;
use godwit_core::wire::{Hello, Refusal, RefusalCode, TrafficClass};
use tokio::sync::mpsc;

use crate::migrations::Migrations;
use crate::peers::PeerConnection;

/// Incoming migrations whose connections are not complete.
#[derive(Debug, Default)]
pub(crate) struct Gatherings {
    by_migration: Mutex<HashMap<MigrationId, Gathering>>,
}

#[derive(Debug)]
pub(in crate::migrations) struct Gathering {
    pub(in crate::migrations) peer: String,
    pub(in crate::migrations) disk: String,
    pub(in crate::migrations) streams: mpsc::Sender<(TrafficClass, PeerConnection)>,
}

impl Gatherings {
    pub(in crate::migrations) fn lock(&self) -> MutexGuard<'_, HashMap<MigrationId, Gathering>> {
        self.by_migration
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the receiver of a migration's connections, if `hello` is from the source of the offer.
    ///
    /// # Errors
    /// [`RefusalCode::Unknown`] if no such offer was accepted.
    pub(crate) fn join(
        &self,
        hello: &Hello,
    ) -> Result<mpsc::Sender<(TrafficClass, PeerConnection)>, Refusal> {
        self.lock()
            .get(&hello.migration)
            .filter(|gathering| gathering.peer == hello.node && gathering.disk == hello.disk)
            .map(|gathering| gathering.streams.clone())
            .ok_or_else(|| Refusal {
                code: RefusalCode::Unknown,
                text: format!("no offer of migration {} was accepted", hello.migration),
            })
    }
}

/// Takes the gathering out of the table on drop.
pub(in crate::migrations) struct Listed<'a> {
    pub(in crate::migrations) migrations: &'a Arc<Migrations>,
    pub(in crate::migrations) migration: MigrationId,
}

impl Drop for Listed<'_> {
    fn drop(&mut self) {
        self.migrations.gatherings.lock().remove(&self.migration);
    }
}
