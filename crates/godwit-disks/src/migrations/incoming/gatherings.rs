//! Incoming migrations without all of their connections.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use godwit_core::units::MigrationId;
use godwit_core::wire::{Hello, Refusal, RefusalCode, TrafficClass};
use tokio::sync::mpsc;

use godwit_peers::PeerConnection;

/// Incoming migrations whose connections are not complete.
#[derive(Debug, Default)]
pub struct Gatherings {
    by_migration: Mutex<HashMap<MigrationId, Gathering>>,
}

#[derive(Debug)]
struct Gathering {
    peer: String,
    disk: String,
    streams: mpsc::Sender<(TrafficClass, PeerConnection)>,
}

impl Gatherings {
    /// Lets the source of `hello` bring the other connections of its migration, until the returned guard is dropped.
    pub(in crate::migrations) fn begin(
        &self,
        hello: &Hello,
        disk: &str,
        streams: mpsc::Sender<(TrafficClass, PeerConnection)>,
    ) -> Listed<'_> {
        let gathering = Gathering {
            peer: hello.node.clone(),
            disk: disk.to_owned(),
            streams,
        };
        self.lock().insert(hello.migration, gathering);
        Listed {
            gatherings: self,
            migration: hello.migration,
        }
    }

    /// Returns the number of offers whose connections are not complete.
    pub(in crate::migrations) fn count(&self) -> usize {
        self.lock().len()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<MigrationId, Gathering>> {
        self.by_migration
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the receiver of a migration's connections, if `hello` is from the source of the offer.
    ///
    /// # Errors
    /// [`RefusalCode::Unknown`] if no such offer was accepted.
    pub fn join(
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
pub struct Listed<'a> {
    gatherings: &'a Gatherings,
    migration: MigrationId,
}

impl Drop for Listed<'_> {
    fn drop(&mut self) {
        self.gatherings.lock().remove(&self.migration);
    }
}
