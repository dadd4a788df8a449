//! Memory pools.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A memory pool of a node: memory that other nodes map, too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MemoryPool {
    /// Its name, the same at every node.
    pub name: String,
    /// Its folder at this node, or its device or file.
    pub folder: String,
    /// Bytes in all; nothing when it cannot be used.
    pub bytes: Option<u64>,
    /// Bytes of that free.
    pub free_bytes: Option<u64>,
    /// The memory of machines in it, whichever node's.
    pub segments: Vec<MemorySegment>,
    /// Why it cannot be used.
    pub problem: Option<String>,
}

/// The memory of a machine in a memory pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MemorySegment {
    /// The machine.
    pub vm: String,
    /// Bytes; nothing when its header makes no sense.
    pub bytes: Option<u64>,
    /// Where it begins in the pool's device; nothing in a folder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offset: Option<u64>,
    /// The node that owns it, and alone may run the machine.
    pub owner: Option<String>,
    /// How often it changed hands, or could have, from 1.
    pub epoch: Option<u64>,
    /// What is wrong with it.
    pub problem: Option<String>,
}

/// Makes the device or file of a memory pool one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FormatMemoryPool {
    /// Also when something else is there, or a pool without machines.
    #[serde(default)]
    pub overwrite: bool,
}
