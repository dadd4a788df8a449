//! Moves of RDMA processes between guests: `godwit process migrate`, as an operator would.

use std::io;

use serde::{Deserialize, Serialize};

use super::{Place, RdmaGuest};

/// How `godwit` reaches the node of its guest.
pub(super) const SOCKET: &str = "/run/godwit/godwit.sock";

/// Where the time of a move went, in milliseconds. The process does nothing with RDMA from the first
/// suspension to the end: that is the blackout.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Breakdown {
    /// Giving the device's objects back.
    pub dump_rdma: f64,
    /// CRIU's dump.
    pub dump_others: f64,
    /// The image on its way.
    pub transfer: f64,
    /// Making the objects again, or taking what was made ahead, and connecting them.
    pub restore_rdma: f64,
    /// CRIU's restore.
    pub full_restore: f64,
    /// Both sides post what was kept back, and go on.
    pub resume: f64,
}

/// What a move took.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Moved {
    /// From the first suspension until both sides go on, in milliseconds.
    pub blackout_ms: f64,
    /// Its parts.
    pub breakdown_ms: Breakdown,
    /// Wait-before-stop, in milliseconds: asked for and done.
    #[serde(rename = "wait_ms")]
    pub wbs_ms: f64,
    /// Queue pairs that moved.
    #[serde(rename = "queue_pairs")]
    pub qps: usize,
    /// Bytes that were sent in all.
    pub image_bytes: u64,
    /// Bytes of them that were copied while the process worked.
    pub pre_copied_bytes: u64,
    /// In so many rounds.
    pub pre_copy_rounds: u32,
    /// How long pre-setup took while the process ran, in milliseconds; nothing without it.
    pub pre_setup_ms: Option<f64>,
    /// What the node warned of, such as that something made ahead was not used.
    pub warnings: Vec<String>,
}

/// What a node says when it refuses.
#[derive(Debug, Deserialize)]
pub struct Refused {
    /// In words.
    pub message: String,
}

/// A move, as the source's node shows it.
#[derive(Debug, Deserialize)]
pub struct MoveSeen {
    id: String,
    /// What it does.
    pub phase: String,
    /// Why it ended without moving the process.
    pub error: Option<Refused>,
}

impl MoveSeen {
    /// Whether it has ended.
    pub fn ended(&self) -> bool {
        matches!(self.phase.as_str(), "completed" | "aborted")
    }
}

/// Moves `from`'s process to `to`, with `alias` (an address and its length) and the file `carried`, which has no slash in
/// front; with `pre_setup` the device's objects are made ahead of it.
///
/// # Errors
/// What the node says, also of a process that moved without what was to be made ahead of it.
pub fn move_process(
    from: Place<'_>,
    to: &RdmaGuest,
    alias: &str,
    carried: &str,
    pre_setup: bool,
) -> io::Result<Moved> {
    let bare = alias.split('/').next().unwrap_or(alias);
    let ahead = if pre_setup { " --pre-setup" } else { "" };
    let more = format!("--address {bare} --file /{carried}{ahead}");
    let moved: Moved = serde_json::from_str(&migrate(from, to, &more)?)?;
    if moved.warnings.is_empty() {
        Ok(moved)
    } else {
        Err(io::Error::other(moved.warnings.join("; ")))
    }
}

/// Begins a move as [`move_process`] does; gives its id.
///
/// # Errors
/// What the node says.
pub fn detach_move(
    from: Place<'_>,
    to: &RdmaGuest,
    alias: &str,
    carried: &str,
) -> io::Result<String> {
    let bare = alias.split('/').next().unwrap_or(alias);
    let more = format!("--address {bare} --file /{carried} --detach");
    let begun: MoveSeen = serde_json::from_str(&migrate(from, to, &more)?)?;
    Ok(begun.id)
}

/// Begins a move as [`move_container`] does; gives its id.
///
/// # Errors
/// What the node says.
pub fn detach_container_move(
    from: &RdmaGuest,
    id: &str,
    to: &RdmaGuest,
    alias: &str,
    carried: &str,
) -> io::Result<String> {
    let more = format!("--address {alias} --file {carried} --detach");
    let what = format!("container migrate {id}");
    let begun: MoveSeen = serde_json::from_str(&ask_to(from, &what, to, &more)?)?;
    Ok(begun.id)
}

/// A move as it is now.
///
/// # Errors
/// The node does not answer, or does not know it.
pub fn see_move(source: &RdmaGuest, id: &str) -> io::Result<MoveSeen> {
    let said = source.must(&format!(
        "godwit --socket {SOCKET} --json process moves 2>&1"
    ))?;
    let moves: Vec<MoveSeen> = serde_json::from_str(&said)?;
    let found = moves.into_iter().find(|seen| seen.id == id);
    found.ok_or_else(|| io::Error::other(format!("the node knows no move {id}")))
}

/// Moves the container `id` under runc from `from` to `to`, with the address `alias` and the file `carried`.
///
/// # Errors
/// What the node says.
pub fn move_container(
    from: &RdmaGuest,
    id: &str,
    to: &RdmaGuest,
    alias: Option<&str>,
    carried: &str,
) -> io::Result<Moved> {
    let address = alias.map_or_else(String::new, |alias| format!("--address {alias} "));
    let more = format!("{address}--file {carried}");
    let what = format!("container migrate {id}");
    Ok(serde_json::from_str(&ask_to(from, &what, to, &more)?)?)
}

/// Moves the process that a control group stands for from `from` to `to`, with the address `alias` and the file `carried`.
///
/// # Errors
/// What the node says.
pub fn move_control_group(
    from: &RdmaGuest,
    group: &str,
    to: &RdmaGuest,
    alias: &str,
    carried: &str,
) -> io::Result<Moved> {
    let more = format!("--address {alias} --file {carried}");
    let what = format!("process migrate --cgroup {group}");
    Ok(serde_json::from_str(&ask_to(from, &what, to, &more)?)?)
}

/// Asks for a move of a process; gives what the command prints as JSON.
fn migrate(from: Place<'_>, to: &RdmaGuest, more: &str) -> io::Result<String> {
    ask_to(
        from.guest,
        &format!("process migrate {}", from.pid),
        to,
        more,
    )
}

fn ask_to(from: &RdmaGuest, what: &str, to: &RdmaGuest, more: &str) -> io::Result<String> {
    let output = from.run(&format!(
        "godwit --socket {SOCKET} --json {what} --to g{} {more} 2>/run/move.error || \
         {{ status=$?; cat /run/move.error; exit $status; }}",
        to.number()
    ))?;
    if output.status == 0 {
        return Ok(output.text);
    }
    // Progress comes before the error.
    let error = output.text.find('{').map(|at| &output.text[at..]);
    let refused = error.and_then(|text| serde_json::from_str::<Refused>(text).ok());
    Err(io::Error::other(
        refused.map_or(output.text, |refused| refused.message),
    ))
}

/// All reasons against a move of `from` to `to`, one sentence each, as the node names them.
///
/// # Errors
/// If the node names none.
pub fn preflight(from: Place<'_>, to: &RdmaGuest) -> io::Result<Vec<String>> {
    // Its output goes along, as in a move.
    reasons(migrate(from, to, "--file /run/server.log"))
}

/// All reasons against a move of the container `id` to `to`, one sentence each, as the node names them.
///
/// # Errors
/// If the node names none.
pub fn preflight_container(from: &RdmaGuest, id: &str, to: &RdmaGuest) -> io::Result<Vec<String>> {
    reasons(ask_to(from, &format!("container migrate {id}"), to, ""))
}

fn reasons(said: io::Result<String>) -> io::Result<Vec<String>> {
    match said {
        Ok(said) => Err(io::Error::other(format!("it moved: {said}"))),
        Err(error) => {
            let text = error.to_string();
            let (head, reasons) = text.split_once('\n').unwrap_or((&text, ""));
            if head.contains("cannot move to node") {
                Ok(reasons.lines().map(|line| line.trim().to_owned()).collect())
            } else {
                Err(error)
            }
        }
    }
}
