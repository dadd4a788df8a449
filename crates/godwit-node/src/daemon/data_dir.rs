//! The node's data directory, private to one node at a time.

use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use tokio::net::UnixListener;

use godwit_block::image::lock_file;
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
    match lock_file(file.as_fd(), true) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_a_starting_program_inherited_is_waited_for() {
        let dir = tempfile::tempdir().expect("a folder");
        let mut config = NodeConfig::on_loopback("a", dir.path().to_owned());
        let first = prepare(&mut config).expect("the lock is free");
        let inherited = first._file.try_clone().expect("a second descriptor");
        drop(first);
        let program = std::thread::spawn(move || {
            std::thread::sleep(std::time::Duration::from_millis(50));
            drop(inherited);
        });
        prepare(&mut config).expect("the lock is free soon");
        program.join().expect("the thread ends");
    }

    #[test]
    fn a_folder_has_one_node_at_a_time() {
        let dir = tempfile::tempdir().expect("a folder");
        let mut config = NodeConfig::on_loopback("a", dir.path().to_owned());
        let _first = prepare(&mut config).expect("the lock is free");
        let refused = prepare(&mut config).expect_err("the first one has the lock");
        assert!(matches!(refused, NodeError::InUse { .. }), "{refused}");
    }
}
