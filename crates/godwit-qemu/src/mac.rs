//! MAC addresses of VMs.
//!
//! QEMU gives the first network card of every machine the same MAC address, which breaks two machines on one bridge.
//! Here each card without a given address has a separate one. The address is part of the machine, moves along, and
//! stays the same when the machine is started again here.

use std::fmt;

use serde_json::Value;

/// Prefixes of the names of network card devices.
const CARDS: [&str; 12] = [
    "virtio-net",
    "e1000",
    "igb",
    "rtl8139",
    "vmxnet3",
    "pcnet",
    "ne2k",
    "tulip",
    "i825",
    "usb-net",
    "dp8393x",
    "xgmac",
];

/// Options that keep QEMU from adding a network card.
const ANSWERED: [&str; 4] = ["nodefaults", "nic", "net", "netdev"];

/// A locally administered unicast address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mac([u8; 6]);

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// The owner of network cards.
#[derive(Clone, Copy, Debug)]
pub struct Owner<'a> {
    /// Distinguishes hosts with equally named nodes and VMs.
    pub host: &'a str,
    /// Node that runs the VM.
    pub node: &'a str,
    /// Name of the VM.
    pub vm: &'a str,
}

/// First number of the cards served by the node; QEMU's own cards come before.
const SERVED: usize = 1 << 16;

impl Owner<'_> {
    /// Returns the address of a NIC served by the node, counted from 0.
    pub fn served(&self, nic: usize) -> String {
        self.mac(SERVED + nic).to_string()
    }

    fn mac(&self, card: usize) -> Mac {
        let mut hash = blake3::Hasher::new_derive_key("godwit network card 1");
        for part in [self.host, self.node, self.vm] {
            hash.update(&(part.len() as u64).to_le_bytes());
            hash.update(part.as_bytes());
        }
        hash.update(&(card as u64).to_le_bytes());
        let mut bytes = [0; 6];
        bytes.copy_from_slice(&hash.finalize().as_bytes()[..6]);
        // Locally administered, and no group's.
        bytes[0] = bytes[0] & 0xfc | 0x02;
        Mac(bytes)
    }
}

/// Returns this host's identity, empty if there is none.
pub fn host() -> String {
    std::fs::read_to_string("/etc/machine-id").unwrap_or_default()
}

/// Returns QEMU's arguments with an address for each network card without one. `usual` is true if QEMU adds a card by
/// default.
pub fn with_addresses(arguments: Vec<String>, owner: Owner<'_>, usual: bool) -> Vec<String> {
    let mut cards = 0;
    let mut next = || {
        cards += 1;
        owner.mac(cards - 1)
    };
    let mut option = String::new();
    let mut answered = false;
    let mut words: Vec<String> = arguments
        .into_iter()
        .map(|word| {
            let value = with_address(&option, word, &mut next);
            option = value.trim_start_matches('-').to_owned();
            answered |= value.starts_with('-') && ANSWERED.contains(&option.as_str());
            value
        })
        .collect();
    if usual && !answered {
        words.extend([String::from("-nic"), format!("user,mac={}", next())]);
    }
    words
}

/// Returns the value of an option, with an address if a network card has none.
fn with_address(option: &str, value: String, next: &mut impl FnMut() -> Mac) -> String {
    if value.starts_with('{') {
        return json_with_address(option, value, next);
    }
    let kind = value.split(',').next().unwrap_or_default();
    let names = |key: &str| value.split(',').any(|part| part.starts_with(key));
    let key = match option {
        "nic" if kind != "none" => "mac=",
        "net" if kind == "nic" => "macaddr=",
        "device" if is_card(kind.trim_start_matches("driver=")) => "mac=",
        _ => return value,
    };
    // The number of a card does not depend on the addresses given to other cards.
    let mac = next();
    if names(key) {
        value
    } else {
        format!("{value},{key}{mac}")
    }
}

fn json_with_address(option: &str, value: String, next: &mut impl FnMut() -> Mac) -> String {
    let Ok(Value::Object(mut device)) = serde_json::from_str(&value) else {
        // QEMU reports the error.
        return value;
    };
    let card = device
        .get("driver")
        .and_then(Value::as_str)
        .is_some_and(is_card);
    if option != "device" || !card {
        return value;
    }
    let mac = next().to_string();
    device.entry("mac").or_insert(Value::String(mac));
    Value::Object(device).to_string()
}

pub(crate) fn is_card(driver: &str) -> bool {
    CARDS.iter().any(|card| driver.starts_with(card))
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWNER: Owner<'static> = Owner {
        host: "h",
        node: "a",
        vm: "web",
    };

    fn given(arguments: &[&str], usual: bool) -> Vec<String> {
        let arguments = arguments.iter().map(|&word| word.to_owned()).collect();
        with_addresses(arguments, OWNER, usual)
    }

    #[test]
    fn addresses_are_stable_and_each_card_has_its_own() {
        let mac = OWNER.mac(0);
        assert_eq!(mac, OWNER.mac(0));
        assert_eq!(mac.0[0] & 3, 2, "{mac}");
        let others = [
            OWNER.mac(1),
            Owner { vm: "db", ..OWNER }.mac(0),
            Owner { node: "b", ..OWNER }.mac(0),
            Owner { host: "i", ..OWNER }.mac(0),
            // The parts are kept apart.
            Owner {
                node: "aw",
                vm: "eb",
                ..OWNER
            }
            .mac(0),
        ];
        assert!(!others.contains(&mac));
    }

    #[test]
    fn every_kind_of_card_gets_an_address() {
        let (first, second) = (OWNER.mac(0), OWNER.mac(1));
        for (arguments, card) in [
            (
                ["-nic", "tap,ifname=t"],
                format!("tap,ifname=t,mac={first}"),
            ),
            (["--nic", "user"], format!("user,mac={first}")),
            (
                ["-net", "nic,model=e1000"],
                format!("nic,model=e1000,macaddr={first}"),
            ),
            (
                ["-device", "virtio-net-pci,netdev=n"],
                format!("virtio-net-pci,netdev=n,mac={first}"),
            ),
            (
                ["-device", "driver=e1000e"],
                format!("driver=e1000e,mac={first}"),
            ),
            (
                ["-device", r#"{"driver":"igb"}"#],
                format!(r#"{{"driver":"igb","mac":"{first}"}}"#),
            ),
        ] {
            assert_eq!(given(&arguments, false), [arguments[0], &card]);
        }
        assert_eq!(
            given(&["-nic", "user", "-nic", "user"], true),
            [
                "-nic",
                &format!("user,mac={first}"),
                "-nic",
                &format!("user,mac={second}")
            ]
        );
    }

    #[test]
    fn what_is_no_card_or_has_an_address_stays_as_it_is() {
        for arguments in [
            &["-nic", "none"][..],
            &["-nic", "user,mac=52:54:00:00:00:01"],
            &["-net", "nic,macaddr=52:54:00:00:00:01"],
            &["-net", "user"],
            &["-device", "virtio-rng-pci"],
            &[
                "-device",
                r#"{"driver":"virtio-net-pci","mac":"52:54:00:00:00:01"}"#,
            ],
            &["-device", "{nonsense"],
            &["-nodefaults", "-append", "virtio-net"],
        ] {
            assert_eq!(given(arguments, false), arguments);
        }
    }

    #[test]
    fn the_card_that_qemu_adds_by_itself_gets_one_too() {
        let usual = format!("user,mac={}", OWNER.mac(0));
        assert_eq!(
            given(&["-cpu", "max"], true),
            ["-cpu", "max", "-nic", &usual]
        );
        assert_eq!(given(&["-cpu", "max"], false), ["-cpu", "max"]);
        for answer in ["-nodefaults", "--nic", "-netdev"] {
            assert_eq!(given(&[answer, "none"], true), [answer, "none"]);
        }
    }
}
