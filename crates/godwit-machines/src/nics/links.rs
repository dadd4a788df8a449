//! The kernel's view of the host's interfaces, and its meaning for a NIC.

use std::io;

use futures_util::TryStreamExt as _;
use godwit_qemu::machine::{MachineNic, NicUplink};
use rtnetlink::packet_route::link::{
    BridgePortState, InfoBridge, InfoBridgePort, InfoData, InfoKind, InfoPortData, LinkAttribute,
    LinkFlags, LinkInfo, LinkMessage,
};
use rtnetlink::sys::protocols::NETLINK_ROUTE;
use rtnetlink::sys::{AsyncSocket as _, AsyncSocketExt as _, SocketAddr, TokioSocket};
use serde::{Deserialize, Serialize};

/// The kernel's multicast group of changed interfaces, as a bit.
const CHANGED_LINKS: u32 = 1;

/// An interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Link {
    index: u32,
    name: String,
    is_up: bool,
    has_link: bool,
    is_tap: bool,
    /// True if the interface is a bridge with VLAN filtering.
    filters_vlans: bool,
    /// The index of the bridge whose port the interface is.
    bridge: Option<u32>,
    /// The state of the interface as a port of the bridge.
    port: Option<BridgePortState>,
}

/// The interfaces of the host.
#[derive(Clone, Debug, Default)]
pub struct Links(Vec<Link>);

/// The way of a NIC's packets between its tap and the network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Way {
    /// Packets pass.
    Passes,
    /// The open tap no longer exists. Another tap may have its name.
    Gone,
    /// The node's tap is not in its bridge, which exists.
    Unplugged,
    /// Packets will pass in a moment: the bridge has not noticed the open tap yet.
    Begins,
    /// Packets will pass without help; the reason why they do not yet, in a sentence.
    Comes(String),
    /// Packets need the operator's help; the remedy, in a sentence.
    Blocked(String),
}

/// The placing of a NIC on a host, for the other node of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NicPlacing {
    /// True if the tap is in a bridge.
    is_bridged: bool,
    /// True if a port of that bridge other than a tap has a link.
    leads_outside: bool,
}

impl Links {
    /// Asks the kernel.
    ///
    /// # Errors
    /// The kernel does not answer.
    pub async fn read() -> io::Result<Self> {
        let (connection, handle, _) = rtnetlink::new_connection()?;
        let serving = godwit_context::spawn(connection);
        let asked: Result<Vec<LinkMessage>, _> = handle.link().get().execute().try_collect().await;
        serving.abort();
        let links = asked.map_err(io::Error::other)?;
        Ok(Self(links.iter().map(Link::of).collect()))
    }

    fn named(&self, name: &str) -> Option<&Link> {
        self.0.iter().find(|link| link.name == name)
    }

    /// Returns the present or future bridge of a NIC's tap.
    fn bridge_of(&self, nic: &MachineNic) -> Option<&Link> {
        match &nic.uplink {
            NicUplink::Bridge(bridge) => self.named(bridge),
            NicUplink::Tap(tap) => {
                let bridge = self.named(tap)?.bridge?;
                self.0.iter().find(|link| link.index == bridge)
            }
        }
    }

    /// Returns the way of a NIC whose tap is open under this name and index.
    pub(crate) fn way(&self, nic: &MachineNic, tap: &str, index: u32) -> Way {
        let Some(own) = self.named(tap).filter(|link| link.index == index) else {
            return Way::Gone;
        };
        if let NicUplink::Bridge(bridge) = &nic.uplink {
            match self.named(bridge) {
                None => return Way::Blocked(format!("there is no bridge {bridge} any more")),
                Some(bridge) if own.bridge != Some(bridge.index) => return Way::Unplugged,
                Some(_) => {}
            }
        }
        if !own.is_up {
            return Way::Blocked(format!(
                "tap {tap} is down: 'ip link set {tap} up' brings it up"
            ));
        }
        let bridge = own.bridge;
        let Some(bridge) = self.0.iter().find(|link| Some(link.index) == bridge) else {
            return Way::Passes;
        };
        if !bridge.is_up {
            return Way::Blocked(down(&bridge.name));
        }
        let lets_nothing_pass = |state| {
            let name = &bridge.name;
            format!("bridge {name} lets nothing pass to tap {tap}: the port is {state}")
        };
        match own.port {
            None | Some(BridgePortState::Forwarding) => Way::Passes,
            Some(BridgePortState::Disabled) => Way::Begins,
            Some(state @ (BridgePortState::Listening | BridgePortState::Learning)) => {
                Way::Comes(lets_nothing_pass(state))
            }
            Some(state) => Way::Blocked(lets_nothing_pass(state)),
        }
    }

    /// Returns the reason why an arriving NIC would have no network here, before its tap is open.
    pub(crate) fn blocker(&self, nic: &MachineNic) -> Option<String> {
        let bridge = self.bridge_of(nic)?;
        match bridge.is_up {
            true => self.vlans_missing(nic),
            false => Some(down(&bridge.name)),
        }
    }

    /// Returns the reason why a NIC's VLANs are not kept apart.
    pub(crate) fn vlans_missing(&self, nic: &MachineNic) -> Option<String> {
        let bridge = self.bridge_of(nic)?;
        let wants_vlans = nic.vlan.is_some() || !nic.trunk.is_empty();
        (wants_vlans && !bridge.filters_vlans).then(|| {
            let name = &bridge.name;
            format!(
                "bridge {name} does not keep VLANs apart: 'ip link set {name} type bridge vlan_filtering 1' lets it"
            )
        })
    }

    /// Returns the present or future placings of NICs.
    pub(crate) fn placings(&self, nics: &[MachineNic]) -> Vec<NicPlacing> {
        let placing = |nic| {
            let bridge = self.bridge_of(nic);
            let is_outside = |bridge: &Link| {
                let mut ports = self.0.iter();
                ports.any(|link| link.bridge == Some(bridge.index) && !link.is_tap && link.has_link)
            };
            NicPlacing {
                is_bridged: bridge.is_some(),
                leads_outside: bridge.is_some_and(is_outside),
            }
        };
        nics.iter().map(placing).collect()
    }

    /// Returns the differences between this node, the destination, and the source that may cut the machine off.
    pub(crate) fn notices(
        &self,
        here: &str,
        nics: &[MachineNic],
        theirs: &[NicPlacing],
    ) -> Vec<String> {
        let own = self.placings(nics);
        let notices = nics.iter().zip(own.iter().zip(theirs)).enumerate();
        notices
            .filter_map(|(number, (nic, (own, theirs)))| {
                let (NicUplink::Tap(name) | NicUplink::Bridge(name)) = &nic.uplink;
                if theirs.is_bridged && !own.is_bridged {
                    Some(format!(
                        "NIC {number}: tap {name} is in no bridge at node '{here}', and is in one at the source"
                    ))
                } else if theirs.leads_outside && !own.leads_outside {
                    Some(format!(
                        "NIC {number}: the bridge of {name} at node '{here}' has no port with a link that leads outside, and \
                         has one at the source"
                    ))
                } else {
                    None
                }
            })
            .collect()
    }
}

fn down(bridge: &str) -> String {
    format!("bridge {bridge} is down: 'ip link set {bridge} up' brings it up")
}

impl Link {
    fn of(message: &LinkMessage) -> Self {
        let flags = message.header.flags;
        let mut link = Self {
            index: message.header.index,
            is_up: flags.contains(LinkFlags::Up),
            has_link: flags.contains(LinkFlags::LowerUp),
            ..Self::default()
        };
        for attribute in &message.attributes {
            match attribute {
                LinkAttribute::IfName(name) => link.name.clone_from(name),
                LinkAttribute::Controller(index) => link.bridge = Some(*index),
                LinkAttribute::LinkInfo(infos) => infos.iter().for_each(|info| link.learn(info)),
                _ => {}
            }
        }
        // A member of a bond or a VRF is not in a bridge.
        link.bridge = link.bridge.filter(|_| link.port.is_some());
        link
    }

    fn learn(&mut self, info: &LinkInfo) {
        match info {
            LinkInfo::Kind(kind) => self.is_tap = *kind == InfoKind::Tun,
            LinkInfo::Data(InfoData::Bridge(facts)) => {
                self.filters_vlans = facts.contains(&InfoBridge::VlanFiltering(true));
            }
            LinkInfo::PortData(InfoPortData::BridgePort(facts)) => {
                self.port = facts.iter().find_map(|fact| match fact {
                    InfoBridgePort::State(state) => Some(*state),
                    _ => None,
                });
            }
            _ => {}
        }
    }
}

/// Notifications of changed interfaces.
pub(crate) struct Changes(TokioSocket);

impl Changes {
    /// Opens the socket. Changes count from now on.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(crate) fn open() -> io::Result<Self> {
        let mut socket = TokioSocket::new(NETLINK_ROUTE)?;
        socket
            .socket_mut()
            .bind(&SocketAddr::new(0, CHANGED_LINKS))?;
        Ok(Self(socket))
    }

    /// Waits for the next change. A notification lost for lack of room counts as a change.
    pub(crate) async fn next(&self) {
        let mut message = Vec::with_capacity(4096);
        let _ = self.0.recv(&mut message).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn links() -> Links {
        let link = |index, name: &str| Link {
            index,
            name: name.to_owned(),
            is_up: true,
            has_link: true,
            ..Link::default()
        };
        let bridge = link(1, "br0");
        let port = |index, name: &str| Link {
            bridge: Some(1),
            port: Some(BridgePortState::Forwarding),
            ..link(index, name)
        };
        let tap = Link {
            is_tap: true,
            ..port(3, "tap0")
        };
        Links(vec![bridge, port(2, "up0"), tap])
    }

    fn nic(uplink: NicUplink) -> MachineNic {
        MachineNic {
            mac: String::from("52:54:00:00:00:01"),
            uplink,
            queues: 1,
            vlan: None,
            trunk: Vec::new(),
        }
    }

    fn bridge() -> MachineNic {
        nic(NicUplink::Bridge(String::from("br0")))
    }

    fn tap() -> MachineNic {
        nic(NicUplink::Tap(String::from("tap0")))
    }

    #[test]
    fn what_keeps_packets_from_the_network_is_told() {
        type Change = fn(&mut Vec<Link>);
        type Claim = fn(Way) -> bool;
        let changes: [(Change, Claim); 10] = [
            (|_| {}, |way| way == Way::Passes),
            (|links| links.truncate(2), |way| way == Way::Gone),
            (|links| links[2].index = 9, |way| way == Way::Gone),
            (|links| links[2].bridge = None, |way| way == Way::Unplugged),
            (|links| links[0].index = 9, |way| way == Way::Unplugged),
            (
                |links| drop(links.remove(0)),
                |way| matches!(way, Way::Blocked(_)),
            ),
            (
                |links| links[2].is_up = false,
                |way| matches!(way, Way::Blocked(_)),
            ),
            (
                |links| links[0].is_up = false,
                |way| matches!(way, Way::Blocked(_)),
            ),
            (
                |links| links[2].port = Some(BridgePortState::Disabled),
                |way| way == Way::Begins,
            ),
            (
                |links| links[2].port = Some(BridgePortState::Listening),
                |way| matches!(way, Way::Comes(_)),
            ),
        ];
        for (number, (change, is_told)) in changes.into_iter().enumerate() {
            let mut links = links();
            change(&mut links.0);
            let way = links.way(&bridge(), "tap0", 3);
            assert!(is_told(way.clone()), "{number}: {way:?}");
        }
    }

    #[test]
    fn a_tap_of_somebodys_need_not_be_in_a_bridge() {
        let mut links = links();
        links.0[2].bridge = None;
        assert_eq!(links.way(&tap(), "tap0", 3), Way::Passes);
    }

    #[test]
    fn a_bridge_that_is_down_or_knows_no_vlans_is_in_the_way() {
        let mut links = links();
        assert_eq!(links.blocker(&bridge()), None);
        let in_vlan = MachineNic {
            vlan: Some(7),
            ..bridge()
        };
        assert!(
            links
                .blocker(&in_vlan)
                .is_some_and(|why| why.contains("vlan_filtering"))
        );
        links.0[0].filters_vlans = true;
        assert_eq!(links.blocker(&in_vlan), None);
        links.0[0].is_up = false;
        for nic in [bridge(), tap()] {
            assert!(
                links
                    .blocker(&nic)
                    .is_some_and(|why| why.contains("br0 is down"))
            );
        }
    }

    #[test]
    fn a_network_that_leads_less_far_than_the_sources_is_told() {
        let nics = [bridge(), tap()];
        let theirs = links().placings(&nics);
        assert_eq!(links().notices("b", &nics, &theirs), [] as [String; 0]);
        let mut alone = links();
        alone.0[1].has_link = false;
        let told = alone.notices("b", &nics, &theirs);
        assert!(
            told.len() == 2 && told[0].contains("leads outside"),
            "{told:?}"
        );
        let mut unplugged = links();
        unplugged.0[2].bridge = None;
        let told = unplugged.notices("b", &nics, &theirs);
        assert!(
            told.len() == 1 && told[0].contains("in no bridge"),
            "{told:?}"
        );
        assert_eq!(
            links().notices("b", &nics, &unplugged.placings(&nics)),
            [] as [String; 0]
        );
    }
}
