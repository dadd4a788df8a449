//! Differences between a machine's devices and its command line: another node would start the machine with the devices
//! of the command line.

use serde_json::{Value, json};

use crate::machine::{Machine, field, property};
use crate::monitor::qmp::{Qmp, QmpError, text};

/// Most devices of one kind in a message.
const SHOWN: usize = 8;

/// A device of QEMU.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Device {
    /// Id, or the name given by QEMU: `device[3]`.
    name: String,
    /// Type, such as `virtio-net-pci`.
    kind: String,
}

/// The devices added to a machine one by one, by the command line or later. Devices of the machine type are not
/// included.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Devices {
    with_id: Vec<Device>,
    without_id: Vec<Device>,
}

impl Devices {
    /// Queries QEMU.
    ///
    /// # Errors
    /// [`QmpError`].
    pub async fn read(qmp: &Qmp) -> Result<Self, QmpError> {
        let below = |path: &str| qmp.execute("qom-list", json!({ "path": path }));
        Ok(Self {
            with_id: children(&below("/machine/peripheral").await?),
            without_id: children(&below("/machine/peripheral-anon").await?),
        })
    }

    /// Returns the devices plugged in or out since the machine's start, as reasons against a start elsewhere.
    pub fn changes(&self, machine: &Machine) -> Vec<String> {
        if machine.values("readconfig").next().is_some() {
            // The devices are in a file that may have changed.
            return Vec::new();
        }
        let given: Vec<Option<String>> = machine.values("device").map(id_of).collect();
        let named = |name: &str| given.iter().flatten().any(|id| id == name);
        let mut later: Vec<&Device> = self.with_id.iter().filter(|d| !named(&d.name)).collect();
        let first_later = given.iter().filter(|id| id.is_none()).count() + implied(machine);
        let comes_later =
            |device: &&Device| number(&device.name).is_some_and(|number| number >= first_later);
        later.extend(self.without_id.iter().filter(comes_later));
        let gone = machine.values("device").filter(|value| !waits(value));
        let gone = gone.filter_map(id_of);
        let gone = gone.filter(|id| self.with_id.iter().all(|device| device.name != *id));
        let mut gone: Vec<String> = gone.collect();
        if implied(machine) == 0 {
            // In this case the numbers count the command line's devices without an id.
            let nameless = machine
                .values("device")
                .filter(|value| id_of(value).is_none());
            let there = |place| {
                self.without_id
                    .iter()
                    .any(|d| number(&d.name) == Some(place))
            };
            let missing = nameless.enumerate().filter(|(place, _)| !there(*place));
            gone.extend(missing.map(|(place, value)| {
                let kind = value.split(',').next().unwrap_or_default();
                format!("device[{place}] ({kind})")
            }));
        }
        let shown = |device: &&Device| format!("{} ({})", device.name, device.kind);
        let mut changes = Vec::new();
        if !later.is_empty() {
            let names = later.iter().map(shown);
            changes.push(format!(
                "{} plugged in while it ran, and its command line lacks it: unplug it, or start the \
                 VM anew with it",
                listed(names)
            ));
        }
        if !gone.is_empty() {
            changes.push(format!(
                "{} unplugged while it ran, and its command line has it still: plug it in again, or \
                 start the VM anew without it",
                listed(gone.into_iter())
            ));
        }
        changes
    }
}

/// `device a was`, `devices a, b were`.
fn listed(names: impl Iterator<Item = String>) -> String {
    let mut names: Vec<String> = names.collect();
    let more = names.len().saturating_sub(SHOWN);
    names.truncate(SHOWN);
    let (what, were) = match names.len() {
        1 => ("device", "was"),
        _ => ("devices", "were"),
    };
    let rest = match more {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("{what} {}{rest} {were}", names.join(", "))
}

fn children(list: &Value) -> Vec<Device> {
    let entries = list.as_array().map_or(&[] as &[Value], Vec::as_slice);
    let device = |entry: &Value| {
        let kind = text(entry, "type");
        let kind = kind.strip_prefix("child<")?.strip_suffix('>')?;
        Some(Device {
            name: text(entry, "name"),
            kind: kind.to_owned(),
        })
    };
    entries.iter().filter_map(device).collect()
}

/// Returns the number of a device without an id, in the order of arrival.
fn number(name: &str) -> Option<usize> {
    let number = name.strip_prefix("device[")?.strip_suffix(']')?;
    number.parse().ok()
}

fn id_of(value: &str) -> Option<String> {
    property(value, "id")
}

/// Returns true for the standby of a pair, which is plugged in when the guest asks for it.
fn waits(value: &str) -> bool {
    value.contains("failover_pair_id")
}

/// Returns the number of devices without an id possibly made by other options.
fn implied(machine: &Machine) -> usize {
    let has_its_own = |drive: &&str| field(drive, "if").is_none_or(|(_, kind)| kind != "none");
    let drives = machine.values("drive").filter(has_its_own).count();
    drives + machine.values("virtfs").count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(words: &[&str]) -> Machine {
        let command: Vec<String> = ["qemu"]
            .iter()
            .chain(words)
            .map(|&w| w.to_owned())
            .collect();
        Machine::adopt(&command, |_| None).expect("a machine")
    }

    fn devices(with_id: &[&str], without_id: &[&str]) -> Devices {
        let list = |names: &[&str]| {
            let entry = |name: &&str| json!({ "name": name, "type": "child<virtio-rng-pci>" });
            let mut entries: Vec<Value> = names.iter().map(entry).collect();
            entries.push(json!({ "name": "type", "type": "string" }));
            children(&Value::Array(entries))
        };
        Devices {
            with_id: list(with_id),
            without_id: list(without_id),
        }
    }

    #[test]
    fn a_machine_as_its_command_line_says_has_no_changes() {
        let machine = machine(&[
            "-device",
            "virtio-net-pci,id=net0,netdev=n",
            "-device",
            r#"{"driver":"virtio-rng-pci","id":"rng0"}"#,
            "-device",
            "virtio-balloon",
            "-drive",
            "file=/x,if=virtio",
            "-drive",
            "file=/y,if=none,id=y",
            "-device",
            "vfio-pci,id=standby,failover_pair_id=net0",
        ]);
        let seen = devices(&["net0", "rng0"], &["device[0]", "device[1]"]);
        assert_eq!(seen.changes(&machine), [""; 0]);
    }

    #[test]
    fn what_came_later_and_what_has_gone_is_named() {
        let machine = machine(&["-device", "virtio-net-pci,id=net0", "-device", "virtio-rng"]);
        let seen = devices(&["net1"], &["device[0]", "device[2]"]);
        let changes = seen.changes(&machine);
        assert!(
            changes[0].starts_with(
                "devices net1 (virtio-rng-pci), device[2] (virtio-rng-pci) were plugged in"
            ),
            "{changes:?}"
        );
        assert!(
            changes[1].starts_with("device net0 was unplugged"),
            "{changes:?}"
        );
        let changes = devices(&["net0"], &[]).changes(&machine);
        assert!(
            changes[0].starts_with("device device[0] (virtio-rng) was unplugged"),
            "{changes:?}"
        );
        let many: Vec<String> = (0..20).map(|n| format!("d{n}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        let changes = devices(&many, &[]).changes(&machine);
        assert!(
            changes[0].contains("and 12 more were plugged in"),
            "{changes:?}"
        );
    }

    #[test]
    fn devices_that_a_file_names_are_not_guessed_at() {
        let machine = machine(&["-readconfig", "/etc/machine.conf"]);
        assert_eq!(
            devices(&["net0"], &["device[0]"]).changes(&machine),
            [""; 0]
        );
    }
}
