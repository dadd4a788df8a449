//! Connections between queue pairs, and the information about them for each side.

use serde::{Deserialize, Serialize};

use crate::preflight::is_other_end;
use crate::shim::{Connection, HeldPair, PreparedPair, QueuePairState, Recreated};
use crate::tables::Gid;

/// Two connected queue pairs, by the numbers that applications know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link {
    /// The number at the moving process.
    pub ours: u32,
    /// The number at the partner.
    pub theirs: u32,
}

/// A process connected to the moving process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Party {
    /// The process's number at its host.
    pub pid: u32,
    /// The connections with the moving process.
    pub links: Vec<Link>,
}

impl Party {
    /// Returns the numbers of the partner's connected queue pairs.
    pub fn numbers(&self) -> Vec<u32> {
        self.links.iter().map(|link| link.theirs).collect()
    }
}

/// Returns the connections between the moving process's queue pairs and the queue pairs of the process `pid`, if any.
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

/// Returns the number of two-sided requests to receive at each of `to`, one end of every link: the requests that the
/// peer in `from` has sent.
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

/// Returns the new addresses and keys of the moved process for a partner.
///
/// # Errors
/// One sentence if a queue pair is missing or has no address.
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

/// Returns the addresses of this partner for the moved process.
///
/// # Errors
/// One sentence if a queue pair is missing or has no address.
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

/// Returns, ahead of a move, the addresses of the holder's queue pairs for a partner.
///
/// # Errors
/// One sentence if a queue pair is missing or has no address.
pub fn ahead_at_partner(party: &Party, held: &[HeldPair]) -> Result<Vec<Connection>, String> {
    let found = party.links.iter().map(|link| {
        let pair = held.iter().find(|pair| pair.number == link.ours);
        let (local, physical) = pair
            .map(|pair| (pair.local, pair.physical))
            .ok_or_else(|| gone(link.ours))?;
        Ok(Connection {
            number: link.theirs,
            remote: local.ok_or_else(|| nowhere(link.ours))?,
            remote_physical: physical,
            remote_keys: None,
        })
    });
    found.collect()
}

/// Returns the addresses of this partner's prepared queue pairs for the holder.
///
/// # Errors
/// One sentence if a queue pair is missing or has no address.
pub fn ahead_at_holder(
    party: &Party,
    theirs: &[QueuePairState],
    prepared: &[PreparedPair],
) -> Result<Vec<Connection>, String> {
    let found = party.links.iter().map(|link| {
        let (remote, _) = place(theirs, link.theirs)?;
        let pair = prepared.iter().find(|pair| pair.number == link.theirs);
        Ok(Connection {
            number: link.ours,
            remote,
            remote_physical: pair.ok_or_else(|| gone(link.theirs))?.physical,
            remote_keys: None,
        })
    });
    found.collect()
}

fn gone(number: u32) -> String {
    format!("queue pair {number} is gone")
}

fn nowhere(number: u32) -> String {
    format!("queue pair {number} has no address")
}

fn place(pairs: &[QueuePairState], number: u32) -> Result<(Gid, u32), String> {
    let found = pairs.iter().find(|pair| pair.number == number);
    let found = found.ok_or_else(|| gone(number))?;
    let local = found.local;
    let local = local.ok_or_else(|| nowhere(number))?;
    Ok((local, found.physical))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOLDER: Gid = Gid([1; 16]);
    const PARTNER: Gid = Gid([2; 16]);

    fn party() -> Party {
        let link = |ours, theirs| Link { ours, theirs };
        Party {
            pid: 9,
            links: vec![link(17, 40), link(18, 41)],
        }
    }

    fn held(number: u32, local: Option<Gid>) -> HeldPair {
        HeldPair {
            number,
            physical: number + 1000,
            local,
        }
    }

    fn theirs(number: u32) -> QueuePairState {
        QueuePairState {
            number,
            physical: number,
            state: 3,
            reliable_connection: true,
            failed: false,
            local: Some(PARTNER),
            remote: None,
            remote_physical: None,
            sent: 0,
            received: 0,
            receives_outstanding: 0,
            kept: 0,
        }
    }

    fn ways(told: &[Connection]) -> Vec<(u32, Gid, u32)> {
        told.iter()
            .map(|one| (one.number, one.remote, one.remote_physical))
            .collect()
    }

    #[test]
    fn what_is_made_ahead_is_told_of_each_other() {
        let at_holder = [held(18, Some(HOLDER)), held(17, Some(HOLDER))];
        let told = ahead_at_partner(&party(), &at_holder).unwrap();
        assert_eq!(ways(&told), [(40, HOLDER, 1017), (41, HOLDER, 1018)]);
        let prepared = [41, 40].map(|number| PreparedPair {
            number,
            physical: number + 500,
        });
        let told = ahead_at_holder(&party(), &[theirs(40), theirs(41)], &prepared).unwrap();
        assert_eq!(ways(&told), [(17, PARTNER, 540), (18, PARTNER, 541)]);
    }

    #[test]
    fn what_was_not_made_ahead_is_named() {
        let only = [held(17, Some(HOLDER))];
        let error = ahead_at_partner(&party(), &only).unwrap_err();
        assert_eq!(error, "queue pair 18 is gone");
        let unconnected = [held(17, None), held(18, None)];
        let error = ahead_at_partner(&party(), &unconnected).unwrap_err();
        assert_eq!(error, "queue pair 17 has no address");
        let error = ahead_at_holder(&party(), &[theirs(40), theirs(41)], &[]).unwrap_err();
        assert_eq!(error, "queue pair 40 is gone");
    }
}
