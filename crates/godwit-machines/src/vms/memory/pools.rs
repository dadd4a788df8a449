//! The memory pools of a node: opening, showing and formatting.

use godwit_api::{ErrorBody, ErrorCode, MemoryPool, MemorySegment};
use godwit_context::config::{MemoryPoolConfig, NodeConfig};
use godwit_core::units::Bytes;
use godwit_memory::pool::segment::Segment;
use godwit_memory::pool::{Pool, PoolError};

/// Opens a pool of this node's configuration.
///
/// # Errors
/// A sentence that names the pool and a remedy.
pub fn open(config: &NodeConfig, name: &str) -> Result<Pool, ErrorBody> {
    let here = &config.name;
    let found = configured(config, name)?;
    Pool::open(&found.folder).map_err(|error| refused(here, name, &error))
}

/// Returns the pool's part of the configuration.
fn configured<'a>(config: &'a NodeConfig, name: &str) -> Result<&'a MemoryPoolConfig, ErrorBody> {
    let here = &config.name;
    let found = config.memory_pools.iter().find(|pool| pool.name == name);
    found.ok_or_else(|| {
        let shown: String = name.chars().take(128).collect();
        let known = config.memory_pools.iter().map(|pool| pool.name.as_str());
        let known = match known.collect::<Vec<_>>().as_slice() {
            [] => String::from("it has none"),
            known => format!("it has {}", known.join(", ")),
        };
        let text = format!("node '{here}' has no memory pool named {shown:?}: {known}");
        ErrorBody::new(ErrorCode::NotFound, text)
            .hint("start the node with --memory-pool NAME=PATH")
    })
}

/// Returns all pools as the API shows them.
pub fn show_all(config: &NodeConfig) -> Vec<MemoryPool> {
    let pools = config.memory_pools.iter();
    pools.map(|pool| shown(config, pool)).collect()
}

/// Returns a pool as the API shows it.
///
/// # Errors
/// There is no pool of this name.
pub fn show(config: &NodeConfig, name: &str) -> Result<MemoryPool, ErrorBody> {
    configured(config, name).map(|pool| shown(config, pool))
}

/// Formats the device or file of a pool. One node does so, for all that map the pool.
///
/// # Errors
/// There is no pool of this name, the pool is a folder, or the device or file is not empty.
pub fn format(config: &NodeConfig, name: &str, overwrite: bool) -> Result<(), ErrorBody> {
    let path = &configured(config, name)?.folder;
    let made = Pool::format(path, overwrite);
    made.map(drop).map_err(|error| {
        let mut refused = refused(&config.name, name, &error);
        refused.message = format!("memory pool {name} of node '{}' was not made: {error}", config.name);
        match error {
            PoolError::Foreign(_) | PoolError::IsPool { segments: 0, .. } => refused
                .hint("see whether somebody needs what is there; --overwrite makes a pool of it all the same"),
            PoolError::IsPool { .. } => refused.hint("stop the machines whose memory is there first"),
            _ => refused,
        }
    })
}

fn shown(config: &NodeConfig, of: &MemoryPoolConfig) -> MemoryPool {
    let mut shown = MemoryPool {
        name: of.name.clone(),
        folder: of.folder.display().to_string(),
        bytes: None,
        free_bytes: None,
        segments: Vec::new(),
        problem: None,
    };
    let looked = Pool::open(&of.folder).and_then(|pool| {
        let names = pool.segments()?.into_iter();
        shown.segments = names.map(|name| shown_segment(&pool, name)).collect();
        let room = pool.room()?;
        (shown.bytes, shown.free_bytes) = (Some(room.total), Some(room.free));
        Ok(())
    });
    if let Err(error) = looked {
        shown.problem = Some(refused(&config.name, &of.name, &error).message);
    }
    shown
}

fn shown_segment(pool: &Pool, name: String) -> MemorySegment {
    let read = Segment::open(pool, &name)
        .and_then(|segment| Ok((segment.place().clone(), segment.title()?)));
    let (place, title, problem) = match read {
        Ok((place, title)) => (Some(place), Some(title), None),
        Err(error) => (None, None, Some(error.to_string())),
    };
    let bytes = place.as_ref().map(|place| place.extent.bytes);
    let part = place.filter(|place| place.align.is_some());
    let offset = part.map(|place| place.extent.offset);
    MemorySegment {
        vm: name,
        bytes,
        offset,
        epoch: title.as_ref().map(|title| title.epoch),
        owner: title.map(|title| title.owner),
        problem,
    }
}

/// Converts a pool's error for the API.
pub fn refused(here: &str, pool: &str, error: &PoolError) -> ErrorBody {
    let (code, hint) = remedy(error);
    let text = match error {
        PoolError::Full { free, wanted } => format!(
            "memory pool {pool} of node '{here}' has {} free, and {} are needed",
            Bytes(*free),
            Bytes(*wanted)
        ),
        error => format!("memory pool {pool} of node '{here}' cannot be used: {error}"),
    };
    ErrorBody::new(code, text).hint(hint)
}

/// Returns the code of an error of a pool, and a remedy.
const fn remedy(error: &PoolError) -> (ErrorCode, &'static str) {
    match error {
        PoolError::Missing(_) | PoolError::NotMemory(_) => (
            ErrorCode::Conflict,
            "mount it, or start the node with another --memory-pool",
        ),
        PoolError::NotFormatted(_) => (
            ErrorCode::Conflict,
            "make it one with 'godwit memory-pool format', at one of the nodes that map it",
        ),
        PoolError::Foreign(_) => (
            ErrorCode::Conflict,
            "start the node with another --memory-pool; or, if nobody needs what is there, 'godwit memory-pool format --overwrite'",
        ),
        PoolError::IsPool { .. } | PoolError::IsFolder(_) => {
            (ErrorCode::Conflict, "use it as it is")
        }
        PoolError::TooSmall { .. } => (
            ErrorCode::Conflict,
            "make it larger, or start the node with another --memory-pool",
        ),
        PoolError::Table { .. } => (
            ErrorCode::Conflict,
            "see 'godwit memory-pool show' at each node that maps it; stop its machines, and make it a pool again",
        ),
        PoolError::TooMany(_) | PoolError::InPieces { .. } => (
            ErrorCode::NoSpace,
            "stop a machine whose memory is there, or use another pool",
        ),
        PoolError::Busy | PoolError::BeingFormatted(_) => (ErrorCode::Conflict, "try again"),
        PoolError::Sparse(_) => (
            ErrorCode::NoSpace,
            "reserve it with 'fallocate', where there is room for it",
        ),
        PoolError::Changed(_) => (
            ErrorCode::Conflict,
            "see whether each node that maps it has a name of its own and runs once; then try again",
        ),
        PoolError::Ending => (ErrorCode::ShuttingDown, "try again when the node is back"),
        PoolError::Forbidden(_) => (
            ErrorCode::Conflict,
            "let the node's user write there, or start the node with another --memory-pool",
        ),
        PoolError::PageSize { .. } => (
            ErrorCode::Conflict,
            "give the machine a multiple of them with --memory, or use a pool of ordinary pages",
        ),
        PoolError::Full { .. } => (
            ErrorCode::NoSpace,
            "stop a machine whose memory is there, or make the pool larger",
        ),
        PoolError::Exists { .. } => (
            ErrorCode::Exists,
            "choose another name for the machine: all nodes that map the pool share its names",
        ),
        PoolError::NoSegment(_) | PoolError::Damaged { .. } | PoolError::Refused { .. } => (
            ErrorCode::Conflict,
            "see 'godwit memory-pool show' at each node that maps the pool",
        ),
        PoolError::OtherMemory => (
            ErrorCode::Conflict,
            "give both nodes the same memory under this name, or different names to different memory",
        ),
        PoolError::Io { .. } => (ErrorCode::Internal, "see the node's log"),
    }
}
