//! The resources of this host for a process that moves here.

mod groups;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fs;
use std::io;
use std::path::Path;
use std::process::Command;

use crate::abi::{ibv_context, ibv_device};
use crate::preflight::{DeviceOffer, Offer};
use crate::tables::Gid;

const DEVICES: &str = "/sys/class/infiniband";

/// Examines this host's devices, CRIU, and the use of the process numbers `pids`.
///
/// # Errors
/// The kernel's list of devices cannot be read. A host without RDMA offers no devices.
pub fn offer(pids: &[u32]) -> io::Result<Offer> {
    let taken = |pid: &&u32| Path::new(&format!("/proc/{pid}")).exists();
    let names = match fs::read_dir(DEVICES) {
        Ok(entries) => entries
            .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
            .collect::<io::Result<Vec<_>>>()?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(error),
    };
    let used = Used::ask();
    Ok(Offer {
        devices: names
            .iter()
            // A device that cannot be opened is useless to a process.
            .filter_map(|name| device(name, &used))
            .collect(),
        criu: why_not_criu(),
        taken: pids.iter().filter(taken).copied().collect(),
    })
}

fn device(name: &str, used: &Used) -> Option<DeviceOffer> {
    let limits = Limits::of(name)?;
    let allowed = groups::objects_left(name);
    let free = |limit: u32, what: &str| limit.saturating_sub(used.of(name, what)).min(allowed);
    Some(DeviceOffer {
        name: name.to_owned(),
        queue_pairs: free(limits.queue_pairs, "qp"),
        regions: free(limits.regions, "mr"),
        // rdma(8) does not count windows, but control groups do.
        windows: limits.windows.min(allowed),
        completion_queues: free(limits.completion_queues, "cq"),
        addresses: addresses(&Path::new(DEVICES).join(name).join("ports")),
    })
}

/// Returns the addresses of all ports, except zeros.
fn addresses(ports: &Path) -> Vec<(u8, u8, Gid)> {
    let numbered = |path: &Path| -> Vec<(u8, std::path::PathBuf)> {
        let mut found: Vec<_> = fs::read_dir(path)
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, entry.path())))
            .collect();
        found.sort();
        found
    };
    let mut found = Vec::new();
    for (port, path) in numbered(ports) {
        for (place, file) in numbered(&path.join("gids")) {
            let text = fs::read_to_string(file).unwrap_or_default();
            match Gid::try_from(text.trim().to_owned()) {
                Ok(gid) if gid.0 != [0; 16] => found.push((port, place, gid)),
                _ => {}
            }
        }
    }
    found
}

/// The objects of all processes on each device, according to rdma(8); empty without this program.
struct Used(serde_json::Value);

impl Used {
    fn ask() -> Self {
        let said = Command::new("rdma")
            .args(["-j", "resource", "show"])
            .output();
        Self(
            said.ok()
                .and_then(|said| serde_json::from_slice(&said.stdout).ok())
                .unwrap_or_default(),
        )
    }

    fn of(&self, device: &str, what: &str) -> u32 {
        let devices = self.0.as_array().map_or(&[][..], Vec::as_slice);
        let found = devices.iter().find(|entry| entry["ifname"] == device);
        found
            .and_then(|entry| u32::try_from(entry[what].as_u64()?).ok())
            .unwrap_or(0)
    }
}

/// The limits of a device.
struct Limits {
    queue_pairs: u32,
    regions: u32,
    windows: u32,
    completion_queues: u32,
}

/// `struct ibv_device_attr` is 232 bytes; newer versions may be longer.
const ATTRIBUTES: usize = 1024;
/// Offsets of `max_qp`, `max_cq`, `max_mr` and `max_mw`.
const MAX_QP: usize = 108;
const MAX_CQ: usize = 128;
const MAX_MR: usize = 136;
const MAX_MW: usize = 176;

impl Limits {
    /// Asks the device through libibverbs, without this package's library in front.
    fn of(name: &str) -> Option<Self> {
        type GetList = unsafe extern "C" fn(*mut c_int) -> *mut *mut ibv_device;
        type FreeList = unsafe extern "C" fn(*mut *mut ibv_device);
        type Name = unsafe extern "C" fn(*mut ibv_device) -> *const c_char;
        type Open = unsafe extern "C" fn(*mut ibv_device) -> *mut ibv_context;
        type Query = unsafe extern "C" fn(*mut ibv_context, *mut c_void) -> c_int;
        type Close = unsafe extern "C" fn(*mut ibv_context) -> c_int;

        // SAFETY: the names and types are those of libibverbs' header; every object is used before its end.
        unsafe {
            let library = libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_NOW);
            if library.is_null() {
                return None;
            }
            let find = |symbol: &CStr| {
                let found = libc::dlsym(library, symbol.as_ptr());
                (!found.is_null()).then_some(found)
            };
            let get_list: GetList = std::mem::transmute(find(c"ibv_get_device_list")?);
            let free_list: FreeList = std::mem::transmute(find(c"ibv_free_device_list")?);
            let name_of: Name = std::mem::transmute(find(c"ibv_get_device_name")?);
            let open: Open = std::mem::transmute(find(c"ibv_open_device")?);
            let query: Query = std::mem::transmute(find(c"ibv_query_device")?);
            let close: Close = std::mem::transmute(find(c"ibv_close_device")?);

            let mut count = 0;
            let list = get_list(&raw mut count);
            if list.is_null() {
                return None;
            }
            let device = (0..count as usize)
                .map(|place| *list.add(place))
                .find(|device| CStr::from_ptr(name_of(*device)).to_bytes() == name.as_bytes());
            let context = device.map(|device| open(device));
            free_list(list);
            let context = context.filter(|context| !context.is_null())?;
            let mut attributes = [0u64; ATTRIBUTES / 8];
            let asked = query(context, attributes.as_mut_ptr().cast());
            close(context);
            let word = |offset: usize| {
                attributes[offset / 8].to_ne_bytes()[offset % 8..][..4]
                    .try_into()
                    .map(u32::from_ne_bytes)
            };
            (asked == 0).then_some(Self {
                queue_pairs: word(MAX_QP).ok()?,
                regions: word(MAX_MR).ok()?,
                windows: word(MAX_MW).ok()?,
                completion_queues: word(MAX_CQ).ok()?,
            })
        }
    }
}

fn why_not_criu() -> Option<String> {
    match Command::new("criu").arg("check").output() {
        Ok(said) if said.status.success() => None,
        Ok(said) => {
            let text = String::from_utf8_lossy(&said.stderr).into_owned()
                + &String::from_utf8_lossy(&said.stdout);
            let last = text
                .lines()
                .rev()
                .find(|line| line.contains("Error"))
                .unwrap_or("no reason");
            Some(format!("`criu check` failed: {}", last.trim()))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Some("criu is not installed".to_owned())
        }
        Err(error) => Some(format!("criu cannot be run: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_from_the_kernels_tables() {
        let ports = tempfile::tempdir().unwrap();
        let gids = ports.path().join("1/gids");
        fs::create_dir_all(&gids).unwrap();
        for (place, text) in [
            ("0", "fe80:0000:0000:0000:5054:00ff:fe00:0001\n"),
            ("1", "0000:0000:0000:0000:0000:ffff:0a00:0001\n"),
            ("2", "0000:0000:0000:0000:0000:0000:0000:0000\n"),
            ("3", "not an address\n"),
        ] {
            fs::write(gids.join(place), text).unwrap();
        }
        let found: Vec<_> = addresses(ports.path())
            .into_iter()
            .map(|(port, place, gid)| (port, place, gid.to_string()))
            .collect();
        assert_eq!(
            found,
            [
                (1, 0, "fe80::5054:ff:fe00:1".to_owned()),
                (1, 1, "::ffff:10.0.0.1".to_owned())
            ]
        );
        assert_eq!(addresses(Path::new("/nowhere")), []);
    }

    #[test]
    fn what_others_have_is_not_free() {
        let used = Used(serde_json::json!([{"ifindex": 0, "ifname": "rxe0", "qp": 3}]));
        assert_eq!(
            (
                used.of("rxe0", "qp"),
                used.of("rxe0", "mr"),
                used.of("rxe1", "qp")
            ),
            (3, 0, 0)
        );
        assert_eq!(Used(serde_json::Value::Null).of("rxe0", "qp"), 0);
    }
}
