//! The NICs requested for a new machine.

use godwit_api::{ErrorBody, ErrorCode, RunNic};
use godwit_net::clone::MOST_PAIRS;
use godwit_net::frame::vlan::Vlan;
use godwit_net::mac::Mac;
use godwit_qemu::mac::Owner;
use godwit_qemu::machine::{MachineNic, NicUplink};

use crate::nics::named::NamedNics;

/// Most NICs of a machine.
pub(crate) const MOST_NICS: usize = 8;

/// Most VLAN ranges of a NIC.
const MOST_RANGES: usize = 64;

/// Returns the requested NICs, each with an address.
///
/// # Errors
/// [`ErrorCode::Invalid`] if a NIC names no uplink or two, or an invalid address.
pub fn nics(owner: Owner<'_>, wanted: &[RunNic]) -> Result<Vec<MachineNic>, ErrorBody> {
    let vm = owner.vm;
    let invalid = |text: String, hint: &str| {
        ErrorBody::new(ErrorCode::Invalid, format!("VM {vm}: {text}")).hint(hint)
    };
    if wanted.len() > MOST_NICS {
        let text = format!("{} NICs are too many", wanted.len());
        return Err(invalid(text, "give at most 8"));
    }
    let mut nics: Vec<MachineNic> = Vec::with_capacity(wanted.len());
    for (number, nic) in wanted.iter().enumerate() {
        let made = one(nic, || owner.served(number)).map_err(|Odd { why, hint }| {
            let text = format!("NIC {number}: {why}");
            invalid(text, hint)
        })?;
        let MachineNic { mac, uplink, .. } = &made;
        if nics.iter().any(|other| other.mac == *mac) {
            let text = format!("two of its NICs have the MAC address {mac}");
            return Err(invalid(text, "give each its own, or none"));
        }
        if matches!(uplink, NicUplink::Tap(_)) && nics.iter().any(|other| other.uplink == *uplink) {
            let text = format!("NIC {number} names a tap that another of its NICs has");
            return Err(invalid(text, "give each its own tap"));
        }
        nics.push(made);
    }
    Ok(nics)
}

/// An error in a requested NIC.
#[derive(Debug)]
pub(super) struct Odd {
    /// Words to follow the NIC's name and a colon.
    pub(super) why: String,
    /// The remedy.
    pub(super) hint: &'static str,
}

/// Returns a requested NIC, with `address` unless the request names one.
pub(super) fn one(nic: &RunNic, address: impl FnOnce() -> String) -> Result<MachineNic, Odd> {
    let uplink = match (&nic.tap, &nic.bridge) {
        (Some(tap), None) => NicUplink::Tap(tap.clone()),
        (None, Some(bridge)) => NicUplink::Bridge(bridge.clone()),
        _ => {
            return Err(Odd {
                why: String::from("it must name either a tap or a bridge"),
                hint: "such as tap=tap0 or bridge=br0",
            });
        }
    };
    let mac = match &nic.mac {
        None => address(),
        Some(text) => {
            let mac: Mac = text.parse().map_err(|error| Odd {
                why: format!("{error}"),
                hint: "leave it out, and the node chooses one",
            })?;
            mac.to_string()
        }
    };
    let queues = nic.queues.unwrap_or(1);
    if !(1..=MOST_PAIRS).contains(&usize::from(queues)) {
        return Err(Odd {
            why: match queues {
                0 => String::from("it needs a pair of queues"),
                _ => format!("{queues} pairs of queues are too many"),
            },
            hint: "give queues=1 to queues=8, or leave it out",
        });
    }
    let trunk = trunk(nic.trunk.as_deref().unwrap_or_default())?;
    let has_vlans = nic.vlan.is_some() || !trunk.is_empty();
    if has_vlans && matches!(uplink, NicUplink::Tap(_)) {
        return Err(Odd {
            why: String::from("a tap that you made is in the VLANs that you gave its port"),
            hint: "leave vlan and trunk out, or name a bridge",
        });
    }
    if let Some(odd) = nic.vlan.filter(|vlan| Vlan::new(*vlan).is_none()) {
        return Err(Odd {
            why: format!("there is no VLAN {odd}"),
            hint: "VLANs are 1 to 4094",
        });
    }
    Ok(MachineNic {
        mac,
        uplink,
        queues,
        vlan: nic.vlan,
        trunk,
    })
}

/// Parses VLANs: numbers and ranges with + between them. An empty text means none.
fn trunk(text: &str) -> Result<Vec<(u16, u16)>, Odd> {
    let ranges = text.split('+').filter(|_| !text.is_empty());
    let ranges = ranges.map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let number = |text: &str| text.parse().ok().and_then(Vlan::new).map(Vlan::number);
        let ends = number(first).zip(number(last));
        ends.filter(|(first, last)| first <= last)
            .ok_or_else(|| Odd {
                why: format!("{range:?} is neither a VLAN nor a range of them"),
                hint: "such as trunk=10-20 or trunk=5+10-20; VLANs are 1 to 4094",
            })
    });
    let ranges = ranges.collect::<Result<Vec<_>, Odd>>()?;
    if ranges.len() > MOST_RANGES {
        return Err(Odd {
            why: format!("{} ranges of VLANs are too many", ranges.len()),
            hint: "give at most 64",
        });
    }
    Ok(ranges)
}

/// Returns true if a NIC known to this node has this address, even one on another node by now.
pub(super) fn is_known(nics: &NamedNics, mac: &str) -> bool {
    let has = |nics: &[MachineNic]| nics.iter().any(|nic| nic.mac == mac);
    nics.with_address(mac).is_some() || nics.of_machines().iter().any(|vm| has(&vm.nics))
}

/// Names the present owner of one of these addresses, in a sentence: a VM other than `except`, or a NIC with a name.
pub(crate) fn address_taken(
    named: &NamedNics,
    except: &str,
    nics: &[MachineNic],
) -> Option<String> {
    let here = &named.context.config.name;
    for nic in nics {
        if let Some(other) = named.with_address(&nic.mac) {
            let (mac, name) = (&nic.mac, &other.name);
            return Some(format!(
                "NIC {name} of node '{here}' has the MAC address {mac} already"
            ));
        }
    }
    named.of_machines().iter().find_map(|vm| {
        if vm.vm == except || !vm.is_here {
            return None;
        }
        let taken = nics
            .iter()
            .find(|nic| vm.nics.iter().any(|other| other.mac == nic.mac))?;
        let (mac, vm) = (&taken.mac, &vm.vm);
        Some(format!(
            "VM {vm} of node '{here}' has the MAC address {mac} already"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWNER: Owner<'static> = Owner {
        host: "h",
        node: "a",
        vm: "web",
    };

    fn tap(name: &str) -> RunNic {
        RunNic {
            tap: Some(String::from(name)),
            ..RunNic::default()
        }
    }

    #[test]
    fn nics_without_an_address_get_stable_ones() {
        let wanted = [tap("t0"), tap("t1")];
        let made = nics(OWNER, &wanted).expect("is fine");
        assert_ne!(made[0].mac, made[1].mac);
        assert_eq!(made, nics(OWNER, &wanted).expect("is fine"));
    }

    #[test]
    fn nics_that_make_no_sense_are_refused_with_a_hint() {
        let with_mac = |name: &str, mac: &str| RunNic {
            mac: Some(String::from(mac)),
            ..tap(name)
        };
        let both = RunNic {
            bridge: Some(String::from("br0")),
            ..tap("t0")
        };
        let with_queues = |queues| RunNic {
            queues: Some(queues),
            ..tap("t0")
        };
        assert_eq!(
            nics(OWNER, &[with_queues(8)]).expect("is fine")[0].queues,
            8
        );
        let in_vlans = |vlan, trunk: &str| RunNic {
            bridge: Some(String::from("br0")),
            vlan,
            trunk: Some(String::from(trunk)),
            ..RunNic::default()
        };
        let made = nics(OWNER, &[in_vlans(Some(7), "5+10-20")]).expect("is fine");
        assert_eq!(
            (made[0].vlan, &made[0].trunk[..]),
            (Some(7), &[(5, 5), (10, 20)][..])
        );
        for wanted in [
            vec![in_vlans(Some(0), "")],
            vec![in_vlans(Some(4095), "")],
            vec![in_vlans(None, "20-10")],
            vec![in_vlans(None, "1-9999")],
            vec![in_vlans(None, "+")],
            vec![RunNic {
                vlan: Some(7),
                ..tap("t0")
            }],
            vec![with_queues(0)],
            vec![with_queues(9)],
            vec![RunNic::default()],
            vec![both],
            vec![tap("t0"), tap("t0")],
            vec![
                with_mac("t0", "52:54:00:00:00:01"),
                with_mac("t1", "52:54:00:00:00:01"),
            ],
            vec![with_mac("t0", "01:00:5e:00:00:01")],
            vec![with_mac("t0", "hello")],
            (0..9).map(|number| tap(&format!("t{number}"))).collect(),
        ] {
            let error = nics(OWNER, &wanted).expect_err("makes no sense");
            assert_eq!(error.code, ErrorCode::Invalid);
            assert!(error.hint.is_some(), "{error}");
        }
    }
}
