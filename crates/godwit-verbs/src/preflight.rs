//! All obstacles to a move of a process, one sentence each: a decision about facts that others have collected
//! (`control` at the process, [`crate::offer`] at the destination).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::control::Status;
use crate::shim::QueuePairState;
use crate::tables::Gid;

/// A process's needs of one device.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct Need {
    /// The device's name.
    pub device: String,
    /// Queue pairs.
    pub queue_pairs: u32,
    /// Memory regions.
    pub regions: u32,
    /// Memory windows.
    #[serde(default)]
    pub windows: u32,
    /// Completion queues.
    pub completion_queues: u32,
    /// Ports and GID indexes that queue pairs use, with the address there.
    pub addresses: Vec<(u8, u8, Option<Gid>)>,
}

/// The resources of a host.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct Offer {
    /// The RDMA devices.
    pub devices: Vec<DeviceOffer>,
    /// The reason why CRIU cannot restore here; absent if CRIU can.
    pub criu: Option<String>,
    /// Queried process numbers that are in use here.
    pub taken: Vec<u32>,
}

/// A device of a host.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct DeviceOffer {
    /// The device's name.
    pub name: String,
    /// Queue pairs that can still be made.
    pub queue_pairs: u32,
    /// Memory regions that can still be made.
    pub regions: u32,
    /// Memory windows of the device; the number in use by others is unknown.
    #[serde(default)]
    pub windows: u32,
    /// Completion queues that can still be made.
    pub completion_queues: u32,
    /// Addresses by port and GID index.
    pub addresses: Vec<(u8, u8, Gid)>,
}

/// Returns all reasons against a move of `process` to a host with the resources `offer`. `status` comes from the
/// process's library, and is absent if the process does not use the library. `partners` are the queue pairs of all
/// processes with the library at which the process's connections may end.
pub fn against(
    process: u32,
    status: Option<&Status>,
    offer: &Offer,
    partners: &[QueuePairState],
) -> Vec<String> {
    let mut found = Vec::new();
    match status {
        None => found.push(format!(
            "process {process} does not use the library or has opened no device; start it with \
             LD_PRELOAD=libgodwit_verbs.so"
        )),
        Some(status) => {
            found.extend(
                status
                    .obstacles
                    .iter()
                    .map(|obstacle| obstacle.what.clone()),
            );
            found.extend(
                status
                    .queue_pairs
                    .iter()
                    .filter_map(|pair| without_partner(pair, partners)),
            );
            for need in &status.needs {
                found.extend(unmet(need, offer));
            }
        }
    }
    if let Some(why) = &offer.criu {
        found.push(format!("CRIU cannot restore at the destination: {why}"));
    }
    if offer.taken.contains(&process) {
        found.push(format!(
            "the destination has a process {process} already, and a process keeps its number"
        ));
    }
    found
}

fn without_partner(pair: &QueuePairState, partners: &[QueuePairState]) -> Option<String> {
    let (remote, number) = pair.remote.zip(pair.remote_physical)?;
    if !pair.reliable_connection || partners.iter().any(|other| is_other_end(pair, other)) {
        return None;
    }
    Some(format!(
        "queue pair {} is connected to queue pair {number} at {remote}, of which no process that uses the library knows; \
         the partner has to be started with LD_PRELOAD=libgodwit_verbs.so too",
        pair.number
    ))
}

/// Returns true if both queue pairs are connected to each other.
pub fn is_other_end(pair: &QueuePairState, other: &QueuePairState) -> bool {
    Some(other.physical) == pair.remote_physical
        && other.local == pair.remote
        && other.remote_physical == Some(pair.physical)
        && other.remote == pair.local
}

fn unmet(need: &Need, offer: &Offer) -> Vec<String> {
    let name = &need.device;
    let Some(device) = offer.devices.iter().find(|device| device.name == *name) else {
        let others: Vec<&str> = offer
            .devices
            .iter()
            .map(|device| device.name.as_str())
            .collect();
        let has = if others.is_empty() {
            "none".to_owned()
        } else {
            others.join(", ")
        };
        return vec![format!(
            "the destination has no RDMA device {name}; it has {has}"
        )];
    };
    let mut found = Vec::new();
    for (what, wanted, free) in [
        ("queue pairs", need.queue_pairs, device.queue_pairs),
        ("memory regions", need.regions, device.regions),
        ("memory windows", need.windows, device.windows),
        (
            "completion queues",
            need.completion_queues,
            device.completion_queues,
        ),
    ] {
        if wanted > free {
            found.push(format!(
                "the process has {wanted} {what} on {name}, and the destination's {name} has room for {free}"
            ));
        }
    }
    let there: BTreeMap<(u8, u8), Gid> = device
        .addresses
        .iter()
        .map(|(port, place, address)| ((*port, *place), *address))
        .collect();
    for (port, place, address) in &need.addresses {
        let here = address.map_or_else(|| "an address".to_owned(), |address| address.to_string());
        match there.get(&(*port, *place)) {
            None => found.push(format!(
                "the process uses {here} at GID index {place} of {name} port {port}, and the destination's {name} has \
                 nothing at that index"
            )),
            Some(other) if address.is_some_and(|address| kind(address) != kind(*other)) => {
                found.push(format!(
                    "the process uses {here} at GID index {place} of {name} port {port}, and the destination's {name} has \
                     an address of another kind there, {other}"
                ));
            }
            Some(_) => {}
        }
    }
    found
}

/// Classifies an address as IPv4, link-local IPv6 or other IPv6: networks carry each kind differently.
fn kind(gid: Gid) -> u8 {
    let address = std::net::Ipv6Addr::from(gid.0);
    match (address.to_ipv4_mapped(), address.segments()[0] & 0xffc0) {
        (Some(_), _) => 0,
        (None, 0xfe80) => 1,
        (None, _) => 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shim::Obstacle;

    fn gid(text: &str) -> Gid {
        Gid::try_from(text.to_owned()).unwrap()
    }

    fn pair(number: u32, local: &str, remote: &str, remote_number: u32) -> QueuePairState {
        QueuePairState {
            number,
            physical: number,
            state: 3,
            reliable_connection: true,
            failed: false,
            local: Some(gid(local)),
            remote: Some(gid(remote)),
            remote_physical: Some(remote_number),
            sent: 0,
            received: 0,
            receives_outstanding: 0,
            kept: 0,
        }
    }

    fn good() -> (Status, Offer, Vec<QueuePairState>) {
        let status = Status {
            queue_pairs: vec![pair(17, "::ffff:10.0.0.1", "::ffff:10.0.0.3", 18)],
            obstacles: Vec::new(),
            needs: vec![Need {
                device: "rxe0".to_owned(),
                queue_pairs: 1,
                regions: 2,
                windows: 1,
                completion_queues: 1,
                addresses: vec![(1, 1, Some(gid("::ffff:10.0.0.1")))],
            }],
        };
        let offer = Offer {
            devices: vec![DeviceOffer {
                name: "rxe0".to_owned(),
                queue_pairs: 1,
                regions: 2,
                windows: 1,
                completion_queues: 1,
                addresses: vec![(1, 0, gid("fe80::1")), (1, 1, gid("::ffff:10.0.0.2"))],
            }],
            criu: None,
            taken: vec![4],
        };
        (
            status,
            offer,
            vec![pair(18, "::ffff:10.0.0.3", "::ffff:10.0.0.1", 17)],
        )
    }

    #[test]
    fn what_fits_exactly_may_move() {
        let (status, offer, partners) = good();
        assert_eq!(against(5, Some(&status), &offer, &partners), [""; 0]);
    }

    #[test]
    fn everything_is_named_at_once() {
        let (mut status, mut offer, mut partners) = good();
        status.obstacles.push(Obstacle {
            what: "datagrams cannot move".to_owned(),
        });
        let need = &mut status.needs[0];
        (need.queue_pairs, need.regions, need.completion_queues) = (2, 3, 2);
        need.windows = 2;
        need.addresses.push((1, 0, Some(gid("::ffff:10.0.0.9"))));
        need.addresses.push((1, 7, None));
        status.needs.push(Need {
            device: "mlx5_0".to_owned(),
            ..status.needs[0].clone()
        });
        partners[0].remote_physical = Some(99);
        offer.criu = Some("criu is not installed".to_owned());
        let found = against(4, Some(&status), &offer, &partners);
        for word in [
            "datagrams",
            "no process that uses the library",
            "2 queue pairs on rxe0",
            "3 memory regions on rxe0",
            "2 memory windows on rxe0",
            "2 completion queues on rxe0",
            "GID index 0 of rxe0 port 1, and the destination's rxe0 has an address of another kind",
            "GID index 7 of rxe0 port 1, and the destination's rxe0 has nothing",
            "no RDMA device mlx5_0; it has rxe0",
            "CRIU cannot restore at the destination: criu is not installed",
            "a process 4 already",
        ] {
            let named = found
                .iter()
                .filter(|sentence| sentence.contains(word))
                .count();
            assert_eq!(named, 1, "{word}: {found:#?}");
        }
        assert_eq!(found.len(), 11);
    }

    #[test]
    fn a_process_without_the_library_is_named() {
        let (_, mut offer, _) = good();
        offer.devices.clear();
        let found = against(9, None, &offer, &[]);
        assert_eq!(found.len(), 1);
        assert!(found[0].contains("process 9 does not use the library"));
    }
}
