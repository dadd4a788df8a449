//! Moves of RDMA processes between guests with `godwit migrate`, as an operator would move them.

use std::io;

use serde::{Deserialize, Serialize};

use super::{Place, RdmaGuest};

/// API socket of the node in a guest.
pub(super) const SOCKET: &str = "/run/godwit/godwit.sock";

/// The parts of a move's time, in milliseconds. From the first suspension to the end, the blackout, the process does
/// nothing with RDMA.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Breakdown {
    /// Release of the device's objects.
    pub dump_rdma: f64,
    /// CRIU's dump.
    pub dump_others: f64,
    /// Transfer of the image.
    pub transfer: f64,
    /// Creation or reuse of the objects, and their connection.
    pub restore_rdma: f64,
    /// CRIU's restore.
    pub full_restore: f64,
    /// Both sides post the held work requests, and go on.
    pub resume: f64,
}

/// The costs of a move.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Moved {
    /// Time from the first suspension until both sides go on, in milliseconds.
    pub blackout_ms: f64,
    /// Parts of the blackout.
    pub breakdown_ms: Breakdown,
    /// Wait-before-stop, in milliseconds: asked for and done.
    #[serde(rename = "wait_ms")]
    pub wbs_ms: f64,
    /// Queue pairs that moved.
    #[serde(rename = "queue_pairs")]
    pub qps: usize,
    /// Bytes sent in all.
    pub image_bytes: u64,
    /// Bytes of them copied while the process worked.
    pub pre_copied_bytes: u64,
    pub pre_copy_rounds: u32,
    /// Time of pre-setup while the process ran, in milliseconds; `None` without pre-setup.
    pub pre_setup_ms: Option<f64>,
    /// Warnings of the node, such as about an unused object made ahead.
    pub warnings: Vec<String>,
}

/// The node's answer to a refused request.
#[derive(Debug, Deserialize)]
pub struct Refused {
    /// The refusal in words.
    pub message: String,
}

/// A move, as the source's node shows it.
#[derive(Debug, Deserialize)]
pub struct MoveSeen {
    id: String,
    pub phase: String,
    /// Reason for an end without a move of the process.
    pub error: Option<Refused>,
}

impl MoveSeen {
    pub fn ended(&self) -> bool {
        matches!(self.phase.as_str(), "completed" | "aborted")
    }
}

/// Moves the process of `from` to `to`, with `alias` (an address and a prefix length) and the file `carried`, written
/// without a leading slash. With `pre_setup` the device's objects are made ahead of the process.
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

/// Begins a move as [`move_process`] does; returns its id.
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

/// Begins a move as [`move_container`] does; returns its id.
pub fn detach_container_move(
    from: &RdmaGuest,
    id: &str,
    to: &RdmaGuest,
    alias: &str,
    carried: &str,
) -> io::Result<String> {
    let more = format!("--address {alias} --file {carried} --detach");
    let what = format!("migrate container/{id}");
    let begun: MoveSeen = serde_json::from_str(&ask_to(from, &what, to, &more)?)?;
    Ok(begun.id)
}

/// Returns the current state of a move.
pub fn see_move(source: &RdmaGuest, id: &str) -> io::Result<MoveSeen> {
    let said = source.must(&format!(
        "godwit --socket {SOCKET} --json migration list 2>&1"
    ))?;
    let moves: Vec<MoveSeen> = serde_json::from_str(&said)?;
    let found = moves.into_iter().find(|seen| seen.id == id);
    found.ok_or_else(|| io::Error::other(format!("the node knows no move {id}")))
}

/// Moves the container `id` under runc from `from` to `to`, with the address `alias` and the file `carried`.
pub fn move_container(
    from: &RdmaGuest,
    id: &str,
    to: &RdmaGuest,
    alias: Option<&str>,
    carried: &str,
) -> io::Result<Moved> {
    let address = alias.map_or_else(String::new, |alias| format!("--address {alias} "));
    let more = format!("{address}--file {carried}");
    let what = format!("migrate container/{id}");
    Ok(serde_json::from_str(&ask_to(from, &what, to, &more)?)?)
}

/// Moves the process of a control group from `from` to `to`, with the address `alias` and the file `carried`.
pub fn move_control_group(
    from: &RdmaGuest,
    group: &str,
    to: &RdmaGuest,
    alias: &str,
    carried: &str,
) -> io::Result<Moved> {
    let more = format!("--address {alias} --file {carried}");
    let what = format!("migrate --cgroup {group}");
    Ok(serde_json::from_str(&ask_to(from, &what, to, &more)?)?)
}

/// Asks for a move of a process; returns the command's JSON.
fn migrate(from: Place<'_>, to: &RdmaGuest, more: &str) -> io::Result<String> {
    ask_to(
        from.guest,
        &format!("migrate process/{}", from.pid),
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

/// Returns all of the node's reasons against a move of `from` to `to`, one sentence each.
pub fn preflight(from: Place<'_>, to: &RdmaGuest) -> io::Result<Vec<String>> {
    // The output file goes along, as in a move.
    reasons(migrate(from, to, "--file /run/server.log"))
}

/// Returns all of the node's reasons against a move of the container `id` to `to`, one sentence each.
pub fn preflight_container(from: &RdmaGuest, id: &str, to: &RdmaGuest) -> io::Result<Vec<String>> {
    reasons(ask_to(from, &format!("migrate container/{id}"), to, ""))
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
