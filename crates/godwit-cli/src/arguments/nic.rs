//! The arguments of `godwit nic`, and the NICs of `godwit vm run`.

use clap::Subcommand;
use godwit_api::RunNic;

#[derive(Debug, Subcommand)]
pub(crate) enum NicCommand {
    /// List the NICs that the node serves
    List,
    /// Show a NIC with its counters
    Show {
        /// The NIC: its virtual machine's name, a slash and its number, such as web/0, or its own name
        #[arg(value_name = "VM/NUMBER")]
        name: String,
    },
    /// Create a NIC for a virtual machine that QEMU or libvirt starts, and say what they are to be given
    Create {
        /// What it is called: letters, digits, '.', '_' and '-'
        name: String,
        /// tap=NAME or bridge=NAME, mac=ADDRESS if it must be that, queues=N for more than one pair of queues, and for a bridge
        /// vlan=N or trunk=N-M
        #[arg(value_parser = parse_nic)]
        nic: RunNic,
    },
    /// Remove a NIC that was created
    Rm {
        /// Its name
        name: String,
        /// Also while a virtual machine uses it, which then has no network
        #[arg(long)]
        force: bool,
    },
}

/// Parses a NIC such as `tap=tap0` or `bridge=br0,mac=52:54:00:12:34:56`.
pub(super) fn parse_nic(text: &str) -> Result<RunNic, String> {
    let mut nic = RunNic::default();
    for part in text.split(',') {
        let (key, value) = part.split_once('=').unwrap_or((part, ""));
        let number = match key {
            "queues" => Some((&mut nic.queues, "number of pairs of queues, as in queues=2")),
            "vlan" => Some((&mut nic.vlan, "VLAN, as in vlan=10")),
            _ => None,
        };
        if let Some((place, what)) = number {
            let number = value
                .parse()
                .map_err(|_| format!("{value:?} is no {what}"))?;
            if place.replace(number).is_some() {
                return Err(format!("{key} is given twice"));
            }
            continue;
        }
        let place = match key {
            "tap" => &mut nic.tap,
            "bridge" => &mut nic.bridge,
            "mac" => &mut nic.mac,
            "trunk" => &mut nic.trunk,
            _ => {
                return Err(format!(
                    "{key:?} is none of tap, bridge, mac, queues, vlan and trunk, as in tap=tap0 or bridge=br0,mac=52:54:00:12:34:56,queues=2"
                ));
            }
        };
        if value.is_empty() {
            return Err(format!("{key} needs a value, as in {key}=..."));
        }
        if place.replace(value.to_owned()).is_some() {
            return Err(format!("{key} is given twice"));
        }
    }
    if nic.tap.is_some() == nic.bridge.is_some() {
        return Err(String::from("give either tap=NAME or bridge=NAME"));
    }
    Ok(nic)
}

/// Parses the name of a tap or bridge here, and at the destination.
pub(super) fn parse_uplink(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((here, there)) if !here.is_empty() && !there.is_empty() => {
            Ok((here.to_owned(), there.to_owned()))
        }
        _ => Err(String::from(
            "give the name here and the one there, as in br0=br1",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nic_names_one_uplink() {
        let nic = parse_nic("bridge=br0,mac=52:54:00:12:34:56").expect("is one");
        assert_eq!(nic.bridge.as_deref(), Some("br0"));
        assert_eq!(nic.mac.as_deref(), Some("52:54:00:12:34:56"));
        assert_eq!(nic.queues, None);
        let nic = parse_nic("tap=tap0,queues=4").expect("is one");
        assert_eq!(nic.queues, Some(4));
        let nic = parse_nic("bridge=br0,vlan=7,trunk=5+10-20").expect("is one");
        assert_eq!((nic.vlan, nic.trunk.as_deref()), (Some(7), Some("5+10-20")));
        for wrong in [
            "",
            "tap",
            "tap=",
            "tap=a,bridge=b",
            "mac=x",
            "tap=a,tap=b",
            "queues=2",
            "tap=a,queues=",
            "tap=a,queues=many",
            "tap=a,queues=-1",
            "tap=a,queues=1,queues=2",
            "bridge=a,vlan=many",
            "bridge=a,vlan=1,vlan=2",
            "bridge=a,trunk=",
        ] {
            assert!(parse_nic(wrong).is_err(), "{wrong}");
        }
    }
}
