//! The start of every system test: a turn, a seed, and disks under a checked load.

use std::io;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use godwit_core::POLICIES;
use serde_json::Value;

use crate::client::{Initial, Model, Outcome, Verified, VerifyingClient, Workload};
use crate::cluster::{Cluster, Failure, Node};
use crate::nbd::NbdConnection;
use crate::process::wait_for;
use crate::random::seed;

/// Longest time for any expected event on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Returns the names of all policies of a disk's move.
pub fn policies() -> impl Iterator<Item = &'static str> {
    POLICIES.into_iter().map(|policy| policy.name)
}

/// Turns of one program's tests at a time. `cargo test` runs as many threads as the machine has processors.
const TURNS: usize = 2;

/// Number of turns taken, and the condition variable for its changes.
static TAKEN: (Mutex<usize>, Condvar) = (Mutex::new(0), Condvar::new());

/// A system test's turn.
#[derive(Debug)]
pub struct Scenario {
    /// Seed of the test's random choices.
    pub seed: u64,
    turns: usize,
}

impl Scenario {
    /// Waits for the turn of a test that measures time, or works the machine hard: no other test runs beside it. Prints
    /// the command to repeat the test (shown when the test fails).
    pub fn alone() -> Self {
        Self::take(TURNS)
    }

    /// Does the same for a test that mostly waits: another such test may run beside it.
    pub fn shared() -> Self {
        Self::take(1)
    }

    fn take(turns: usize) -> Self {
        let (taken, changed) = &TAKEN;
        let before = taken.lock().unwrap_or_else(PoisonError::into_inner);
        let before = changed.wait_while(before, |taken| *taken + turns > TURNS);
        *before.unwrap_or_else(PoisonError::into_inner) += turns;
        let seed = seed(1);
        // Cargo names a program FILE-HASH, and the harness a thread after its test.
        let program = std::env::current_exe().unwrap_or_default();
        let program = program.file_stem().unwrap_or_default().to_string_lossy();
        let file = program.rsplit_once('-').map_or(&*program, |(file, _)| file);
        let thread = std::thread::current();
        let test = thread.name().unwrap_or_default();
        println!("repeat: GODWIT_SEED={seed} cargo test -p godwit-testkit --test {file} -- {test}");
        Self { seed, turns }
    }

    /// Starts nodes with TLS.
    #[track_caller]
    pub fn start(self, names: &[&str]) -> (Self, Cluster) {
        let cluster = Cluster::start(names);
        (self, cluster.unwrap_or_else(|error| panic!("{error}")))
    }

    /// Starts nodes `a` and `b`, and a disk with the model's pattern at `a`.
    #[track_caller]
    pub fn with_disk(self, disk: &str, bytes: u64) -> (Self, Cluster, Model) {
        let (turn, cluster) = self.start(&["a", "b"]);
        let model = import_pattern(cluster.node("a"), disk, bytes, turn.seed);
        (turn, cluster, model.expect("a disk"))
    }

    /// Does the same with a checking guest on the disk.
    #[track_caller]
    pub fn under_load(self, disk: &str, bytes: u64) -> (Self, Cluster, VerifyingClient) {
        let (turn, cluster, model) = self.with_disk(disk, bytes);
        let client = load(cluster.node("a"), disk, turn.seed, model);
        (turn, cluster, client.expect("a client"))
    }
}

impl Drop for Scenario {
    fn drop(&mut self) {
        let (taken, changed) = &TAKEN;
        *taken.lock().unwrap_or_else(PoisonError::into_inner) -= self.turns;
        changed.notify_all();
    }
}

/// Expects a text to have all of these words.
#[track_caller]
pub fn says(text: &str, words: &[&str]) {
    for words in words {
        assert!(text.contains(words), "'{words}' is not in: {text}");
    }
}

/// Returns the other one of the nodes `a` and `b`.
pub fn other(node: &str) -> &'static str {
    if node == "a" { "b" } else { "a" }
}

/// Waits until something is so.
#[track_caller]
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let reached = wait_for(PATIENCE, || is_so().then_some(()));
    assert!(reached.is_some(), "not in time: {what}");
}

/// Creates a disk of `bytes` bytes at the node, filled with the model's pattern.
pub fn import_pattern(node: &Node, disk: &str, bytes: u64, seed: u64) -> io::Result<Model> {
    let model = Model::new(seed, bytes, Initial::Pattern);
    let image = node.spec().dir.with_file_name(format!("{disk}.import"));
    model.write_image(&image)?;
    node.godwit(&["disk", "import", disk, &image.to_string_lossy()])
        .json()?;
    std::fs::remove_file(image)?;
    Ok(model)
}

/// Starts a checking guest on the node's disk, at a rate low enough to leave room for everything else.
pub fn load(node: &Node, disk: &str, seed: u64, model: Model) -> io::Result<VerifyingClient> {
    let workload = Workload::new(seed).rate(Some(1500));
    VerifyingClient::start(&node.nbd(disk), &workload, model)
}

/// Reads the whole disk at the node and verifies the content.
pub fn verify(node: &Node, disk: &str, model: &mut Model) -> Result<Verified, String> {
    let mut connection = NbdConnection::connect(&node.nbd(disk))
        .map_err(|error| format!("cannot attach at '{}': {error}", node.name()))?;
    model.verify_all(&mut connection)
}

/// Ends the load. The load must have lasted until now, without a failed or wrong request.
pub fn finish(client: VerifyingClient) -> Result<Model, String> {
    let Outcome { model, stats, end } = client.stop(PATIENCE);
    if end != crate::client::End::Stopped {
        return Err(format!("the client lost its server: {end:?}"));
    }
    Outcome { model, stats, end }.clean()
}

/// Ends the load, of which no request may have failed, and verifies the whole disk at the node.
#[track_caller]
pub fn ends_well(client: VerifyingClient, node: &Node, disk: &str) {
    let verified = finish(client).and_then(|mut model| verify(node, disk, &mut model));
    verified.unwrap_or_else(|error| panic!("{error}"));
}

/// Moves the disk and waits until the move is done.
pub fn migrate(from: &Node, disk: &str, to: &str, more: &[&str]) -> Result<Value, Failure> {
    let mut args = vec!["migrate", disk, "--to", to];
    args.extend(more);
    from.godwit(&args).json()
}

/// Moves the disk. The move has to be completed, and to have compared the disk if it was to.
#[track_caller]
pub fn moves(from: &Node, disk: &str, to: &str, more: &[&str]) -> Value {
    let moved = migrate(from, disk, to, more).unwrap_or_else(|failure| panic!("{failure}"));
    assert_eq!(moved["phase"], "completed", "{moved}");
    assert!(
        !more.contains(&"--verify") || moved["verified"] == true,
        "{moved}"
    );
    moved
}

/// Starts to move the disk; returns the migration's id.
pub fn start_migration(
    from: &Node,
    disk: &str,
    to: &str,
    more: &[&str],
) -> Result<String, Failure> {
    let mut args = vec!["--detach"];
    args.extend(more);
    let answer = migrate(from, disk, to, &args)?;
    let id = answer["id"].as_str().map(str::to_owned);
    id.ok_or_else(|| Failure {
        line: format!("godwit migrate {disk} --to {to} --detach"),
        code: Some(0),
        text: format!("no id in {answer}"),
    })
}

/// Returns the node's view of the migration; null if the node does not know the migration.
pub fn migration(node: &Node, id: &str) -> Value {
    node.godwit(&["migration", "show", id])
        .json()
        .unwrap_or(Value::Null)
}

/// Waits until the disk's owner has all of the disk and the source knows so.
pub fn becomes_whole(owner: &Node, source: &Node, disk: &str) {
    let whole = || {
        let (here, there) = (owner.disk(disk).ok()?, source.disk(disk).ok()?);
        (here["missing_bytes"].is_null() && there["owes"] == false).then_some(())
    };
    assert!(
        wait_for(PATIENCE, whole).is_some(),
        "at its owner: {:?}; at its source: {:?}",
        owner.disk(disk),
        source.disk(disk)
    );
}

/// Waits until the migration has ended. Returns the node's view of the migration then; null if there is no end.
pub fn await_end(node: &Node, id: &str) -> Value {
    let ended = || {
        let shown = migration(node, id);
        let over = ["completed", "aborted"]
            .iter()
            .any(|phase| shown["phase"] == *phase);
        over.then_some(shown)
    };
    wait_for(PATIENCE, ended).unwrap_or(Value::Null)
}

/// Waits until the migration has ended in this phase. Returns the node's view of the migration then.
#[track_caller]
pub fn ends(node: &Node, id: &str, phase: &str) -> Value {
    let ended = await_end(node, id);
    assert_eq!(ended["phase"], phase, "{ended}");
    ended
}

/// Waits until exactly one of the nodes `a` and `b` owns and serves the disk; returns the owner's name.
pub fn one_owner(cluster: &Cluster, disk: &str) -> Result<&'static str, String> {
    let started = Instant::now();
    loop {
        let shown = ["a", "b"].map(|name| cluster.node(name).disk(disk).ok());
        let serves = shown.each_ref().map(|disk| {
            disk.as_ref()
                .is_some_and(|disk| disk["serves"] == true && disk["state"] == "serving")
        });
        let open = shown.iter().flatten().any(|disk| {
            ["accepted", "relinquished", "receiving"]
                .iter()
                .any(|state| disk["state"] == *state)
        });
        match serves {
            [true, true] => return Err(format!("two nodes serve: {shown:?}")),
            [true, false] if !open => return Ok("a"),
            [false, true] if !open => return Ok("b"),
            _ => {}
        }
        if started.elapsed() > PATIENCE {
            return Err(format!("no owner was found: {shown:?}"));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}
