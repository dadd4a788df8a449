//! The sockets where virtual machines use disks.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;

use godwit_block::engine::EngineHandle;
use godwit_block::vhost_user::{self, VhostUserServer};

use crate::config::NodeConfig;
use crate::data_dir::MAX_SOCKET_PATH;

/// Opens a disk's socket. A disk without one is served to everybody but virtual machines, and `vm
/// run` says what is wrong.
pub(super) fn serve(
    config: &NodeConfig,
    disk: &str,
    engine: &EngineHandle,
) -> Option<VhostUserServer> {
    let path = config.vhost_socket(disk);
    let served = listen(&path).and_then(|listener| {
        let name = disk.to_owned();
        vhost_user::serve(listener, name.clone(), name, engine.clone())
    });
    served
        .inspect_err(|error| {
            tracing::warn!(disk, socket = %path.display(), %error, "virtual machines cannot use the disk");
        })
        .ok()
}

fn listen(path: &Path) -> io::Result<UnixListener> {
    if path.as_os_str().as_bytes().len() > MAX_SOCKET_PATH {
        return Err(io::Error::other(format!(
            "the path has more than {MAX_SOCKET_PATH} bytes: a shorter name or --data-dir helps"
        )));
    }
    // The lock on the data directory says that nobody listens on one that is there.
    remove(path)?;
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Removes a disk's socket; that it is gone already is fine.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
