//! Metrics of the NICs that the node serves.

use std::fmt;

use godwit_api::{Nic, NicCounters};
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct NicLabels {
    nic: String,
    vm: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindLabels {
    nic: String,
    vm: String,
    kind: &'static str,
}

type Kinds = fn(&NicCounters) -> Vec<(&'static str, u64)>;

/// Name, help and numbers of each counter, one number a kind.
const COUNTERS: [(&str, &str, Kinds); 3] = [
    (
        "nic_packets",
        "Packets that the guest got and sent, over all moves of its machine",
        |nic| {
            vec![
                ("received", nic.received_packets),
                ("sent", nic.sent_packets),
            ]
        },
    ),
    ("nic_bytes", "Bytes of those packets", |nic| {
        vec![("received", nic.received_bytes), ("sent", nic.sent_bytes)]
    }),
    (
        "nic_lost_packets",
        "Packets that were lost: no room to hold them, too large for the guest, not taken from it",
        |nic| {
            vec![
                ("held_overflow", nic.held_overflow),
                ("receive_too_large", nic.receive_too_large),
                ("send_refused", nic.send_refused),
            ]
        },
    ),
];

type Count = fn(&NicCounters) -> u64;

const PLAIN_COUNTERS: [(&str, &str, Count); 3] = [
    (
        "nic_held_packets",
        "Packets that were held while the machine moved or stood still",
        |nic| nic.held,
    ),
    (
        "nic_twins_dropped",
        "Packets for many that reached both nodes of a move, of which the guest got one",
        |nic| nic.twins_dropped,
    ),
    (
        "nic_moves",
        "Moves that brought the NIC to another node",
        |nic| nic.moves,
    ),
];

type Value = fn(&Nic) -> f64;

const GAUGES: [(&str, &str, Value); 5] = [
    (
        "nic_waiting_packets",
        "Packets that wait for the guest now",
        |nic| nic.waiting as f64,
    ),
    (
        "nic_held_back_packets",
        "Packets of a protected guest that wait until their checkpoint is acknowledged",
        |nic| nic.held_back.unwrap_or_default() as f64,
    ),
    (
        "nic_attached",
        "1 while a virtual machine is attached",
        |nic| f64::from(u8::from(nic.attached)),
    ),
    (
        "nic_broken",
        "1 while a ring rests because of what the guest put into it",
        |nic| f64::from(u8::from(nic.broken)),
    ),
    (
        "nic_without_network",
        "1 while its tap or bridge is missing or lets nothing pass",
        |nic| f64::from(u8::from(nic.problem.is_some())),
    ),
];

/// Writes the metrics of these NICs.
pub(super) fn encode(nics: &[Nic], encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    for (name, help, kinds) in COUNTERS {
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for nic in nics {
            for (kind, count) in kinds(&nic.counters) {
                let labels = KindLabels {
                    nic: nic.name.clone(),
                    vm: nic.vm.clone().unwrap_or_default(),
                    kind,
                };
                ConstCounter::new(count).encode(family.encode_family(&labels)?)?;
            }
        }
    }
    for (name, help, count) in PLAIN_COUNTERS {
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for nic in nics {
            let count = ConstCounter::new(count(&nic.counters));
            count.encode(family.encode_family(&labels(nic))?)?;
        }
    }
    for (name, help, value) in GAUGES {
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for nic in nics {
            ConstGauge::new(value(nic)).encode(family.encode_family(&labels(nic))?)?;
        }
    }
    Ok(())
}

fn labels(nic: &Nic) -> NicLabels {
    NicLabels {
        nic: nic.name.clone(),
        vm: nic.vm.clone().unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::collector::Collector;
    use prometheus_client::registry::Registry;

    use super::*;

    #[derive(Debug)]
    struct Nics(Vec<Nic>);

    impl Collector for Nics {
        fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
            encode(&self.0, &mut encoder)
        }
    }

    #[test]
    fn every_counter_of_a_nic_is_among_the_metrics() {
        let nic = Nic {
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
            waiting: 11,
            held_back: Some(12),
            addresses: Vec::new(),
            queues: Vec::new(),
            counters: NicCounters {
                received_packets: 1,
                received_bytes: 2,
                sent_packets: 3,
                sent_bytes: 4,
                receive_too_large: 5,
                send_refused: 6,
                held: 7,
                held_overflow: 8,
                twins_dropped: 9,
                moves: 10,
            },
        };
        let mut registry = Registry::with_prefix("godwit");
        registry.register_collector(Box::new(Nics(vec![nic])));
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).expect("writes");
        let labels = r#"nic="web/0",vm="web""#;
        for expected in [
            format!(r#"godwit_nic_packets_total{{{labels},kind="received"}} 1"#),
            format!(r#"godwit_nic_bytes_total{{{labels},kind="received"}} 2"#),
            format!(r#"godwit_nic_packets_total{{{labels},kind="sent"}} 3"#),
            format!(r#"godwit_nic_bytes_total{{{labels},kind="sent"}} 4"#),
            format!(r#"godwit_nic_lost_packets_total{{{labels},kind="receive_too_large"}} 5"#),
            format!(r#"godwit_nic_lost_packets_total{{{labels},kind="send_refused"}} 6"#),
            format!("godwit_nic_held_packets_total{{{labels}}} 7"),
            format!(r#"godwit_nic_lost_packets_total{{{labels},kind="held_overflow"}} 8"#),
            format!("godwit_nic_twins_dropped_total{{{labels}}} 9"),
            format!("godwit_nic_moves_total{{{labels}}} 10"),
            format!("godwit_nic_waiting_packets{{{labels}}} 11"),
            format!("godwit_nic_held_back_packets{{{labels}}} 12"),
            format!("godwit_nic_attached{{{labels}}} 1"),
            format!("godwit_nic_broken{{{labels}}} 0"),
            format!("godwit_nic_without_network{{{labels}}} 0"),
        ] {
            let found = text
                .lines()
                .any(|line| line.trim_end_matches(".0") == expected);
            assert!(found, "{expected} in:\n{text}");
        }
    }
}
