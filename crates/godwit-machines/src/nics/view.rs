//! NICs as the API shows them.

use godwit_api::{NicCounters, NicQueue};
use godwit_net::device::handle::QueueSeen;
use godwit_qemu::machine::NicUplink;
use godwit_vhost::memory::LOST_PAGES;

use crate::nics::named::NamedNic;
use crate::nics::named::NamedNics;
use crate::nics::served::ServedNic;

/// Returns all NICs served by a node: machines' NICs by the machines' names, then NICs with names.
pub fn all(nics: &NamedNics) -> Vec<godwit_api::Nic> {
    // A NIC that is adopted meanwhile is in both lists rather than in none.
    let named = nics.all();
    let machines = nics.of_machines();
    machines
        .iter()
        .flat_map(|machine| {
            let name = &machine.vm;
            let served = machine.served.iter().enumerate();
            let shown = served
                .map(|(number, nic)| one(format!("{name}/{number}"), Some(name.clone()), nic));
            shown.collect::<Vec<_>>()
        })
        .chain(named.iter().map(|nic| named_one(nics, nic)))
        .collect()
}

/// Returns a NIC with a name of its own.
pub fn named_one(nics: &NamedNics, nic: &NamedNic) -> godwit_api::Nic {
    let why = match nic.served() {
        Ok(served) => return one(nic.name.clone(), None, &served),
        Err(why) => why,
    };
    let (tap, bridge) = match &nic.nic.uplink {
        NicUplink::Tap(tap) => (tap.clone(), None),
        NicUplink::Bridge(bridge) => (String::new(), Some(bridge.clone())),
    };
    godwit_api::Nic {
        name: nic.name.clone(),
        vm: None,
        socket: nics
            .context
            .config
            .nic_socket(&nic.name)
            .display()
            .to_string(),
        problem: Some(why),
        mac: nic.nic.mac.clone(),
        tap,
        bridge,
        mode: String::from("unserved"),
        attached: false,
        broken: false,
        waiting: 0,
        held_back: None,
        addresses: Vec::new(),
        queues: Vec::new(),
        counters: NicCounters::default(),
    }
}

fn one(name: String, vm: Option<String>, served: &ServedNic) -> godwit_api::Nic {
    let seen = served.device.snapshot();
    let counters = seen.counters;
    godwit_api::Nic {
        name,
        vm,
        socket: served.socket.display().to_string(),
        problem: served.problem().or_else(|| {
            let lost = seen.lost_pages;
            lost.then(|| format!("the virtual machine was disconnected: {LOST_PAGES}"))
        }),
        mac: served.nic.mac.clone(),
        tap: served.tap.clone(),
        bridge: match &served.nic.uplink {
            NicUplink::Bridge(bridge) => Some(bridge.clone()),
            NicUplink::Tap(_) => None,
        },
        mode: seen.mode.name().to_owned(),
        attached: seen.attached,
        broken: seen.broken,
        waiting: seen.waiting as u64,
        held_back: seen.held_back.map(|count| count as u64),
        addresses: seen.stations.iter().map(ToString::to_string).collect(),
        queues: seen.queues.iter().map(queue).collect(),
        counters: NicCounters {
            received_packets: counters.received_packets,
            received_bytes: counters.received_bytes,
            sent_packets: counters.sent_packets,
            sent_bytes: counters.sent_bytes,
            receive_too_large: counters.receive_too_large,
            send_refused: counters.send_refused,
            held: counters.held,
            held_overflow: counters.held_overflow,
            twins_dropped: counters.twins_dropped,
            moves: counters.moves,
        },
    }
}

const fn queue(seen: &QueueSeen) -> NicQueue {
    NicQueue {
        used: seen.is_used,
        received_packets: seen.received_packets,
        sent_packets: seen.sent_packets,
    }
}
