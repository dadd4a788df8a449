//! The history of moves in the store.

use godwit_api::{AnyMove, Migration, VmMigration};
use redb::{ReadTransaction, TableDefinition};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Store, StoreError, json, rows};
use crate::Context;

/// Moves kept of a kind; older ones are forgotten.
const MAX_MOVES: u64 = 1000;

/// A move with a history in the store, by the move's number.
pub trait History: AnyMove + Serialize + DeserializeOwned {
    /// The table of the history.
    const TABLE: TableDefinition<'static, u64, &'static [u8]>;
    /// The words before the number of a damaged entry.
    const WHAT: &'static str;
}

impl History for Migration {
    const TABLE: TableDefinition<'static, u64, &'static [u8]> = TableDefinition::new("migrations");
    const WHAT: &'static str = "migration";
}

impl History for VmMigration {
    const TABLE: TableDefinition<'static, u64, &'static [u8]> =
        TableDefinition::new("vm_migrations");
    const WHAT: &'static str = "move of a VM";
}

/// Reads a history, oldest first.
pub(super) fn load<V: History>(read: &ReadTransaction) -> Result<Vec<(u64, V)>, StoreError> {
    rows(read, V::TABLE, V::WHAT, |number| number)
}

impl Store {
    /// Stores a move under its number and forgets the oldest ones beyond the limit.
    pub async fn put_move<V: History>(&self, number: u64, view: &V) -> Result<(), StoreError> {
        let view = json(view.id(), view)?;
        self.database
            .write(move |write| {
                let mut history = write.open_table(V::TABLE)?;
                history.insert(number, view.as_slice())?;
                history.retain(|kept, _| kept + MAX_MOVES > number)?;
                Ok(())
            })
            .await
    }
}

impl Context {
    /// Stores a new or changed move. A failure leaves a gap in the history and does not stop the move.
    pub async fn remember(&self, number: u64, view: &impl History) {
        if let Err(error) = self.store.put_move(number, view).await {
            tracing::error!(migration = view.id(), %error, "cannot store the migration's history");
        }
    }
}

#[cfg(test)]
mod tests {
    use godwit_api::MigrationProgress;

    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn old_migrations_are_forgotten() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Store::open(&folder.path().join("store")).expect("opens");
        let view = serde_json::json!({
            "id": "x", "disk": "root", "from": "a", "to": "b", "direction": "outgoing", "phase": "completed",
            "progress": MigrationProgress::default(), "started_at": "", "verified": true,
        });
        let view: Migration = serde_json::from_value(view).expect("a migration");
        for number in [1, 2, MAX_MOVES + 1] {
            store.put_move(number, &view).await.expect("stores");
        }
        let kept: Vec<_> = store
            .load()
            .expect("loads")
            .migrations
            .into_iter()
            .map(|(number, _)| number)
            .collect();
        assert_eq!(kept, [2, MAX_MOVES + 1]);
    }
}
