//! Nodes that meet show each other their disks and machines, and their records of each. If another node has had a disk
//! or machine since, the owner holds the disk's I/O or stops the machine, and tells the reason: the data directory was
//! put back to an earlier state, or an operator of the other node claimed a disk or machine still here.
//!
//! The asking node names its disks and machines, by id and in batches. The other node answers with its own records of
//! these. Each node judges only itself, and always by its present record, because the received records may be old.

mod disks;
mod machines;
mod meeting;
mod probe;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use godwit_core::authority::{AuthorityRecord, Ownership};
use godwit_core::units::{Epoch, MigrationId};
use serde::{Deserialize, Serialize};

use crate::node::Node;
use godwit_peers::{PeerConnection, framed};

pub(crate) use self::machines::look_at_memory;
pub(crate) use self::meeting::{meet_all, watch};

/// Most records of a message.
const BATCH: usize = 256;
/// Most messages of a comparison: enough for all disks and machines of a node.
const MOST_BATCHES: usize = 32;
/// Longest message in bytes.
const LONGEST: u32 = 64 << 10;
/// Time limit for each message.
const WITHIN: Duration = Duration::from_secs(5);

/// The kind of an owned thing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Disk,
    Machine,
}

/// The node's part in the ownership.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Part {
    Vacant,
    Serving,
    Accepted,
    Relinquished,
    Departed,
}

/// The record of one disk or machine, as shown to other nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Shown {
    kind: Kind,
    /// In hexadecimal.
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

    /// Returns the record, without the migrations, which are not shown.
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

/// Compares the records of both nodes, on a connection whose welcome agreed on comparisons.
///
/// # Errors
/// The connection fails, or a message is invalid.
async fn compare(node: &Arc<Node>, peer: &str, mut connection: PeerConnection) -> io::Result<()> {
    let mut owned = disks::owned(node);
    owned.extend(machines::owned(node));
    for batch in owned.chunks(BATCH) {
        framed::write(&mut connection, &batch, LONGEST, WITHIN).await?;
        let theirs = read(&mut connection).await?;
        judge(node, peer, theirs).await;
    }
    Ok(())
}

/// Answers a comparing node, until the node hangs up or has sent [`MOST_BATCHES`].
pub(crate) async fn answer(node: Arc<Node>, mut connection: PeerConnection, peer: String) {
    for _ in 0..MOST_BATCHES {
        let Ok(theirs) = read(&mut connection).await else {
            // Most connections only probe this node.
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

/// Holds the I/O of this node's disks with a later owner, and stops such machines.
async fn judge(node: &Arc<Node>, peer: &str, theirs: Vec<Shown>) {
    disks::judge(node, peer, &theirs).await;
    for shown in theirs.iter().filter(|shown| shown.kind == Kind::Machine) {
        machines::judge(node, peer, shown).await;
    }
}
