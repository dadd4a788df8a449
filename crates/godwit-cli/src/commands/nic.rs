//! `godwit nic`

use godwit_api::Nic;

use crate::arguments::NicCommand;
use crate::client::Client;
use crate::failure::Failure;
use crate::routes;
use crate::show::output::{Output, facts, table};

pub(crate) async fn run(
    command: NicCommand,
    client: &mut Client,
    output: Output,
) -> Result<(), Failure> {
    match command {
        NicCommand::List => {
            let nics: Vec<Nic> = client.get(routes::NICS).await?;
            output.print(&nics, |nics| list(nics))
        }
        NicCommand::Show { name } => {
            let path = routes::nic(&name).ok_or_else(|| {
                Failure::new(format!("{name:?} names no NIC"))
                    .hint("name the virtual machine and the NIC's number, such as web/0")
            })?;
            let nic: Nic = client.get(&path).await?;
            output.print(&nic, show)
        }
    }
}

fn uplink(nic: &Nic) -> String {
    match &nic.bridge {
        Some(bridge) => format!("{} on {bridge}", nic.tap),
        None => nic.tap.clone(),
    }
}

fn state(nic: &Nic) -> String {
    match (nic.broken, nic.attached) {
        (true, _) => String::from("broken"),
        (false, false) => format!("{}, no guest", nic.mode),
        (false, true) => nic.mode.clone(),
    }
}

/// How many packets went each way by each pair of queues that the guest uses.
fn queues(nic: &Nic) -> String {
    let used = nic.queues.iter().enumerate().filter(|(_, pair)| pair.used);
    let each = used.map(|(number, pair)| {
        let (received, sent) = (pair.received_packets, pair.sent_packets);
        format!("{number}: {received} received, {sent} sent")
    });
    let each: Vec<String> = each.collect();
    let count = format!("{} of {} used", each.len(), nic.queues.len());
    match each.len() {
        0 | 1 => count,
        _ => format!("{count} ({})", each.join("; ")),
    }
}

fn list(nics: &[Nic]) -> String {
    let row = |nic: &Nic| {
        [
            nic.name.clone(),
            nic.mac.clone(),
            uplink(nic),
            state(nic),
            nic.counters.received_packets.to_string(),
            nic.counters.sent_packets.to_string(),
        ]
    };
    let empty = "no NICs: give a virtual machine one with godwit vm run NAME --nic tap=TAP";
    table(
        ["NIC", "MAC", "UPLINK", "STATE", "RECEIVED", "SENT"],
        nics.iter().map(row),
        empty,
    )
}

fn show(nic: &Nic) -> String {
    let counters = &nic.counters;
    let traffic = |packets: u64, bytes: u64| Some(format!("{packets} packets, {bytes} bytes"));
    let lost = counters.receive_too_large + counters.send_refused + counters.held_overflow;
    facts([
        ("name", Some(nic.name.clone())),
        ("mac", Some(nic.mac.clone())),
        ("uplink", Some(uplink(nic))),
        ("state", Some(state(nic))),
        (
            "received",
            traffic(counters.received_packets, counters.received_bytes),
        ),
        ("sent", traffic(counters.sent_packets, counters.sent_bytes)),
        (
            "addresses",
            (!nic.addresses.is_empty()).then(|| nic.addresses.join(", ")),
        ),
        ("queues", Some(queues(nic))),
        ("moves", Some(counters.moves.to_string())),
        (
            "held",
            Some(format!(
                "{} while it moved, {} now",
                counters.held, nic.waiting
            )),
        ),
        (
            "lost",
            (lost > 0).then(|| {
                format!(
                    "{} too large, {} refused, {} too many to hold",
                    counters.receive_too_large, counters.send_refused, counters.held_overflow
                )
            }),
        ),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_api::{NicCounters, NicQueue};

    #[test]
    fn a_nic_is_listed_with_its_uplink() {
        let nic = Nic {
            name: String::from("web/0"),
            vm: String::from("web"),
            mac: String::from("52:54:00:00:00:01"),
            tap: String::from("tap0"),
            bridge: None,
            mode: String::from("releasing"),
            attached: true,
            broken: false,
            waiting: 0,
            addresses: vec![String::from("10.0.0.7")],
            queues: vec![
                NicQueue {
                    used: true,
                    received_packets: 4,
                    sent_packets: 1,
                };
                2
            ],
            counters: NicCounters {
                received_packets: 7,
                held_overflow: 2,
                ..NicCounters::default()
            },
        };
        let text = list(std::slice::from_ref(&nic));
        let row: Vec<_> = text.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(
            row,
            ["web/0", "52:54:00:00:00:01", "tap0", "releasing", "7", "0"]
        );
        let shown = show(&nic);
        assert!(
            shown.contains("10.0.0.7")
                && shown.contains("2 too many")
                && shown.contains("2 of 2 used (0: 4 received, 1 sent; 1: "),
            "{shown}"
        );
    }
}
