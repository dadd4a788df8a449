//! Queries of a running QEMU about the machine.

use serde_json::{Value, json};

use crate::migration::PULL_BROKEN;
use crate::monitor::qmp::{Qmp, QmpError, text};
use crate::plugged::Devices;

/// QEMU's run state of a guest whose memory has not arrived.
pub const AWAITS_MEMORY: &str = "inmigrate";

/// The facts about a machine for the node's disks and for a migration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// The machine type with its version, such as `pc-q35-10.0`.
    pub machine_type: Option<String>,
    /// True if the guest runs.
    pub runs: bool,
    /// True if all memory is shared and open to I/O by another process.
    pub memory_shared: bool,
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Peers of QEMU's character devices.
    pub backends: Vec<String>,
    /// Drives opened by QEMU itself, with their files.
    pub drives: Vec<String>,
    /// Devices added to the machine type.
    pub devices: Devices,
    /// QEMU's own reasons against a migration.
    pub blocked: Vec<String>,
    /// True if QEMU still holds a broken migration and begins no other.
    pub bound: bool,
}

impl Facts {
    /// Queries QEMU.
    ///
    /// # Errors
    /// [`QmpError`].
    pub async fn read(qmp: &Qmp) -> Result<Self, QmpError> {
        let machine = json!({ "path": "/machine", "property": "type" });
        let machine = qmp.execute("qom-get", machine).await?;
        let memory = qmp.execute("query-memdev", json!({})).await?;
        let size = qmp.execute("query-memory-size-summary", json!({})).await?;
        let backends = qmp.execute("query-chardev", json!({})).await?;
        let drives = qmp.execute("query-block", json!({})).await?;
        let migration = qmp.execute("query-migrate", json!({})).await?;
        let devices = Devices::read(qmp).await?;
        let runs = is_live(&run_state(qmp).await?);
        let machine = machine
            .as_str()
            .and_then(|name| name.strip_suffix("-machine"));
        let backings = items(&memory);
        let part = |name: &str| size.get(name).and_then(Value::as_u64).unwrap_or(0);
        let blocked = migration.get("blocked-reasons").map(items);
        Ok(Self {
            machine_type: machine.map(str::to_owned),
            runs,
            memory_shared: !backings.is_empty()
                && backings.iter().all(|backing| backing["share"] == true),
            memory_bytes: part("base-memory").saturating_add(part("plugged-memory")),
            backends: items(&backends)
                .iter()
                .map(|backend| text(backend, "filename"))
                .collect(),
            drives: items(&drives).iter().filter_map(drive).collect(),
            devices,
            blocked: blocked
                .unwrap_or_default()
                .iter()
                .filter_map(Value::as_str)
                .map(str::to_owned)
                .collect(),
            bound: matches!(
                text(&migration, "status").as_str(),
                PULL_BROKEN | "cancelling" | "device"
            ),
        })
    }

    /// Returns true if a character device is connected to this socket.
    pub fn uses_socket(&self, path: &std::path::Path) -> bool {
        // `unix:/path` or `disconnected:unix:/path,server=off` and the like.
        let socket = format!("unix:{}", path.display());
        self.backends.iter().any(|backend| {
            backend
                .split_once(&socket)
                .is_some_and(|(_, rest)| rest.is_empty() || rest.starts_with(','))
        })
    }
}

/// Returns QEMU's own drives and files without the page cache, whose requests access pages of the guest's memory
/// directly.
///
/// # Errors
/// [`QmpError`].
pub async fn direct_drives(qmp: &Qmp) -> Result<Vec<String>, QmpError> {
    let nodes = qmp
        .execute("query-named-block-nodes", json!({ "flat": true }))
        .await?;
    Ok(items(&nodes).iter().filter_map(direct).collect())
}

/// Drivers that access the guest's memory directly, regardless of their cache setting.
const DIRECT_DRIVERS: [&str; 6] = [
    "nvme",
    "nvme-io_uring",
    "io_uring",
    "virtio-blk-vfio-pci",
    "virtio-blk-vhost-user",
    "virtio-blk-vhost-vdpa",
];

fn direct(node: &Value) -> Option<String> {
    let driver = text(node, "drv");
    let is_direct = node["cache"]["direct"] == true || DIRECT_DRIVERS.contains(&driver.as_str());
    is_direct.then(|| {
        format!(
            "{} ({driver}, {})",
            text(node, "node-name"),
            text(node, "file")
        )
    })
}

/// Returns QEMU's run state.
///
/// # Errors
/// [`QmpError`].
pub async fn run_state(qmp: &Qmp) -> Result<String, QmpError> {
    let status = qmp.execute("query-status", json!({})).await?;
    Ok(text(&status, "status"))
}

/// Returns true if a guest in this run state runs, and goes on by itself after a move. A sleeping guest counts as
/// running: events wake the guest.
pub fn is_live(run_state: &str) -> bool {
    matches!(run_state, "running" | "suspended")
}

fn items(list: &Value) -> &[Value] {
    list.as_array().map_or(&[], Vec::as_slice)
}

/// Describes a drive with a medium.
fn drive(drive: &Value) -> Option<String> {
    let inserted = drive.get("inserted")?;
    let name = [text(drive, "device"), text(drive, "qdev")]
        .into_iter()
        .find(|name| !name.is_empty())
        .unwrap_or_else(|| String::from("without a name"));
    Some(format!("{name} ({})", text(inserted, "file")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_is_recognised_by_its_whole_path() {
        let facts = Facts {
            backends: vec![
                String::from("disconnected:unix:/n/disks/root.vhost"),
                String::from("unix:/n/disks/data.vhost,server=off"),
            ],
            ..Facts::default()
        };
        for (path, used) in [
            ("/n/disks/root.vhost", true),
            ("/n/disks/data.vhost", true),
            ("/n/disks/root.vhos", false),
            ("/disks/root.vhost", false),
        ] {
            assert_eq!(
                facts.uses_socket(std::path::Path::new(path)),
                used,
                "{path}"
            );
        }
    }

    #[test]
    fn drives_that_bypass_the_page_cache_are_told_from_others() {
        let named = |is_direct: bool, drv: &str| {
            let cache = json!({ "direct": is_direct, "writeback": true, "no-flush": false });
            direct(&json!({ "node-name": "n", "drv": drv, "file": "/x", "cache": cache }))
        };
        assert_eq!(named(false, "file"), None);
        assert_eq!(named(true, "file").as_deref(), Some("n (file, /x)"));
        assert!(named(false, "nvme").is_some());
        assert_eq!(direct(&json!(7)), None);
    }

    #[test]
    fn empty_drives_are_not_counted_and_odd_answers_do_no_harm() {
        assert_eq!(drive(&json!({ "device": "cd0" })), None);
        let full = json!({ "device": "", "qdev": "q", "inserted": { "file": "/x" } });
        assert_eq!(drive(&full).as_deref(), Some("q (/x)"));
        assert_eq!(items(&json!({ "a": 1 })), &[] as &[Value]);
    }
}
