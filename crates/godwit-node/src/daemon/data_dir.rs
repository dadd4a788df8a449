//! The node's data directory, private to one node at a time.

use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use rustix::fs::{FlockOperation, flock};
use tokio::net::UnixListener;

use godwit_context::config::{MAX_SOCKET_PATH, NodeConfig};
use godwit_context::node_error::NodeError;

/// Keeps other nodes off the data directory until dropped, or until the process ends.
#[derive(Debug)]
pub(crate) struct DataDirLock {
    _file: File,
}

/// Creates the folders of the data directory and locks it. Makes the directory's path absolute.
pub(crate) fn prepare(config: &mut NodeConfig) -> Result<DataDirLock, NodeError> {
    let given = config.data_dir.clone();
    config.data_dir =
        std::path::absolute(&given).map_err(|error| failed("use the folder", &given, error))?;
    // QEMU's sockets are below: the QEMU user passes through, and cannot list any other name.
    let mode = match config.qemu_user {
        Some(_) => 0o711,
        None => 0o700,
    };
    for folder in [
        config.data_dir.clone(),
        config.disks_dir(),
        config.vms_dir(),
        config.nics_dir(),
        config.processes_dir(),
    ] {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&folder)
            .and_then(|()| std::fs::set_permissions(&folder, Permissions::from_mode(mode)))
            .map_err(|error| failed("make the folder", &folder, error))?;
    }
    let path = config.data_dir.join("lock");
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(&path)
        .map_err(|error| failed("open", &path, error))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(DataDirLock { _file: file }),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(NodeError::InUse {
            path: config.data_dir.display().to_string(),
        }),
        Err(errno) => Err(failed("lock", &path, errno.into())),
    }
}

/// Listens on a unix socket that only this user can open. Replaces a socket left by an earlier run: the lock proves
/// that no process listens there.
pub(crate) fn unix_listener(what: &'static str, path: &Path) -> Result<UnixListener, NodeError> {
    let failed = |source| NodeError::Listen {
        what,
        address: path.display().to_string(),
        source,
    };
    if path.as_os_str().len() > MAX_SOCKET_PATH {
        return Err(NodeError::Config(format!(
            "the path of the socket {} is longer than {MAX_SOCKET_PATH} bytes: choose a shorter \
             --data-dir",
            path.display()
        )));
    }
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    let listener = UnixListener::bind(path).map_err(failed)?;
    std::fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(failed)?;
    Ok(listener)
}

fn failed(action: &'static str, path: &Path, source: io::Error) -> NodeError {
    NodeError::DataDir {
        action,
        path: path.display().to_string(),
        source,
    }
}
