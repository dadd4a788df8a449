//! The sockets where virtual machines use disks.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;

use godwit_block::engine::BlockDevice;
use godwit_block::engine::EngineHandle;
use godwit_vhost::VhostUserServer;

use crate::config::MAX_SOCKET_PATH;
use crate::config::NodeConfig;
use crate::disks::disk::Disk;
use crate::node::Node;
use godwit_qemu::QemuUser;

/// Opens a disk's socket. A disk without one is served to everybody but virtual machines, and `vm
/// run` says what is wrong.
pub(super) fn serve(
    config: &NodeConfig,
    disk: &str,
    engine: &EngineHandle,
) -> Option<VhostUserServer> {
    let path = config.vhost_socket(disk);
    let served = listen(&path, config.qemu_user.as_ref())
        .and_then(|listener| godwit_vhost::serve(listener, BlockDevice::new(engine.clone())));
    served
        .inspect_err(|error| {
            tracing::warn!(disk, socket = %path.display(), %error, "virtual machines cannot use the disk");
        })
        .ok()
}

/// Listens at a device's socket, where nobody else does.
pub(crate) fn listen(path: &Path, qemu: Option<&QemuUser>) -> io::Result<UnixListener> {
    if path.as_os_str().as_bytes().len() > MAX_SOCKET_PATH {
        return Err(io::Error::other(format!(
            "the path has more than {MAX_SOCKET_PATH} bytes: a shorter name or --data-dir helps"
        )));
    }
    // The lock on the data directory says that nobody listens on one that is there.
    remove(path)?;
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    if let Some(user) = qemu {
        user.own(path)?;
    }
    Ok(listener)
}

/// Disks that no virtual machine may use for now, although they are served.
///
/// A machine whose memory is on its way tells whoever serves its disks to wait for missing pages, but
/// it does so once, before it runs. A node that was started again meanwhile would find zeroes in the
/// place of what has not arrived, and leave them there. So its machine's requests wait until all of
/// the memory is there: QEMU tries to connect until somebody listens.
#[derive(Debug)]
pub(crate) struct Held {
    node: Arc<Node>,
    disks: Vec<Arc<Disk>>,
}

impl Held {
    /// Holds these disks, whose engines have not been started.
    pub(crate) fn new(node: &Arc<Node>, disks: &[String]) -> Self {
        let disks: Vec<_> = disks
            .iter()
            .filter_map(|disk| node.disks.find(disk))
            .collect();
        for disk in &disks {
            disk.lock().vhost_held = true;
        }
        Self {
            node: Arc::clone(node),
            disks,
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // The node's end is no sign that the memory is there.
        if self.node.is_closing() {
            return;
        }
        for disk in &self.disks {
            let mut inner = disk.lock();
            inner.vhost_held = false;
            if let Some(engine) = &mut inner.engine
                && engine.vhost.is_none()
            {
                engine.vhost = serve(&self.node.config, &disk.name, &engine.handle);
            }
        }
    }
}

/// Removes a disk's socket; that it is gone already is fine.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
