//! The start of every system test: a turn, a seed, and disks under a checked load.

use std::io;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::client::{Initial, Model, Outcome, Verified, VerifyingClient, Workload};
use crate::cluster::{Cluster, Failure, Node};
use crate::nbd::NbdConnection;
use crate::process::wait_for;
use crate::random::seed;

/// Longest time for any expected event on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Number of running tests, and the condition variable for its changes.
static RUNNING: (Mutex<usize>, Condvar) = (Mutex::new(0), Condvar::new());

/// A system test's turn. Most tests need the machine for themselves, so one runs at a time.
#[derive(Debug)]
pub struct Scenario {
    /// Seed of the test's random choices.
    pub seed: u64,
}

impl Scenario {
    /// Waits for the turn and prints the command to repeat the test (shown when the test fails).
    pub fn begin(file: &str, test: &str) -> Self {
        Self::among(1, file, test)
    }

    /// Does the same for a test that mostly waits: up to `most` tests of the file run at once. All tests of a file must
    /// give the same number.
    pub fn among(most: usize, file: &str, test: &str) -> Self {
        let (running, changed) = &RUNNING;
        let turns = running.lock().unwrap_or_else(PoisonError::into_inner);
        let turns = changed.wait_while(turns, |running| *running >= most);
        *turns.unwrap_or_else(PoisonError::into_inner) += 1;
        let seed = seed(1);
        println!("repeat: GODWIT_SEED={seed} cargo test -p godwit-testkit --test {file} -- {test}");
        Self { seed }
    }
}

impl Drop for Scenario {
    fn drop(&mut self) {
        let (running, changed) = &RUNNING;
        *running.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        changed.notify_one();
    }
}

/// Creates a disk of `bytes` bytes at the node, filled with the model's pattern.
///
/// # Errors
/// If the image cannot be made or imported.
pub fn import_pattern(node: &Node, disk: &str, bytes: u64, seed: u64) -> io::Result<Model> {
    let model = Model::new(seed, bytes, Initial::Pattern);
    let image = node.spec().dir.with_file_name(format!("{disk}.import"));
    model.write_image(&image)?;
    node.godwit(&["disk", "import", disk, &image.to_string_lossy()])
        .json()?;
    std::fs::remove_file(image)?;
    Ok(model)
}

/// Runs a machine without an operating system on the node, with a new disk of 16 MiB and `words` as further arguments
/// of QEMU.
///
/// # Errors
/// If the disk cannot be made, or the machine not started.
pub fn run_small_machine(node: &Node, machine: &str, disk: &str, words: &[&str]) -> io::Result<()> {
    node.godwit(&["disk", "create", disk, "--size", "16MiB"])
        .json()?;
    let run = ["vm", "run", machine, "--accel", "tcg", "--memory", "64M"];
    let rest = ["--disk", disk, "--", "-nic", "none"];
    node.godwit(&[&run[..], &rest[..], words].concat()).json()?;
    Ok(())
}

/// Starts a checking guest on the node's disk, at a rate low enough to leave room for everything else.
///
/// # Errors
/// If the client cannot connect.
pub fn load(node: &Node, disk: &str, seed: u64, model: Model) -> io::Result<VerifyingClient> {
    let workload = Workload::new(seed).rate(Some(1500));
    VerifyingClient::start(&node.nbd(disk), &workload, model)
}

/// Reads the whole disk at the node and verifies the content.
///
/// # Errors
/// A description of the first mismatch or failure.
pub fn verify(node: &Node, disk: &str, model: &mut Model) -> Result<Verified, String> {
    let mut connection = NbdConnection::connect(&node.nbd(disk))
        .map_err(|error| format!("cannot attach at '{}': {error}", node.name()))?;
    model.verify_all(&mut connection)
}

/// Ends the load. The load must have lasted until now, without a failed or wrong request.
///
/// # Errors
/// A description of the failure.
pub fn finish(client: VerifyingClient) -> Result<Model, String> {
    let Outcome { model, stats, end } = client.stop(PATIENCE);
    if end != crate::client::End::Stopped {
        return Err(format!("the client lost its server: {end:?}"));
    }
    Outcome { model, stats, end }.clean()
}

/// Moves the disk and waits until the move is done.
///
/// # Errors
/// If the command fails.
pub fn migrate(from: &Node, disk: &str, to: &str, more: &[&str]) -> Result<Value, Failure> {
    let mut args = vec!["migrate", disk, "--to", to];
    args.extend(more);
    from.godwit(&args).json()
}

/// Starts to move the disk; returns the migration's id.
///
/// # Errors
/// If the command fails or prints no id.
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
///
/// # Panics
/// If the wait takes longer than [`PATIENCE`].
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

/// Waits until exactly one of the nodes `a` and `b` owns and serves the disk; returns the owner's name.
///
/// # Errors
/// If both nodes serve at the same time, or neither does in the end.
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
