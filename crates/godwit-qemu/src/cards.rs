//! Network cards served by QEMU itself. The cards move with the rest of the machine; packets in flight do not.

use serde_json::json;

use crate::mac::is_card;
use crate::machine::{Machine, field, property};
use crate::monitor::qmp::{Qmp, QmpError};

/// Number of announcements to the network, and their intervals in milliseconds, as in QEMU's own announcements.
const ROUNDS: u32 = 5;
const FIRST_MS: u32 = 50;
const STEP_MS: u32 = 100;
const LONGEST_MS: u32 = 550;

/// Returns a machine's cards served by QEMU, as named on the command line.
pub fn own(machine: &Machine) -> Vec<String> {
    let nameless = nameless(machine);
    nameless
        .chain(devices(machine).map(|(card, _)| card))
        .collect()
}

/// Returns the ids of the network back ends of a machine's cards served by QEMU.
///
/// # Errors
/// The cards whose back ends have no ids, as named on the command line.
pub fn backends(machine: &Machine) -> Result<Vec<String>, Vec<String>> {
    let nameless: Vec<String> = nameless(machine).collect();
    match nameless.is_empty() {
        true => Ok(devices(machine)
            .filter_map(|(_, backend)| backend)
            .collect()),
        false => Err(nameless),
    }
}

fn kind(value: &str) -> String {
    let kind = value.split(',').next().unwrap_or_default();
    kind.trim_start_matches("driver=").to_owned()
}

/// Returns the cards that come with a back end without an id.
fn nameless(machine: &Machine) -> impl Iterator<Item = String> {
    let nics = machine.values("nic").map(kind);
    let nics = nics.filter(|kind| kind != "none");
    let nets = machine.values("net").filter(|value| kind(value) == "nic");
    let nets = nets
        .map(|value| field(value, "model").map_or_else(|| String::from("nic"), |(_, model)| model));
    nics.chain(nets)
}

/// Returns the card devices that no node serves, with the ids of their back ends.
fn devices(machine: &Machine) -> impl Iterator<Item = (String, Option<String>)> {
    let served = machine.nic_backends();
    machine.values("device").filter_map(move |value| {
        let driver = property(value, "driver").unwrap_or_else(|| kind(value));
        let backend = property(value, "netdev");
        let is_served = served.iter().any(|(id, _)| Some(id) == backend.as_ref());
        (!is_served && is_card(&driver)).then_some((driver, backend))
    })
}

/// Announces the machine's new place to the network, for each network card. QEMU's own announcement comes with the
/// arrival of the machine's memory, before the owner is decided.
///
/// # Errors
/// [`QmpError`].
pub async fn announce(qmp: &Qmp) -> Result<(), QmpError> {
    let when = json!({ "initial": FIRST_MS, "step": STEP_MS, "max": LONGEST_MS, "rounds": ROUNDS });
    qmp.execute("announce-self", when).await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::{MachineNic, NicUplink, Served};

    fn machine(words: &[&str]) -> Machine {
        let served = [
            "qemu",
            "-chardev",
            "socket,path=/n/nics/web0.vhost,id=c0,reconnect-ms=100",
            "-netdev",
            "vhost-user,id=n0,chardev=c0",
            "-device",
            "virtio-net-pci,netdev=n0,mac=52:54:00:00:00:07,romfile=",
            "-device",
            "virtio-rng-pci",
        ];
        let words = served.iter().chain(words);
        let command: Vec<String> = words.map(|&word| word.to_owned()).collect();
        let nic = MachineNic {
            mac: String::from("52:54:00:00:00:07"),
            uplink: NicUplink::Tap(String::from("tap0")),
            queues: 1,
            vlan: None,
            trunk: Vec::new(),
        };
        let machine = Machine::adopt(&command, |_| Some(Served::Nic(nic.clone())));
        machine.expect("a machine")
    }

    #[test]
    fn cards_that_a_node_serves_are_not_among_qemus_own() {
        let machine = machine(&[
            "-nic",
            "user,mac=52:54:00:00:00:01",
            "-net",
            "nic,model=e1000",
            "-net",
            "user",
            "-device",
            "virtio-net-pci,netdev=n",
            "-device",
            r#"{"driver":"igb"}"#,
            "-nic",
            "none",
        ]);
        assert_eq!(own(&machine), ["user", "e1000", "virtio-net-pci", "igb"]);
        let nameless = backends(&machine).expect_err("two back ends have no id");
        assert_eq!(nameless, ["user", "e1000"]);
    }

    #[test]
    fn back_ends_are_those_of_the_cards_that_qemu_serves() {
        let machine = machine(&[
            "-netdev",
            "tap,id=n,ifname=tap1",
            "-device",
            "e1000,netdev=n",
            "-device",
            r#"{"driver":"igb","netdev":"m"}"#,
            "-device",
            "rtl8139",
        ]);
        assert_eq!(backends(&machine), Ok(vec!["n".into(), "m".into()]));
    }
}
