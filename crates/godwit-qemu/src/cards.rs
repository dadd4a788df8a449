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
    let kind = |value: &str| {
        let kind = value.split(',').next().unwrap_or_default();
        kind.trim_start_matches("driver=").to_owned()
    };
    let nics = machine.values("nic").map(kind);
    let nics = nics.filter(|kind| kind != "none");
    let nets = machine.values("net").filter(|value| kind(value) == "nic");
    let nets = nets
        .map(|value| field(value, "model").map_or_else(|| String::from("nic"), |(_, model)| model));
    let backends = machine.nic_backends();
    let is_served = |value: &str| {
        let netdev = property(value, "netdev");
        netdev.is_some_and(|netdev| backends.iter().any(|(id, _)| *id == netdev))
    };
    let devices = machine.values("device").filter_map(|value| {
        let driver = property(value, "driver").unwrap_or_else(|| kind(value));
        Some(driver).filter(|driver| !is_served(value) && is_card(driver))
    });
    nics.chain(nets).chain(devices).collect()
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

    #[test]
    fn cards_that_a_node_serves_are_not_among_qemus_own() {
        let words = [
            "qemu",
            "-nic",
            "user,mac=52:54:00:00:00:01",
            "-net",
            "nic,model=e1000",
            "-net",
            "user",
            "-chardev",
            "socket,path=/n/nics/web0.vhost,id=c0,reconnect-ms=100",
            "-netdev",
            "vhost-user,id=n0,chardev=c0",
            "-device",
            "virtio-net-pci,netdev=n0,mac=52:54:00:00:00:07,romfile=",
            "-device",
            "virtio-net-pci,netdev=n",
            "-device",
            r#"{"driver":"igb"}"#,
            "-device",
            "virtio-rng-pci",
            "-nic",
            "none",
        ];
        let command: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
        let nic = MachineNic {
            mac: String::from("52:54:00:00:00:07"),
            uplink: NicUplink::Tap(String::from("tap0")),
            queues: 1,
            vlan: None,
            trunk: Vec::new(),
        };
        let machine = Machine::adopt(&command, |_| Some(Served::Nic(nic.clone())));
        let machine = machine.expect("a machine");
        assert_eq!(own(&machine), ["user", "e1000", "virtio-net-pci", "igb"]);
    }
}
