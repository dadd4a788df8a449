//! Which queue pair is connected to which, and what each side is told of the other.

use serde::{Deserialize, Serialize};

use crate::preflight::is_other_end;
use crate::shim::{Connection, QueuePairState, Recreated};

/// Two queue pairs that are connected, by the numbers that applications know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link {
    /// The moving process's.
    pub ours: u32,
    /// The partner's.
    pub theirs: u32,
}

/// A process that the moving one is connected to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Party {
    /// Its number at its host.
    pub pid: u32,
    /// Its connections with the moving process.
    pub links: Vec<Link>,
}

impl Party {
    /// Its queue pairs that are concerned.
    pub fn numbers(&self) -> Vec<u32> {
        self.links.iter().map(|link| link.theirs).collect()
    }
}

/// The connections between the moving process's queue pairs and those of the process `pid`; nothing if there is none.
pub fn ends_of(ours: &[QueuePairState], pid: u32, theirs: &[QueuePairState]) -> Option<Party> {
    let links: Vec<Link> = ours
        .iter()
        .filter(|pair| pair.remote.is_some())
        .filter_map(|pair| {
            let other = theirs.iter().find(|other| is_other_end(pair, other))?;
            Some(Link {
                ours: pair.number,
                theirs: other.number,
            })
        })
        .collect();
    (!links.is_empty()).then_some(Party { pid, links })
}

/// What each of `to` (one end of every link) has to receive: what its peer in `from` has sent.
pub fn peer_sent(
    links: impl Iterator<Item = (u32, u32)>,
    from: &[QueuePairState],
) -> Vec<(u32, u32)> {
    links
        .map(|(to, peer)| {
            let sent = from.iter().find(|pair| pair.number == peer);
            (to, sent.map_or(0, |pair| pair.sent))
        })
        .collect()
}

/// What a partner is told: where the process that moved is now, and its keys.
///
/// # Errors
/// One sentence if a queue pair is missing, or has no address.
pub fn at_partner(party: &Party, moved: &Recreated) -> Result<Vec<Connection>, String> {
    let found = party.links.iter().map(|link| {
        let (remote, remote_physical) = place(&moved.queue_pairs, link.ours)?;
        Ok(Connection {
            number: link.theirs,
            remote,
            remote_physical,
            remote_keys: Some(moved.remote_keys.clone()),
        })
    });
    found.collect()
}

/// What the process that moved is told: where this partner is.
///
/// # Errors
/// One sentence if a queue pair is missing, or has no address.
pub fn at_moved(party: &Party, theirs: &[QueuePairState]) -> Result<Vec<Connection>, String> {
    let found = party.links.iter().map(|link| {
        let (remote, remote_physical) = place(theirs, link.theirs)?;
        Ok(Connection {
            number: link.ours,
            remote,
            remote_physical,
            remote_keys: None,
        })
    });
    found.collect()
}

fn place(pairs: &[QueuePairState], number: u32) -> Result<(crate::tables::Gid, u32), String> {
    let found = pairs.iter().find(|pair| pair.number == number);
    let found = found.ok_or_else(|| format!("queue pair {number} is gone"))?;
    let local = found.local;
    let local = local.ok_or_else(|| format!("queue pair {number} has no address"))?;
    Ok((local, found.physical))
}
