//! Nodes that meet show each other what they have, and which records they have of it. An owner that finds that another node
//! has had the same disk or machine since holds it, and says why: its data directory was put back to an earlier state, or an
//! operator claimed there what is still here.
//!
//! Whoever asks names what it owns, by id and in batches, and is answered with what the other node knows of that. Both
//! judge: each only itself, and always by its present record, because what it hears may be old.

mod disks;
mod machines;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use godwit_core::authority::{AuthorityRecord, Ownership};
use godwit_core::units::{Epoch, MigrationId};
use serde::{Deserialize, Serialize};

use crate::node::Node;
use crate::peers::{PeerConnection, framed};

pub(crate) use self::machines::look_at_memory;

/// Records of a message.
const BATCH: usize = 256;
/// Messages of a comparison: more than a node has disks and machines.
const MOST_BATCHES: usize = 32;
/// Longest message in bytes.
const LONGEST: u32 = 64 << 10;
/// How long each message may take.
const WITHIN: Duration = Duration::from_secs(5);

/// What a node has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Disk,
    Machine,
}

/// Its part in that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Part {
    Vacant,
    Serving,
    Accepted,
    Relinquished,
    Departed,
}

/// The record of one disk or machine, as it is shown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Shown {
    kind: Kind,
    /// Its id, in hexadecimal.
    id: String,
    epoch: u64,
    part: Part,
}

impl Shown {
    fn new(kind: Kind, id: String, record: &AuthorityRecord) -> Self {
        let part = match record.ownership {
            Ownership::Vacant => Part::Vacant,
            Ownership::Serving => Part::Serving,
            Ownership::Accepted { .. } => Part::Accepted,
            Ownership::Relinquished { .. } => Part::Relinquished,
            Ownership::Departed { .. } => Part::Departed,
        };
        Self {
            kind,
            id,
            epoch: record.epoch.0,
            part,
        }
    }

    /// The record, without what is not shown: migrations.
    fn record(&self) -> AuthorityRecord {
        record(self.epoch, self.part)
    }
}

fn record(epoch: u64, part: Part) -> AuthorityRecord {
    let migration = MigrationId::default();
    AuthorityRecord {
        epoch: Epoch(epoch),
        ownership: match part {
            Part::Vacant => Ownership::Vacant,
            Part::Serving => Ownership::Serving,
            Part::Accepted => Ownership::Accepted { migration },
            Part::Relinquished => Ownership::Relinquished { migration },
            Part::Departed => Ownership::Departed { migration },
        },
        remainder: None,
    }
}

/// Compares what both nodes have, on a connection whose welcome agreed on that.
///
/// # Errors
/// The connection fails, or what comes makes no sense.
pub(crate) async fn compare(
    node: &Arc<Node>,
    peer: &str,
    mut connection: PeerConnection,
) -> io::Result<()> {
    let mut owned = disks::owned(node);
    owned.extend(machines::owned(node));
    for batch in owned.chunks(BATCH) {
        framed::write(&mut connection, &batch, LONGEST, WITHIN).await?;
        let theirs = read(&mut connection).await?;
        judge(node, peer, theirs).await;
    }
    Ok(())
}

/// Answers a node that compares, until it hangs up or has said as much as it may.
pub(crate) async fn answer(node: Arc<Node>, mut connection: PeerConnection, peer: String) {
    for _ in 0..MOST_BATCHES {
        let Ok(theirs) = read(&mut connection).await else {
            // Most only look whether this node is there.
            return;
        };
        let mut known = disks::known(&node, &theirs);
        known.extend(machines::known(&node, &theirs));
        if let Err(error) = framed::write(&mut connection, &known, LONGEST, WITHIN).await {
            tracing::debug!(peer, %error, "the node that compares is gone");
            return;
        }
        judge(&node, &peer, theirs).await;
    }
}

async fn read(connection: &mut PeerConnection) -> io::Result<Vec<Shown>> {
    let read = async {
        let length = framed::length(connection, LONGEST).await?;
        framed::body(connection, length).await
    };
    let shown: Vec<Shown> = tokio::time::timeout(WITHIN, read)
        .await
        .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))?;
    match shown.len() > BATCH {
        true => Err(io::Error::other("more records than a message may have")),
        false => Ok(shown),
    }
}

/// Holds what this node has and another node has had since.
async fn judge(node: &Arc<Node>, peer: &str, theirs: Vec<Shown>) {
    disks::judge(node, peer, &theirs).await;
    for shown in theirs.iter().filter(|shown| shown.kind == Kind::Machine) {
        machines::judge(node, peer, shown).await;
    }
}
