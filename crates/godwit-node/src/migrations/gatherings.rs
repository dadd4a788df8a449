//! Incoming migrations that wait for their connections.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use godwit_core::units::MigrationId;
use godwit_core::wire::{Hello, Refusal, RefusalCode, TrafficClass};
use tokio::sync::mpsc;

use crate::node::Node;
use crate::peers::PeerConnection;

/// Incoming migrations whose connections are not complete.
#[derive(Debug, Default)]
pub(crate) struct Gatherings {
    by_migration: Mutex<HashMap<MigrationId, Gathering>>,
}

#[derive(Debug)]
pub(super) struct Gathering {
    pub(super) peer: String,
    pub(super) disk: String,
    pub(super) streams: mpsc::Sender<(TrafficClass, PeerConnection)>,
}

impl Gatherings {
    pub(super) fn lock(&self) -> MutexGuard<'_, HashMap<MigrationId, Gathering>> {
        self.by_migration
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Where a connection of this migration goes, if `hello` is from the node that made the offer.
    ///
    /// # Errors
    /// [`RefusalCode::Unknown`] when no such offer was accepted.
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

/// Takes the gathering out of the table when it is over.
pub(super) struct Listed<'a> {
    pub(super) node: &'a Arc<Node>,
    pub(super) migration: MigrationId,
}

impl Drop for Listed<'_> {
    fn drop(&mut self) {
        self.node.gatherings.lock().remove(&self.migration);
    }
}
