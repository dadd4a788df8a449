//! All guests together.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::RdmaGuest;

/// Running guests on one network, until the bed is dropped.
pub struct Bed {
    guests: Vec<RdmaGuest>,
    work: tempfile::TempDir,
}

impl Bed {
    /// Boots `count` guests, 2 or 3. `files` are put into /opt/godwit of each.
    pub fn start(count: usize, files: &[PathBuf]) -> io::Result<Self> {
        let image = image()?;
        let work = tempfile::Builder::new().prefix("godwit-rdma-").tempdir()?;
        let payload = work.path().join("payload.tar");
        pack(files, &payload)?;
        // The hub listens, so it is started first.
        let mut guests: Vec<RdmaGuest> = Vec::new();
        for number in (1..=count).rev() {
            let net = network(work.path(), number, count);
            guests.push(RdmaGuest::start(
                &image,
                &payload,
                work.path(),
                number,
                &net,
            )?);
        }
        guests.reverse();
        let bed = Self { guests, work };
        for guest in &bed.guests {
            guest.booted()?;
            guest.must(&format!(
                "ip link set eth0 mtu 4300 up && ip addr add {}/24 dev eth0 && rdma link add rxe0 type rxe netdev eth0",
                guest.address()
            ))?;
            // Permanent neighbour entries, because guests on busy hosts answer neighbour requests too late. Addresses
            // that move are still resolved.
            for other in (1..=count).filter(|other| *other != guest.number()) {
                guest.must(&format!(
                    "ip neigh replace 10.0.0.{other} lladdr 52:54:00:00:00:{other:02x} nud permanent dev eth0"
                ))?;
            }
        }
        Ok(bed)
    }

    /// Returns guest `number`, from 1.
    pub fn guest(&self, number: usize) -> &RdmaGuest {
        &self.guests[number - 1]
    }

    /// Returns the folder of the logs of QEMU and of the guests' consoles.
    pub fn logs(&self) -> &Path {
        self.work.path()
    }
}

/// Returns the guest image, built if missing.
fn image() -> io::Result<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let built = Command::new(root.join("scripts/build-rdma-guest")).output()?;
    if !built.status.success() {
        return Err(io::Error::other(
            String::from_utf8_lossy(&built.stderr).into_owned(),
        ));
    }
    Ok(PathBuf::from(String::from_utf8_lossy(&built.stdout).trim()))
}

fn pack(files: &[PathBuf], into: &Path) -> io::Result<()> {
    let mut tar = Command::new("tar");
    tar.arg("-cf").arg(into);
    for file in files {
        let (Some(dir), Some(name)) = (file.parent(), file.file_name()) else {
            return Err(io::Error::other(format!("{} is no file", file.display())));
        };
        tar.arg("-C").arg(std::path::absolute(dir)?).arg(name);
    }
    let packed = tar.output()?;
    if packed.status.success() {
        Ok(())
    } else {
        Err(io::Error::other(
            String::from_utf8_lossy(&packed.stderr).into_owned(),
        ))
    }
}

/// Returns QEMU's network arguments: the last guest joins the streams of all others and its own NIC in a hub.
fn network(work: &Path, number: usize, count: usize) -> Vec<String> {
    let path = |other: usize| work.join(format!("net-{other}")).display().to_string();
    let nic =
        |netdev: &str| format!("virtio-net-pci,netdev={netdev},mac=52:54:00:00:00:{number:02x}");
    let mut arguments = Vec::new();
    let mut add = |option: &str, value: String| arguments.extend([option.to_owned(), value]);
    if number < count {
        add(
            "-netdev",
            format!(
                "stream,id=net,server=off,addr.type=unix,addr.path={}",
                path(number)
            ),
        );
        add("-device", nic("net"));
        return arguments;
    }
    for other in 1..count {
        add(
            "-netdev",
            format!(
                "stream,id=to{other},server=on,addr.type=unix,addr.path={}",
                path(other)
            ),
        );
        add(
            "-netdev",
            format!("hubport,id=port{other},hubid=0,netdev=to{other}"),
        );
    }
    add("-netdev", "hubport,id=own,hubid=0".to_owned());
    add("-device", nic("own"));
    arguments
}
