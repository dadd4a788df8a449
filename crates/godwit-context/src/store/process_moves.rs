//! Moves of processes as stored: a record for each move from here, each arriving process and each held partner.

use redb::ReadableTable;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{PROCESS_MOVES, Store, StoreError, json};

/// The kind of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A move away, until its end is known to both ends.
    Outgoing,
    /// A move to this node.
    Arrival,
    /// A partner of a process that moves, held still.
    Held,
}

impl Kind {
    /// Returns the first part of the kind's keys.
    const fn prefix(self) -> &'static str {
        match self {
            Kind::Outgoing => "outgoing-",
            Kind::Arrival => "arrival-",
            Kind::Held => "held-",
        }
    }

    fn key(self, name: &str) -> String {
        format!("{}{name}", self.prefix())
    }
}

/// The name of a record, and its value unless the record is damaged.
pub type Named<T> = (String, Result<T, StoreError>);

pub(super) fn parsed<T: DeserializeOwned>(key: &str, bytes: &[u8]) -> Result<T, StoreError> {
    serde_json::from_slice(bytes).map_err(|error| StoreError::Damaged {
        key: key.to_owned(),
        why: error.to_string(),
    })
}

impl Store {
    /// Returns a record, or `None` if there is none. Blocks.
    pub fn process_move<T: DeserializeOwned>(
        &self,
        kind: Kind,
        name: &str,
    ) -> Result<Option<T>, StoreError> {
        let key = kind.key(name);
        // A commit under way may hold the database for as long as the device takes.
        let read = tokio::task::block_in_place(|| self.database.begin_read())?;
        let table = read.open_table(PROCESS_MOVES).map_err(redb::Error::from)?;
        let found = table.get(key.as_str()).map_err(redb::Error::from)?;
        found.map(|bytes| parsed(&key, bytes.value())).transpose()
    }

    /// Returns the name and value of each record of this kind. Blocks.
    pub fn process_moves<T: DeserializeOwned>(
        &self,
        kind: Kind,
    ) -> Result<Vec<Named<T>>, StoreError> {
        let read = tokio::task::block_in_place(|| self.database.begin_read())?;
        let table = read.open_table(PROCESS_MOVES).map_err(redb::Error::from)?;
        let mut found = Vec::new();
        for item in table.iter().map_err(redb::Error::from)? {
            let (key, bytes) = item.map_err(redb::Error::from)?;
            if let Some(name) = key.value().strip_prefix(kind.prefix()) {
                found.push((name.to_owned(), parsed(key.value(), bytes.value())));
            }
        }
        Ok(found)
    }

    /// Stores a record. Blocks.
    pub fn put_process_move(
        &self,
        kind: Kind,
        name: &str,
        value: &impl Serialize,
    ) -> Result<(), StoreError> {
        let key = kind.key(name);
        let bytes = json(&key, value)?;
        self.database.write_now(move |write| {
            let mut table = write.open_table(PROCESS_MOVES)?;
            table.insert(key.as_str(), bytes.as_slice())?;
            Ok(())
        })
    }

    /// Removes a record. Blocks.
    pub fn remove_process_move(&self, kind: Kind, name: &str) -> Result<(), StoreError> {
        let key = kind.key(name);
        self.database.write_now(move |write| {
            write.open_table(PROCESS_MOVES)?.remove(key.as_str())?;
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn records_are_found_by_kind_and_a_damaged_one_is_not_absent() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Store::open(&folder.path().join("store")).expect("opens");
        let put = |kind, name: &str, value: u32| store.put_process_move(kind, name, &value);
        put(Kind::Outgoing, "7", 1).expect("stores");
        put(Kind::Arrival, "7", 2).expect("stores");
        put(Kind::Held, "7-8", 3).expect("stores");
        let get = |kind, name: &str| store.process_move::<u32>(kind, name);
        assert_eq!(get(Kind::Outgoing, "7").expect("reads"), Some(1));
        assert_eq!(get(Kind::Arrival, "7").expect("reads"), Some(2));
        assert_eq!(get(Kind::Held, "7").expect("reads"), None);
        let held = store.process_moves::<u32>(Kind::Held).expect("reads");
        assert!(matches!(held.as_slice(), [(name, Ok(3))] if name == "7-8"));
        store
            .put_process_move(Kind::Arrival, "7", &"no number")
            .expect("stores");
        let error = get(Kind::Arrival, "7").expect_err("damaged").to_string();
        assert!(error.contains("arrival-7"), "{error}");
        store
            .remove_process_move(Kind::Arrival, "7")
            .expect("removes");
        assert_eq!(get(Kind::Arrival, "7").expect("reads"), None);
    }
}
