//! What a node stores of its right to serve a disk.

use crate::units::{Epoch, MigrationId};

/// What a node durably knows about its right to serve a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AuthorityRecord {
    /// The highest epoch this node has taken part in: the one it serves, will serve, or gave away.
    pub epoch: Epoch,
    /// Its part in it.
    pub ownership: Ownership,
    /// The migration since which a part of the disk is with its source only: a node that serves, or has accepted,
    /// lacks that part, and a node that gave the disk away owes it. Nothing when the owner has all of the disk.
    pub remainder: Option<MigrationId>,
}

/// A node's part in an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ownership {
    /// Not the owner, and no claim to become it.
    Vacant,
    /// The owner.
    Serving,
    /// Accepted the disk and waits to hear whether the source gave it away. Holds I/O until then.
    Accepted {
        /// By which migration.
        migration: MigrationId,
    },
    /// Gave the disk away and waits for the destination's confirmation. Holds I/O that it cannot
    /// forward.
    Relinquished {
        /// By which migration.
        migration: MigrationId,
    },
    /// Gave the disk away, confirmed.
    Departed {
        /// By which migration.
        migration: MigrationId,
    },
}

impl AuthorityRecord {
    /// Bytes that [`AuthorityRecord::to_bytes`] takes.
    pub const SIZE: usize = 25;

    /// The record of a disk that was created on this node.
    pub const fn created() -> Self {
        Self {
            epoch: Epoch(1),
            ownership: Ownership::Serving,
            remainder: None,
        }
    }

    /// The record of a disk that this node is about to receive for the first time.
    pub const fn vacant() -> Self {
        Self {
            epoch: Epoch(0),
            ownership: Ownership::Vacant,
            remainder: None,
        }
    }

    /// The form in which it is stored.
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

    /// Reads the stored form; `None` when it is not one.
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

    /// The migration whose source this node still needs, because it serves the disk and lacks a part of it.
    pub const fn lacks(&self) -> Option<MigrationId> {
        match self.ownership {
            Ownership::Serving => self.remainder,
            _ => None,
        }
    }

    /// The migration whose destination still needs this node, which gave the disk away and owes a part of it.
    pub const fn owes(&self) -> Option<MigrationId> {
        match self.ownership {
            Ownership::Relinquished { .. } | Ownership::Departed { .. } => self.remainder,
            _ => None,
        }
    }
}

/// Marks the stored form of a record with a remainder. A build that knows of none refuses such a record.
const REMAINS: u8 = 0x80;
