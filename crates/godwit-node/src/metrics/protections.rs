//! Metrics of the protections that the node has a part in.

use std::fmt;

use godwit_api::{ProtectionState, VmProtection};
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabels {
    vm: String,
    peer: String,
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PeerLabels {
    vm: String,
    peer: String,
}

type Value = fn(&VmProtection) -> Option<f64>;

const GAUGES: [(&str, &str, Value); 6] = [
    (
        "protection_answered_seconds",
        "Time since the sending of the last ping that the machine's backup answered",
        |protection| Some(protection.answered_ms_ago? as f64 / 1e3),
    ),
    (
        "protection_unsynced_bytes",
        "Bytes that the synchronization with the machine's backup has not finished",
        |protection| {
            let left = protection.bytes_total.saturating_sub(protection.bytes_done);
            Some(left as f64)
        },
    ),
    (
        "protection_checkpoints_per_second",
        "Checkpoints of the machine a second, over the last 512",
        |protection| Some(protection.checkpoints.as_ref()?.per_second),
    ),
    (
        "protection_checkpoint_pause_seconds",
        "Time for which a checkpoint stops the guest, at the 99th percentile of the last 512",
        |protection| Some(protection.checkpoints.as_ref()?.pause_p99_us as f64 / 1e6),
    ),
    (
        "protection_checkpoint_lag_seconds",
        "Time from a checkpoint's capture to its acknowledgement, at the 99th percentile of the last 512",
        |protection| Some(protection.checkpoints.as_ref()?.lag_p99_us as f64 / 1e6),
    ),
    (
        "protection_checkpoint_bytes_per_second",
        "Bytes of checkpoints sent to the machine's backup a second, over the last 512",
        |protection| Some(protection.checkpoints.as_ref()?.bytes_per_second),
    ),
];

/// Writes the metrics of these protections, each with its machine's name.
pub(super) fn encode(
    protections: &[(String, VmProtection)],
    encoder: &mut DescriptorEncoder<'_>,
) -> fmt::Result {
    let help = "1 for the state that the machine's protection is in";
    let mut family =
        encoder.encode_descriptor("protection_state", help, None, MetricType::Gauge)?;
    for (vm, protection) in protections {
        for state in ProtectionState::ALL {
            let labels = StateLabels {
                vm: vm.clone(),
                peer: protection.peer.clone(),
                state: state.name(),
            };
            let value = f64::from(u8::from(state == protection.state));
            ConstGauge::new(value).encode(family.encode_family(&labels)?)?;
        }
    }
    for (name, help, value) in GAUGES {
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (vm, protection) in protections {
            let Some(value) = value(protection) else {
                continue;
            };
            let labels = PeerLabels {
                vm: vm.clone(),
                peer: protection.peer.clone(),
            };
            ConstGauge::new(value).encode(family.encode_family(&labels)?)?;
        }
    }
    Ok(())
}
