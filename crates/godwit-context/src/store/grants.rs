//! Grants of protected machines, stored at their witness, or at the two nodes themselves if a command fences.

use std::sync::{Arc, Mutex, PoisonError};

use godwit_core::units::ProtectionId;
use godwit_protect::Grant;
use redb::ReadableTable;
use serde::{Deserialize, Serialize};

use super::process_moves::parsed;
use super::{GRANTS, Store, StoreError, json};

/// Most grants that a node stores.
pub const MOST_GRANTS: u64 = 4096;

/// A grant as stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct GrantEntry {
    nodes: [String; 2],
    grant: Grant,
}

/// The outcome of a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Granted {
    /// The grant afterwards, changed or not.
    Now(Option<Grant>),
    /// Nothing was stored: the node has [`MOST_GRANTS`].
    Full,
    /// Nothing was changed: the grant belongs to these nodes.
    Of([String; 2]),
}

/// The step that a change needs.
enum Step {
    Nothing(Granted),
    Put(Grant),
    Remove,
}

impl Store {
    /// Changes the grant of a protection of these nodes to the grant that `change` returns for the present grant. Reads
    /// alone if both are equal.
    ///
    /// # Errors
    /// The store fails. The change may be durable all the same.
    pub async fn change_grant(
        &self,
        id: ProtectionId,
        nodes: &[String; 2],
        change: impl Fn(Option<Grant>) -> Option<Grant> + Send + 'static,
    ) -> Result<Granted, StoreError> {
        let (key, nodes) = (id.to_string(), nodes.clone());
        {
            // A commit under way may hold the database for as long as the device takes.
            let read = tokio::task::block_in_place(|| self.database.begin_read())?;
            let table = read.open_table(GRANTS).map_err(redb::Error::from)?;
            if let Step::Nothing(granted) = judge(&table, &key, &nodes, &change)? {
                return Ok(granted);
            }
        }
        let outcome = Arc::new(Mutex::new(Ok(Granted::Full)));
        let told = Arc::clone(&outcome);
        self.database
            .write(move |write| {
                let mut table = write.open_table(GRANTS)?;
                let granted = match judge(&table, &key, &nodes, &change) {
                    Ok(Step::Nothing(granted)) => Ok(granted),
                    Ok(Step::Remove) => {
                        table.remove(key.as_str())?;
                        Ok(Granted::Now(None))
                    }
                    Ok(Step::Put(grant)) => {
                        let nodes = nodes.clone();
                        match json(&key, &GrantEntry { nodes, grant }) {
                            Ok(bytes) => {
                                table.insert(key.as_str(), bytes.as_slice())?;
                                Ok(Granted::Now(Some(grant)))
                            }
                            Err(error) => Err(error),
                        }
                    }
                    Err(StoreError::Database(error)) => return Err(error),
                    Err(error) => Err(error),
                };
                *told.lock().unwrap_or_else(PoisonError::into_inner) = granted;
                Ok(())
            })
            .await?;
        let mut outcome = outcome.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *outcome, Ok(Granted::Full))
    }
}

/// Returns the step from the present entry to the changed one.
fn judge(
    table: &impl ReadableTable<&'static str, &'static [u8]>,
    key: &str,
    nodes: &[String; 2],
    change: &impl Fn(Option<Grant>) -> Option<Grant>,
) -> Result<Step, StoreError> {
    let bytes = table.get(key).map_err(redb::Error::from)?;
    let entry: Option<GrantEntry> = bytes.map(|bytes| parsed(key, bytes.value())).transpose()?;
    if let Some(entry) = &entry
        && entry.nodes != *nodes
    {
        return Ok(Step::Nothing(Granted::Of(entry.nodes.clone())));
    }
    let present = entry.map(|entry| entry.grant);
    Ok(match change(present) {
        after if after == present => Step::Nothing(Granted::Now(present)),
        None => Step::Remove,
        Some(_) if present.is_none() && table.len().map_err(redb::Error::from)? >= MOST_GRANTS => {
            Step::Nothing(Granted::Full)
        }
        Some(grant) => Step::Put(grant),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u64) -> ProtectionId {
        let mut id = [0; 16];
        id[..8].copy_from_slice(&number.to_le_bytes());
        ProtectionId(id)
    }

    fn pair(first: &str, second: &str) -> [String; 2] {
        [first.to_owned(), second.to_owned()]
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_grant_outlives_the_store_and_belongs_to_its_nodes() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("store");
        let first = Some(Grant::FIRST);
        let (ours, others) = (pair("a", "b"), pair("a", "c"));
        {
            let store = Store::open(&path).expect("opens");
            let begun = store.change_grant(id(1), &ours, move |_| first).await;
            assert_eq!(begun.expect("stores"), Granted::Now(first));
            store.close();
        }
        let store = Store::open(&path).expect("opens again");
        let read = store.change_grant(id(1), &ours, |present| present).await;
        assert_eq!(read.expect("reads"), Granted::Now(first));
        let foreign = store.change_grant(id(1), &others, |_| None).await;
        assert_eq!(foreign.expect("reads"), Granted::Of(ours.clone()));
        let ended = store.change_grant(id(1), &ours, |_| None).await;
        assert_eq!(ended.expect("stores"), Granted::Now(None));
        let free = store.change_grant(id(1), &others, move |_| first).await;
        assert_eq!(free.expect("stores"), Granted::Now(first));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_damaged_grant_is_not_absent_and_grants_are_bounded() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Store::open(&folder.path().join("store")).expect("opens");
        let fill = store.database.write(|write| {
            let mut table = write.open_table(GRANTS)?;
            for number in 0..MOST_GRANTS {
                table.insert(id(number).to_string().as_str(), b"no grant".as_slice())?;
            }
            Ok(())
        });
        fill.await.expect("stores");
        let nodes = pair("a", "b");
        let begin = |number| store.change_grant(id(number), &nodes, |_| Some(Grant::FIRST));
        let error = begin(0).await.expect_err("damaged").to_string();
        assert!(error.contains(&id(0).to_string()), "{error}");
        let full = begin(MOST_GRANTS).await.expect("reads");
        assert_eq!(full, Granted::Full);
    }
}
