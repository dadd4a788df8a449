//! Memory pools.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A memory pool of a node: memory that other nodes map too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MemoryPool {
    /// Name of the pool, the same at every node.
    pub name: String,
    /// Path of the folder, device or file at this node.
    pub folder: String,
    /// Total bytes; absent if the pool cannot be used.
    pub bytes: Option<u64>,
    /// Free bytes.
    pub free_bytes: Option<u64>,
    /// Memory of VMs in the pool, of all nodes.
    pub segments: Vec<MemorySegment>,
    /// The reason why the pool cannot be used.
    pub problem: Option<String>,
}

/// The memory of a VM in a memory pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MemorySegment {
    /// Name of the VM.
    pub vm: String,
    /// Bytes of the memory; absent if the header is invalid.
    pub bytes: Option<u64>,
    /// Offset in the pool's device; absent in a folder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offset: Option<u64>,
    /// The node that owns the memory, and alone may run the VM.
    pub owner: Option<String>,
    /// Number of decisions about the owner, from 1; a decision may confirm the present owner.
    pub epoch: Option<u64>,
    /// Description of the damage, if any.
    pub problem: Option<String>,
}

/// A request to format the device or file of a memory pool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FormatMemoryPool {
    /// True to format even over other data, or over a pool without VMs.
    #[serde(default)]
    pub overwrite: bool,
}
