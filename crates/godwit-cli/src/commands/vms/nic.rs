//! The command `godwit nic`.

use godwit_api::{CreateNic, Nic};
use serde_json::json;

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
            let nic: Nic = client.get(&routes::nic(&name)).await?;
            output.print(&nic, show)
        }
        NicCommand::Create { name, nic } => {
            let queues = nic.queues.unwrap_or(1);
            let nic: Nic = client.post(routes::NICS, &CreateNic { name, nic }).await?;
            output.print(&nic, |nic| created(nic, queues))
        }
        NicCommand::Rm { name, force } => {
            client.delete(&routes::nic_removal(&name, force)).await?;
            output.print(&json!({ "name": name }), |_| {
                format!("removed NIC '{name}'")
            })
        }
    }
}

/// Returns the configuration of the NIC for QEMU and libvirt.
fn created(nic: &Nic, queues: u16) -> String {
    let Nic {
        name, mac, socket, ..
    } = nic;
    // QEMU ends a value at a comma unless the comma is doubled.
    let path = socket.replace(',', ",,");
    let (several, device, driver) = match queues {
        1 => Default::default(),
        _ => (
            format!(",queues={queues}"),
            // An interrupt for each queue, for the control queue, and for changes of the configuration.
            format!(",mq=on,vectors={}", 2 * queues + 2),
            format!("  <driver queues='{queues}'/>\n"),
        ),
    };
    format!(
        "created NIC '{name}'\n\n\
         QEMU, with memory that is shared:\n\
         -chardev socket,id=nic-{name},path={path},reconnect-ms=100 \\\n\
         -netdev vhost-user,id=net-{name},chardev=nic-{name}{several} \\\n\
         -device virtio-net-pci,netdev=net-{name},mac={mac},romfile=,ctrl_guest_offloads=off{device}\n\n\
         libvirt, with <access mode='shared'/> in <memoryBacking>:\n\
         <interface type='vhostuser'>\n  \
         <mac address='{mac}'/>\n  \
         <source type='unix' path='{}' mode='client'>\n    \
         <reconnect enabled='yes' timeout='1'/>\n  \
         </source>\n  \
         <model type='virtio'/>\n\
         {driver}  \
         <rom enabled='no'/>\n\
         </interface>",
        as_xml(socket)
    )
}

/// Escapes text between single quotes of XML.
fn as_xml(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('\'', "&apos;")
}

fn uplink(nic: &Nic) -> String {
    match &nic.bridge {
        Some(bridge) if nic.tap.is_empty() => format!("a tap on {bridge}"),
        Some(bridge) => format!("{} on {bridge}", nic.tap),
        None => nic.tap.clone(),
    }
}

fn state(nic: &Nic) -> String {
    if nic.problem.is_some() {
        return nic.mode.clone();
    }
    match (nic.broken, nic.attached) {
        (true, _) => String::from("broken"),
        (false, false) => format!("{}, no guest", nic.mode),
        (false, true) => nic.mode.clone(),
    }
}

/// Returns the packets in each direction of each used queue pair.
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
    let empty =
        "no NICs: give a virtual machine one with godwit vm run NAME --nic tap=TAP, or create one";
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
        ("problem", nic.problem.clone()),
        ("socket", Some(nic.socket.clone())),
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
            "held back",
            nic.held_back
                .map(|count| format!("{count} until their checkpoint is acknowledged")),
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
    fn a_nic_that_is_created_is_told_as_qemu_and_libvirt_take_it() {
        let nic = Nic {
            name: String::from("web0"),
            vm: None,
            socket: String::from("/a,b/it's.vhost"),
            ..nic()
        };
        let told = created(&nic, 2);
        for part in [
            "-chardev socket,id=nic-web0,path=/a,,b/it's.vhost,reconnect-ms=100 \\\n-netdev vhost-user,",
            "chardev=nic-web0,queues=2 \\\n-device virtio-net-pci,",
            "mac=52:54:00:00:00:01,romfile=,ctrl_guest_offloads=off,mq=on,vectors=6\n",
            "path='/a,b/it&apos;s.vhost' mode='client'>",
            "  <driver queues='2'/>\n  <rom",
        ] {
            assert!(told.contains(part), "{part}: {told}");
        }
        assert!(!created(&nic, 1).contains("queues"));
    }

    #[test]
    fn a_nic_is_listed_with_its_uplink() {
        let nic = nic();
        let text = list(std::slice::from_ref(&nic));
        let row: Vec<_> = text.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(
            row,
            ["web/0", "52:54:00:00:00:01", "tap0", "releasing", "7", "0"]
        );
        let shown = show(&nic);
        assert!(
            shown.contains("52:54:00:00:00:07")
                && shown.contains("2 too many")
                && shown.contains("3 until their checkpoint")
                && shown.contains("2 of 2 used (0: 4 received, 1 sent; 1: "),
            "{shown}"
        );
    }

    fn nic() -> Nic {
        Nic {
            name: String::from("web/0"),
            vm: Some(String::from("web")),
            socket: String::from("/n/vms/web/nic0.vhost"),
            problem: None,
            mac: String::from("52:54:00:00:00:01"),
            tap: String::from("tap0"),
            bridge: None,
            mode: String::from("releasing"),
            attached: true,
            broken: false,
            waiting: 0,
            held_back: Some(3),
            addresses: vec![String::from("52:54:00:00:00:07")],
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
        }
    }
}
