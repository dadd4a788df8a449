//! A node's stored right to serve a disk.

use crate::units::{Epoch, MigrationId};

/// A node's durable knowledge of its right to serve a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AuthorityRecord {
    /// The highest epoch this node has taken part in: an epoch that the node serves, will serve, or gave away.
    pub epoch: Epoch,
    /// The node's part in the epoch.
    pub ownership: Ownership,
    /// The migration since which only the source has a part of the disk. A node that serves or has accepted lacks this
    /// part; a node that gave the disk away owes this part. `None` if the owner has the whole disk.
    pub remainder: Option<MigrationId>,
}

/// A node's part in an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ownership {
    /// Not the owner, without a claim to become the owner.
    Vacant,
    /// The owner.
    Serving,
    /// Accepted the disk and holds I/O until the source's decision is known.
    Accepted {
        /// Migration that was accepted.
        migration: MigrationId,
    },
    /// Gave the disk away and awaits the destination's confirmation. Holds I/O that cannot be forwarded.
    Relinquished {
        /// Migration that took the disk away.
        migration: MigrationId,
    },
    /// Gave the disk away, confirmed.
    Departed {
        /// Migration that took the disk away.
        migration: MigrationId,
    },
}

impl AuthorityRecord {
    /// Bytes returned by [`AuthorityRecord::to_bytes`].
    pub const SIZE: usize = 25;

    /// Returns the record of a disk created on this node.
    pub const fn created() -> Self {
        Self {
            epoch: Epoch(1),
            ownership: Ownership::Serving,
            remainder: None,
        }
    }

    /// Returns the record of a disk that this node is about to receive for the first time.
    pub const fn vacant() -> Self {
        Self {
            epoch: Epoch(0),
            ownership: Ownership::Vacant,
            remainder: None,
        }
    }

    /// Returns the stored form.
    pub fn to_bytes(self) -> [u8; Self::SIZE] {
        let (code, migration) = match self.ownership {
            Ownership::Vacant => (0, None),
            Ownership::Serving => (1, self.remainder),
            Ownership::Accepted { migration } => (2, Some(migration)),
            Ownership::Relinquished { migration } => (3, Some(migration)),
            Ownership::Departed { migration } => (4, Some(migration)),
        };
        let remains = if self.remainder.is_some() { REMAINS } else { 0 };
        let mut bytes = [0; Self::SIZE];
        bytes[0] = code | remains;
        bytes[1..9].copy_from_slice(&self.epoch.0.to_le_bytes());
        bytes[9..].copy_from_slice(&migration.unwrap_or_default().0);
        bytes
    }

    /// Reads the stored form; returns `None` if the bytes are invalid.
    pub fn from_bytes(bytes: &[u8; Self::SIZE]) -> Option<Self> {
        let epoch = Epoch(u64::from_le_bytes(*bytes[1..].first_chunk()?));
        let migration = MigrationId(*bytes[9..].first_chunk()?);
        let remains = bytes[0] & REMAINS != 0;
        let ownership = match bytes[0] & !REMAINS {
            0 if !remains => Ownership::Vacant,
            1 => Ownership::Serving,
            2 => Ownership::Accepted { migration },
            3 => Ownership::Relinquished { migration },
            4 => Ownership::Departed { migration },
            _ => return None,
        };
        Some(Self {
            epoch,
            ownership,
            remainder: remains.then_some(migration),
        })
    }

    /// Returns the migration whose source this node still needs, because this node serves the disk and lacks a part.
    pub const fn lacks(&self) -> Option<MigrationId> {
        match self.ownership {
            Ownership::Serving => self.remainder,
            _ => None,
        }
    }

    /// Returns the migration whose destination still needs this node, because this node gave the disk away and owes a
    /// part.
    pub const fn owes(&self) -> Option<MigrationId> {
        match self.ownership {
            Ownership::Relinquished { .. } | Ownership::Departed { .. } => self.remainder,
            _ => None,
        }
    }
}

/// Marks the stored form of a record with a remainder. A build without remainders refuses such a record.
const REMAINS: u8 = 0x80;
