//! The obstacles to a move, all at once, and the partners of the process.

use std::path::Path;

use godwit_verbs::control::Status;
use godwit_verbs::mover::{Party, ends_of};
use godwit_verbs::preflight::against;

use super::chosen::Chosen;
use super::reach::{ANSWER, Reach};
use crate::Processes;
use crate::host::address::OwnAddress;
use crate::host::checks::unmovable;
use crate::host::{criu, family, runc, tcp};
use crate::images;
use crate::incoming::serve;
use crate::messages::{Answer, Ask};
use godwit_context::blocking;

/// The findings before a move.
#[derive(Debug)]
pub(crate) struct Found {
    pub status: Option<Status>,
    /// The partners, each with the partner's node.
    pub partners: Vec<(String, Party)>,
    pub(crate) layout: Option<String>,
    /// All obstacles, one sentence each.
    pub(crate) reasons: Vec<String>,
}

/// The facts about a process without obstacles.
#[derive(Debug)]
pub(crate) struct Clear {
    pub(crate) queue_pairs: usize,
    /// True if any queue pair is for datagrams.
    pub(crate) datagrams: bool,
    /// The partners, each with the partner's node.
    pub partners: Vec<(String, Party)>,
    pub(crate) layout: String,
}

impl Found {
    /// Returns the facts for the move if there is no obstacle.
    ///
    /// # Errors
    /// All obstacles in one text.
    pub(crate) fn clear(self, name: &str, to: &str) -> Result<Clear, String> {
        match (self.status, self.layout, self.reasons.is_empty()) {
            (Some(status), Some(layout), true) => Ok(Clear {
                queue_pairs: status.queue_pairs.len(),
                datagrams: status
                    .queue_pairs
                    .iter()
                    .any(|pair| !pair.reliable_connection),
                partners: self.partners,
                layout,
            }),
            _ => Err(format!(
                "{name} cannot move to node '{to}':\n  {}",
                self.reasons.join("\n  ")
            )),
        }
    }
}

/// Inspects the process, the destination, and every node with possible partners.
pub(crate) async fn look(
    processes: &Processes,
    reach: &mut Reach,
    chosen: &Chosen,
    to: &str,
    address: Option<&OwnAddress>,
    files: &[String],
) -> Found {
    let pid = chosen.pid;
    let all = match &chosen.container {
        // A container that has ended has no members; another check reports the end.
        Some(container) => runc::members(container.init).unwrap_or_default(),
        None => family::family(pid),
    };
    let seen = blocking({
        let all = all.clone();
        move || unmovable::look(&all)
    });
    let seen = seen.await.unwrap_or_default();
    if seen.stopped {
        // The library of a stopped process cannot answer.
        return Found {
            status: None,
            partners: Vec::new(),
            layout: None,
            reasons: seen.reasons,
        };
    }
    let status = if chosen.plain {
        Some(Status {
            queue_pairs: Vec::new(),
            obstacles: Vec::new(),
            needs: Vec::new(),
        })
    } else {
        crate::status(pid).await.ok()
    };
    let ours = status
        .as_ref()
        .map_or(&[][..], |status| &status.queue_pairs);
    let (mut partners, mut theirs, mut reasons, mut unasked) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let own = &processes.context.config.name;
    let names = processes.context.config.peers.iter().map(|peer| &peer.name);
    let connected = ours.iter().filter(|pair| pair.remote.is_some()).count();
    for name in names.chain([own]) {
        if connected == 0 {
            break;
        }
        let ours = ours.to_vec();
        match reach
            .ask(name, Ask::Find { ours: ours.clone() }, ANSWER)
            .await
        {
            Ok(Answer::Found(found)) => {
                for process in found {
                    let pairs = process.status.queue_pairs;
                    // A node's answer is checked against the process's own knowledge of its peers.
                    if let Some(party) = ends_of(&ours, process.pid, &pairs) {
                        partners.push((name.clone(), party));
                        theirs.extend(pairs);
                    }
                }
            }
            Ok(_) => unasked.push(format!("node '{name}' gave an answer to another question")),
            Err(trouble) => unasked.push(trouble.into_text()),
        }
    }
    if partners
        .iter()
        .any(|(name, party)| name == own && party.pid == pid)
    {
        reasons.push(format!("process {pid} is connected to itself"));
    }
    reasons.extend(chosen.reasons.iter().cloned());
    reasons.extend(seen.reasons);
    // The files of a container are in its bundle.
    let mut needs = match chosen.container {
        Some(_) => Vec::new(),
        None => Vec::from_iter(seen.files),
    };
    needs.retain(|path| !files.contains(path));
    needs.truncate(unmovable::MOST_FILES);
    let asked = Ask::Look {
        pid,
        container: chosen.container.clone(),
        address: address.cloned(),
        files: files.to_vec(),
        needs,
    };
    match reach.ask(to, asked, ANSWER).await {
        Ok(Answer::Looked {
            offer,
            reasons: more,
        }) => {
            reasons.extend(against(pid, status.as_ref(), &offer, &theirs));
            reasons.extend(more);
        }
        Ok(_) => reasons.push(format!("node '{to}' gave an answer to another question")),
        Err(trouble) => {
            let found = against(pid, status.as_ref(), &Default::default(), &theirs);
            // The destination's resources are unknown.
            let known = found
                .into_iter()
                .filter(|reason| !reason.contains("the destination"));
            reasons.extend(known);
            reasons.push(trouble.into_text());
        }
    }
    let reached: usize = partners.iter().map(|(_, party)| party.links.len()).sum();
    if reached < connected {
        // A partner may be on a node that gave no answer.
        reasons.extend(unasked);
    }
    reasons.extend(at_source(files).await);
    for one in all {
        reasons.extend(tcp::reasons(one, address.map(|own| own.address)));
    }
    let layout = criu::layout(pid).unwrap_or_default();
    if layout.is_none() {
        reasons.push(format!(
            "process {pid} does not run, or its layout in memory cannot be read"
        ));
    }
    reasons.dedup();
    Found {
        status,
        partners,
        layout,
        reasons,
    }
}

/// Returns the obstacles at this host.
async fn at_source(files: &[String]) -> Vec<String> {
    let mut reasons = Vec::new();
    match serve::look(Vec::new()).await {
        Ok(offer) => reasons.extend(
            offer
                .criu
                .map(|why| format!("CRIU cannot dump here: {why}")),
        ),
        Err(error) => reasons.push(error),
    }
    for path in files {
        reasons.extend(images::open_plain(Path::new(path)).err());
    }
    reasons
}
