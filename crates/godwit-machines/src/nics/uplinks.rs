//! Taps and bridges of the host.

use godwit_net::clone::MOST_PAIRS;
use godwit_net::device::uplink::tap::TapError;
use godwit_net::device::uplink::{Uplink, tap};
use godwit_qemu::machine::{MachineNic, NicUplink};
use rtnetlink::packet_route::link::{BridgeVlanInfoFlags, LinkMessage};
use rtnetlink::{LinkBridgeVlan, LinkUnspec};

use crate::nics::links::Links;

/// An open uplink.
#[derive(Debug)]
pub struct OpenUplink {
    /// The tap.
    pub(crate) uplink: Uplink,
    /// The kernel's index of the tap: a later tap of the same name has another.
    pub(crate) index: u32,
}

/// Returns the name of a NIC's tap.
pub(crate) fn tap_of(node: &str, vm: &str, number: usize, nic: &MachineNic) -> String {
    match &nic.uplink {
        NicUplink::Tap(name) => name.clone(),
        NicUplink::Bridge(_) => tap_name(node, vm, number),
    }
}

/// Opens a NIC's uplink, whose tap has this name ([`tap_of`]). A tap for a bridge is created and plugged in, and goes
/// when closed.
///
/// # Errors
/// The reason for the failure, in a sentence with the remedy.
pub async fn open(nic: &MachineNic, tap: &str) -> Result<OpenUplink, String> {
    // If the kernel does not answer, plugging in the tap shows the error.
    if let Some(why) = Links::read().await.unwrap_or_default().vlans_missing(nic) {
        return Err(why);
    }
    let uplink = match &nic.uplink {
        NicUplink::Tap(_) => tap::open(tap, nic.queues).map_err(|error| error.to_string())?,
        NicUplink::Bridge(bridge) => {
            bridge_mtu(bridge)?;
            let made = tap::make(tap, nic.queues);
            let uplink = made.map_err(|error| match error {
                TapError::NotAllowed(_) => format!(
                    "no tap can be made for bridge {bridge}: the node lacks CAP_NET_ADMIN; give it that, or give the \
                     NIC a tap that you made with tap=NAME"
                ),
                error => error.to_string(),
            })?;
            plug(nic, tap).await?;
            uplink
        }
    };
    let index = tap::index(tap).map_err(|error| error.to_string())?;
    Ok(OpenUplink { uplink, index })
}

/// Returns the MTU of an uplink, which need not be open.
///
/// # Errors
/// The uplink does not exist.
pub(crate) fn mtu(uplink: &NicUplink) -> Result<u32, String> {
    match uplink {
        NicUplink::Tap(name) => {
            tap::check(name).map_err(|error| error.to_string())?;
            tap::mtu(name).map_err(|error| error.to_string())
        }
        NicUplink::Bridge(bridge) => bridge_mtu(bridge),
    }
}

/// Returns the reason why a machine's NIC cannot come here.
pub(crate) fn blocker(nic: &MachineNic, source_mtu: Option<u32>, links: &Links) -> Option<String> {
    let MachineNic { uplink, queues, .. } = nic;
    if !(1..=MOST_PAIRS).contains(&usize::from(*queues)) {
        return Some(format!(
            "it has {queues} pairs of queues, and NICs have 1 to {MOST_PAIRS} there"
        ));
    }
    let here = match mtu(uplink) {
        Ok(here) => here,
        Err(error) => return Some(error),
    };
    if let Some(there) = source_mtu.filter(|there| *there != here) {
        let (NicUplink::Tap(name) | NicUplink::Bridge(name)) = uplink;
        return Some(format!(
            "{name} has an MTU of {here} bytes there and of {there} here: give both the same"
        ));
    }
    if let Some(why) = links.blocker(nic) {
        return Some(why);
    }
    match uplink {
        // Only opening shows that a tap is in use.
        NicUplink::Tap(name) => tap::open(name, *queues)
            .err()
            .map(|error| error.to_string()),
        NicUplink::Bridge(_) => None,
    }
}

/// Returns the name of a VM's tap made by the node: the same after a restart, and different on another node.
fn tap_name(node: &str, vm: &str, number: usize) -> String {
    let text = format!("{node}/{vm}/{number}");
    let hash = blake3::hash(text.as_bytes()).to_hex();
    format!("gw{}", &hash[..10])
}

fn bridge_mtu(bridge: &str) -> Result<u32, String> {
    let missing = || {
        format!(
            "there is no bridge {bridge} here: make it with 'ip link add {bridge} type bridge' and 'ip link set {bridge} up'"
        )
    };
    let mtu = tap::mtu(bridge).map_err(|_| missing())?;
    if tap::is_bridge(bridge).map_err(|error| error.to_string())? {
        Ok(mtu)
    } else {
        Err(format!(
            "interface {bridge} is no bridge: name a bridge, or give the NIC a tap with tap=NAME"
        ))
    }
}

/// Returns the address of a tap made by the node; no packet is sent to this address. A bridge takes the lowest address
/// of its ports for its own. A bridge address that came and went with taps would make the host unreachable for a while.
fn address(tap: &str) -> Vec<u8> {
    let hash = blake3::hash(tap.as_bytes());
    [&[0xfe], &hash.as_bytes()[..5]].concat()
}

/// Plugs a NIC's tap into its bridge, if the NIC has one.
///
/// # Errors
/// The reason for the failure.
pub(crate) async fn plug(nic: &MachineNic, tap: &str) -> Result<(), String> {
    let NicUplink::Bridge(bridge) = &nic.uplink else {
        return Ok(());
    };
    let failed = |error: &dyn std::fmt::Display| {
        format!(
            "tap {tap} cannot be plugged into bridge {bridge} ({error}): the node needs CAP_NET_ADMIN"
        )
    };
    let mtu = bridge_mtu(bridge)?;
    let (connection, handle, _) = rtnetlink::new_connection().map_err(|error| failed(&error))?;
    let serving = godwit_context::spawn(connection);
    let plugged = async {
        let port = tap::index(tap).map_err(|error| failed(&error))?;
        let index = tap::index(bridge).map_err(|error| failed(&error))?;
        let plugs = LinkUnspec::new_with_name(tap)
            .mtu(mtu)
            .address(address(tap))
            .controller(index)
            .build();
        let link = handle.link();
        let plugged = link.set(plugs).execute().await;
        plugged.map_err(|error| failed(&error))?;
        if nic.vlan.is_some() || !nic.trunk.is_empty() {
            let every = LinkBridgeVlan::new(port)
                .vlan_range_start(1, BridgeVlanInfoFlags::empty())
                .vlan_range_end(4094, BridgeVlanInfoFlags::empty())
                .build();
            let removed = link.del_with_message(every).execute().await;
            removed.map_err(|error| failed(&error))?;
            let added = link.set(vlans(nic, port)).execute().await;
            added.map_err(|error| failed(&error))?;
        }
        // Brought up last: no packet may pass before the VLANs are set.
        let brings_up = LinkUnspec::new_with_name(tap).up().build();
        let up = link.set(brings_up).execute().await;
        up.map_err(|error| failed(&error))
    };
    let plugged = plugged.await;
    serving.abort();
    plugged
}

/// Returns the VLANs of a NIC's port in a bridge.
fn vlans(nic: &MachineNic, port: u32) -> LinkMessage {
    let mut vlans = LinkBridgeVlan::new(port);
    if let Some(vlan) = nic.vlan {
        vlans = vlans.vlan(
            vlan,
            BridgeVlanInfoFlags::Pvid | BridgeVlanInfoFlags::Untagged,
        );
    }
    for (first, last) in &nic.trunk {
        let none = BridgeVlanInfoFlags::empty();
        vlans = match first == last {
            true => vlans.vlan(*first, none),
            false => vlans
                .vlan_range_start(*first, none)
                .vlan_range_end(*last, none),
        };
    }
    vlans.build()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_taps_fit_and_differ() {
        let name = tap_name("a", "web", 0);
        assert!(name.len() <= tap::MOST_NAME);
        assert_eq!(name, tap_name("a", "web", 0));
        for other in [
            tap_name("b", "web", 0),
            tap_name("a", "db", 0),
            tap_name("a", "web", 1),
        ] {
            assert_ne!(name, other);
        }
    }

    #[test]
    fn an_uplink_that_is_missing_is_named_with_what_to_do() {
        let nic = |uplink: NicUplink| MachineNic {
            mac: String::from("52:54:00:00:00:01"),
            uplink,
            queues: 1,
            vlan: None,
            trunk: Vec::new(),
        };
        for (uplink, command) in [
            (NicUplink::Tap(String::from("godwit-none")), "ip tuntap add"),
            (
                NicUplink::Bridge(String::from("godwit-none")),
                "ip link add",
            ),
        ] {
            let why = blocker(&nic(uplink), None, &Links::default()).expect("is missing");
            assert!(
                why.contains("godwit-none") && why.contains(command),
                "{why}"
            );
        }
        let lo = nic(NicUplink::Bridge(String::from("lo")));
        let why = blocker(&lo, None, &Links::default()).expect("is no bridge");
        assert!(why.contains("no bridge"), "{why}");
        let many = MachineNic { queues: 9, ..lo };
        let why = blocker(&many, None, &Links::default()).expect("are too many");
        assert!(why.contains("9 pairs of queues"), "{why}");
    }
}
