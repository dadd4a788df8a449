//! The database file: reopened after a failure, and written in as few commits as possible.

use std::fmt;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use redb::{Database, ReadTransaction, ReadableDatabase, WriteTransaction};
use tokio::sync::oneshot;

use super::StoreError;

/// A database whose writes are durable when their future is ready. Clones share the database.
#[derive(Clone, Debug)]
pub(super) struct SharedDatabase {
    path: PathBuf,
    state: Arc<Mutex<State>>,
    queue: Arc<Mutex<Vec<Queued>>>,
}

#[derive(Debug)]
enum State {
    Open(Database),
    /// The database refuses everything after an I/O error, such as a full file system, until reopened.
    Failed,
    Closed,
}

/// A change made in a transaction. A change may be tried more than once.
type Change = dyn Fn(&WriteTransaction) -> Result<(), redb::Error> + Send;

/// A waiting change.
struct Queued {
    change: Box<Change>,
    done: oneshot::Sender<Result<(), StoreError>>,
}

impl fmt::Debug for Queued {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queued").finish_non_exhaustive()
    }
}

impl SharedDatabase {
    /// Opens or creates the file and prepares the database. Blocks.
    pub(super) fn open(
        path: &Path,
        prepare: impl FnOnce(&Database) -> Result<(), StoreError>,
    ) -> Result<Self, StoreError> {
        let database = open(path)?;
        prepare(&database)?;
        Ok(Self {
            path: path.to_owned(),
            state: Arc::new(Mutex::new(State::Open(database))),
            queue: Arc::default(),
        })
    }

    /// Closes the file: later users of the database get errors. Blocks.
    pub(super) fn close(&self) {
        *self.state() = State::Closed;
    }

    /// Begins to read. Blocks.
    pub(super) fn begin_read(&self) -> Result<ReadTransaction, StoreError> {
        let mut state = self.state();
        let database = opened(&mut state, &self.path)?;
        Ok(database.begin_read().map_err(redb::Error::from)?)
    }

    /// Makes a change durable. Changes that wait for an earlier commit share the next: the disks of one machine change
    /// hands together, and each commit waits for the device. Must be called on a runtime of several threads.
    pub(super) async fn write(
        &self,
        change: impl Fn(&WriteTransaction) -> Result<(), redb::Error> + Send + 'static,
    ) -> Result<(), StoreError> {
        // A guest may be waiting for this commit. Handing the commit to another thread and back takes a quarter of the
        // commit's time.
        self.write_now(change)
    }

    /// Does the same as [`Self::write`]. Blocks.
    pub(super) fn write_now(
        &self,
        change: impl Fn(&WriteTransaction) -> Result<(), redb::Error> + Send + 'static,
    ) -> Result<(), StoreError> {
        let (done, mut result) = oneshot::channel();
        let change = Box::new(change);
        self.queue().push(Queued { change, done });
        tokio::task::block_in_place(|| self.commit_queued());
        // Another thread that took the change has committed it: the state was held until then.
        result.try_recv().unwrap_or(Err(StoreError::Ended))
    }

    /// Commits all waiting changes, in their order. Blocks.
    fn commit_queued(&self) {
        let mut state = self.state();
        let queued = std::mem::take(&mut *self.queue());
        if queued.len() > 1 && self.commit(&mut state, &queued).is_ok() {
            for each in queued {
                // The caller may be gone.
                let _ = each.done.send(Ok(()));
            }
            return;
        }
        // A single change, or several of which one failed the shared transaction.
        for each in queued {
            let result = self.commit(&mut state, std::slice::from_ref(&each));
            let _ = each.done.send(result);
        }
    }

    fn commit(&self, state: &mut State, queued: &[Queued]) -> Result<(), StoreError> {
        let result = opened(state, &self.path).and_then(|database| {
            // A transaction is durable once its commit returns: redb's default.
            let write = database.begin_write().map_err(redb::Error::from)?;
            for each in queued {
                (each.change)(&write)?;
            }
            write.commit().map_err(redb::Error::from)?;
            Ok(())
        });
        if result.is_err() && !matches!(*state, State::Closed) {
            *state = State::Failed;
        }
        result
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn queue(&self) -> MutexGuard<'_, Vec<Queued>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn open(path: &Path) -> Result<Database, StoreError> {
    let failed = |source| StoreError::Open {
        path: path.to_owned(),
        source,
    };
    let database = Database::create(path).map_err(|error| failed(error.into()))?;
    // Other users may have access to the folder.
    std::fs::set_permissions(path, Permissions::from_mode(0o600))
        .map_err(|error| failed(error.into()))?;
    Ok(database)
}

/// Returns the database, reopened after an earlier failure.
fn opened<'a>(state: &'a mut State, path: &Path) -> Result<&'a Database, StoreError> {
    if matches!(state, State::Failed) {
        *state = State::Open(open(path)?);
    }
    match state {
        State::Open(database) => Ok(database),
        State::Failed | State::Closed => Err(StoreError::Ended),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use redb::{ReadableTableMetadata, TableDefinition};

    use super::*;

    const NUMBERS: TableDefinition<u64, u64> = TableDefinition::new("numbers");

    fn empty(folder: &tempfile::TempDir) -> SharedDatabase {
        SharedDatabase::open(&folder.path().join("database"), |_| Ok(())).expect("opens")
    }

    fn put(number: u64) -> impl Fn(&WriteTransaction) -> Result<(), redb::Error> {
        move |write| {
            write.open_table(NUMBERS)?.insert(number, number)?;
            Ok(())
        }
    }

    fn fail(_: &WriteTransaction) -> Result<(), redb::Error> {
        Err(redb::Error::Corrupted(String::from("as a test wants it")))
    }

    fn count(database: &SharedDatabase) -> u64 {
        let read = database.begin_read().expect("reads");
        let table = read.open_table(NUMBERS).expect("opens the table");
        table.len().expect("counts")
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn it_works_again_after_a_failure() {
        let folder = tempfile::tempdir().expect("a folder");
        let database = empty(&folder);
        database.write(put(1)).await.expect("stores");
        database.write(fail).await.expect_err("fails");
        assert!(matches!(*database.state(), State::Failed));
        database.write(put(2)).await.expect("stores again");
        assert_eq!(count(&database), 2);
    }

    #[test]
    fn changes_that_wait_share_a_commit_and_one_that_fails_spoils_no_other() {
        let folder = tempfile::tempdir().expect("a folder");
        let database = empty(&folder);
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let tries = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&tries);
        let counting = move |write: &WriteTransaction| {
            counted.fetch_add(1, Ordering::Relaxed);
            put(1)(write)
        };
        // Nothing is committed as long as the state is held.
        let held = database.state();
        let write = |change: Box<Change>| {
            let shared = database.clone();
            runtime.spawn(async move { shared.write(change).await })
        };
        let first = write(Box::new(counting));
        let failing = write(Box::new(fail));
        let last = write(Box::new(put(2)));
        while database.queue().len() < 3 {
            std::thread::yield_now();
        }
        drop(held);
        runtime.block_on(async {
            first.await.expect("ends").expect("stores");
            failing.await.expect("ends").expect_err("fails");
            last.await.expect("ends").expect("stores");
        });
        assert_eq!(count(&database), 2);
        let tries = tries.load(Ordering::Relaxed);
        assert_eq!(tries, 2, "with the one that fails, and without");
    }
}
