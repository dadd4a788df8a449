//! The sockets through which virtual machines use disks.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;

use godwit_block::engine::BlockDevice;
use godwit_block::engine::EngineHandle;
use godwit_vhost::VhostUserServer;

use crate::disks::Disks;
use crate::disks::disk::Disk;
use godwit_context::config::MAX_SOCKET_PATH;
use godwit_context::config::NodeConfig;
use godwit_qemu::QemuUser;

/// Opens a disk's socket. A disk without a socket is served to all clients but virtual machines, and `vm run` names the
/// trouble.
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

/// Listens at a device's socket.
pub fn listen(path: &Path, qemu: Option<&QemuUser>) -> io::Result<UnixListener> {
    if path.as_os_str().as_bytes().len() > MAX_SOCKET_PATH {
        return Err(io::Error::other(format!(
            "the path has more than {MAX_SOCKET_PATH} bytes: a shorter name or --data-dir helps"
        )));
    }
    // The lock on the data directory guarantees that an existing socket has no listener.
    remove(path)?;
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    if let Some(user) = qemu {
        user.own(path)?;
    }
    Ok(listener)
}

/// Disks not open to virtual machines for now, although served.
///
/// A machine whose memory is on its way tells the servers of its disks to wait for missing pages, but only once, before
/// the machine runs. A node that restarted meanwhile would find zeroes in the place of missing pages, and leave the
/// zeroes there. The machine's requests therefore wait until all of the memory is there: QEMU retries until the socket
/// has a listener.
#[derive(Debug)]
pub struct Held {
    all: Arc<Disks>,
    held: Vec<Arc<Disk>>,
}

impl Held {
    /// Closes these disks to virtual machines. Their engines must not have been started.
    pub fn new(all: &Arc<Disks>, names: &[String]) -> Self {
        let held: Vec<_> = names.iter().filter_map(|disk| all.find(disk)).collect();
        for disk in &held {
            disk.lock().vhost_held = true;
        }
        Self {
            all: Arc::clone(all),
            held,
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // At the end of the node the memory may still be missing.
        if self.all.context.is_closing() {
            return;
        }
        for disk in &self.held {
            let mut inner = disk.lock();
            inner.vhost_held = false;
            if let Some(engine) = &mut inner.engine
                && engine.vhost.is_none()
            {
                engine.vhost = serve(&self.all.context.config, &disk.name, &engine.handle);
            }
        }
    }
}

/// Removes a disk's socket. A missing socket is fine.
pub fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
