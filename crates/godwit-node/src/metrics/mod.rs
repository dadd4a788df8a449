//! Metrics in the text formats of OpenMetrics and Prometheus, gathered on request.

mod nics;
mod protections;
mod text;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use godwit_block::engine::{Counters, LATENCY_BOUNDS_US, Snapshot};
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use crate::node::Node;
use godwit_api as api;
use godwit_api::{
    Direction, Migration, MigrationPromise, PauseReason, VmMigration, VmMigrationPhase, VmState,
};
use godwit_disks::disks::view;
use godwit_disks::migrations::live;
use godwit_peers::clock;

const MICROS: f64 = 1e6;

const MILLIS: f64 = 1e3;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DiskLabels {
    disk: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OperationLabels {
    disk: String,
    operation: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PeerLabels {
    peer: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PlaceLabels {
    from: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CertificateLabels {
    certificate: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct VmLabels {
    vm: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct VmStateLabels {
    vm: String,
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct MigrationLabels {
    disk: String,
    migration: String,
    direction: &'static str,
    phase: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PauseLabels {
    disk: String,
    migration: String,
    reason: &'static str,
}

/// The text format of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// OpenMetrics 1.0.
    OpenMetrics,
    /// Prometheus' text format 0.0.4.
    Text,
}

impl Format {
    /// Returns the format for a client's `Accept` header: OpenMetrics if listed, otherwise the text format.
    pub(crate) fn of(accepted: &str) -> Self {
        if accepted.contains("application/openmetrics-text") {
            Self::OpenMetrics
        } else {
            Self::Text
        }
    }

    pub(crate) const fn media_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// Returns all metrics of the node as text.
///
/// # Errors
/// Never fails: the writer is a `String`.
pub(crate) fn encode(node: &Arc<Node>, format: Format) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix("godwit");
    registry.register_collector(Box::new(Collector {
        gathered: gather(node),
    }));
    let mut metrics = String::new();
    prometheus_client::encoding::text::encode(&mut metrics, &registry)?;
    Ok(match format {
        Format::OpenMetrics => metrics,
        Format::Text => text::from_openmetrics(&metrics),
    })
}

#[derive(Debug)]
struct Gathered {
    disks: Vec<(api::Disk, Option<Snapshot>)>,
    migrations: Vec<Migration>,
    ended: [(&'static str, u64); 2],
    peers: Vec<(String, bool)>,
    /// The end of each certificate, in seconds since 1970.
    certificates: Vec<(&'static str, i64)>,
    vms: Vec<(String, VmState)>,
    nics: Vec<api::Nic>,
    protections: Vec<(String, api::VmProtection)>,
    /// Ended moves of VMs away from here, oldest first.
    vm_moves: Vec<VmMigration>,
    cpu_seconds: f64,
    /// Bytes of images' chunks, by source.
    image_bytes: [(&'static str, u64); 3],
}

fn gather(node: &Arc<Node>) -> Gathered {
    let disks = node.disks.all();
    let all = node.migrations.all();
    let ended = |phase| {
        u64::try_from(
            all.iter()
                .filter(|migration| migration.phase == phase)
                .count(),
        )
        .unwrap_or(0)
    };
    Gathered {
        ended: [
            ("completed", ended(api::MigrationPhase::Completed)),
            ("aborted", ended(api::MigrationPhase::Aborted)),
        ],
        disks: disks
            .iter()
            .map(|disk| {
                let snapshot = disk.engine().map(|engine| engine.snapshot());
                (view::disk(&node.disks, disk), snapshot)
            })
            .collect(),
        peers: node.context.peer_health.all().into_iter().collect(),
        migrations: all
            .into_iter()
            .filter(|migration| !migration.phase.ended())
            .filter_map(|migration| {
                let id = migration.id.parse().ok()?;
                Some(live(&node.migrations, id, migration))
            })
            .collect(),
        certificates: node
            .context
            .dialer
            .tls
            .as_ref()
            .map_or_else(Vec::new, |tls| {
                let ends = tls.current().ends;
                vec![("node", ends.certificate), ("authority", ends.authority)]
            }),
        vms: node
            .vms
            .all()
            .iter()
            .map(|vm| (vm.name.clone(), vm.lock().state()))
            .collect(),
        nics: godwit_machines::nics::view::all(&node.nics),
        protections: node.vms.protections.views(),
        vm_moves: node
            .vms
            .migrations
            .all(&node.vms)
            .into_iter()
            .filter(|migration| migration.phase.ended())
            .collect(),
        cpu_seconds: clock::process_cpu_seconds(),
        image_bytes: node.images.fetched.all(),
    }
}

#[derive(Debug)]
struct Collector {
    gathered: Gathered,
}

impl prometheus_client::collector::Collector for Collector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        self.disks(&mut encoder)?;
        self.requests(&mut encoder)?;
        self.latency(&mut encoder)?;
        self.migrations(&mut encoder)?;
        self.vms(&mut encoder)?;
        nics::encode(&self.gathered.nics, &mut encoder)?;
        protections::encode(&self.gathered.protections, &mut encoder)?;
        self.certificates(&mut encoder)?;
        self.node(&mut encoder)
    }
}

type DiskValue = fn(&api::Disk) -> f64;
type MigrationValue = fn(&Migration) -> f64;

fn promised(migration: &Migration, value: fn(&MigrationPromise) -> f64) -> f64 {
    migration.promise.as_ref().map_or(0.0, value)
}

impl Collector {
    fn disks(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let gauges: [(&str, &str, DiskValue); 12] = [
            ("disk_clients", "NBD clients attached", |disk| {
                f64::from(disk.clients)
            }),
            ("disk_epoch", "Owners that the disk has had", |disk| {
                disk.epoch as f64
            }),
            (
                "disk_serves",
                "1 while this node answers the guest",
                |disk| f64::from(u8::from(disk.serves)),
            ),
            (
                "disk_in_doubt",
                "1 while it is not known who owns the disk",
                |disk| f64::from(u8::from(disk.state.in_doubt())),
            ),
            (
                "disk_outdated",
                "1 while the disk is held because another node has had it since",
                |disk| f64::from(u8::from(disk.state == api::DiskState::Outdated)),
            ),
            ("disk_failed", "1 while the disk cannot be used", |disk| {
                f64::from(u8::from(disk.state == api::DiskState::Failed))
            }),
            (
                "disk_lacks_room",
                "1 while writes of its virtual machine wait for space",
                |disk| f64::from(u8::from(disk.lacks_room)),
            ),
            (
                "disk_missing_bytes",
                "Bytes still at the node that gave the disk away, or in the image that it was created from",
                |disk| disk.missing_bytes.unwrap_or(0) as f64,
            ),
            (
                "disk_problem",
                "1 while something is wrong with the disk that 'godwit disk show' names",
                |disk| f64::from(u8::from(disk.problem.is_some())),
            ),
            (
                "disk_image_trouble",
                "1 while the image that it was created from cannot be fetched",
                |disk| {
                    let image = disk.image.as_ref();
                    f64::from(u8::from(image.is_some_and(|image| image.trouble.is_some())))
                },
            ),
            (
                "disk_owes",
                "1 while its owner pulls a part of the disk from here",
                |disk| f64::from(u8::from(disk.owes)),
            ),
            ("disk_size_bytes", "The disk's size", |disk| {
                disk.size_bytes as f64
            }),
        ];
        for (name, help, value) in gauges {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for (disk, _) in &self.gathered.disks {
                let labels = DiskLabels {
                    disk: disk.name.clone(),
                };
                ConstGauge::new(value(disk)).encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }

    fn requests(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let mut counted =
            |name, help, values: fn(&Counters) -> Vec<(&'static str, u64)>| -> fmt::Result {
                let mut family =
                    encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
                for (disk, snapshot) in &self.gathered.disks {
                    let counters = snapshot
                        .as_ref()
                        .map_or_else(Counters::default, |it| it.counters);
                    for (operation, value) in values(&counters) {
                        let labels = OperationLabels {
                            disk: disk.name.clone(),
                            operation,
                        };
                        ConstCounter::new(value).encode(family.encode_family(&labels)?)?;
                    }
                }
                Ok(())
            };
        counted(
            "disk_requests",
            "Requests of clients that were answered",
            |io| {
                vec![
                    ("read", io.reads),
                    ("write", io.writes),
                    ("flush", io.flushes),
                    ("discard", io.discards),
                ]
            },
        )?;
        counted("disk_bytes", "Bytes that clients read and wrote", |io| {
            vec![("read", io.read_bytes), ("write", io.written_bytes)]
        })?;
        counted(
            "disk_request_errors",
            "Requests answered with an error",
            |io| vec![("any", io.errors)],
        )?;
        counted(
            "disk_forwarded_requests",
            "Requests that crossed between nodes",
            |io| vec![("any", io.forwarded)],
        )?;
        counted(
            "disk_compressed_bytes",
            "Bytes that left in migrations and were compressed, and what they became",
            |io| vec![("from", io.compressed_from), ("to", io.compressed_to)],
        )
    }

    fn latency(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let mut family = encoder.encode_descriptor(
            "disk_request_seconds",
            "How long clients waited for their requests",
            None,
            MetricType::Histogram,
        )?;
        for (disk, snapshot) in &self.gathered.disks {
            let Some(snapshot) = snapshot else { continue };
            let latencies = &snapshot.latencies;
            let bounds = LATENCY_BOUNDS_US
                .iter()
                .map(|&us| us as f64 / MICROS)
                .chain([f64::INFINITY]);
            let buckets: Vec<_> = bounds.zip(latencies.counts).collect();
            let count = latencies.counts.iter().sum();
            let labels = DiskLabels {
                disk: disk.name.clone(),
            };
            family
                .encode_family(&labels)?
                .encode_histogram::<DiskLabels>(
                    latencies.sum_us as f64 / MICROS,
                    count,
                    &buckets,
                    None,
                )?;
        }
        Ok(())
    }

    fn migrations(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let gauges: [(&str, &str, MigrationValue); 9] = [
            (
                "migration_bytes_expected",
                "Bytes that the current pass goes over",
                |migration| migration.progress.bytes_total as f64,
            ),
            (
                "migration_bytes_done",
                "Bytes that the current pass has finished",
                |migration| migration.progress.bytes_done as f64,
            ),
            (
                "migration_bytes_sent",
                "Data bytes of copies that were sent",
                |migration| migration.progress.bytes_sent as f64,
            ),
            (
                "migration_double_write_bytes",
                "Data bytes of double writes",
                |migration| migration.progress.double_write_bytes as f64,
            ),
            (
                "migration_eta_seconds",
                "Seconds until the pass is done; -1: unknown",
                |migration| migration.eta_seconds.unwrap_or(-1.0),
            ),
            (
                "migration_paused_seconds",
                "Seconds spent in pauses",
                |migration| promised(migration, |promise| promise.paused_seconds),
            ),
            (
                "migration_delayed_bytes",
                "Bytes that delayed writes still have to bring",
                |migration| promised(migration, |promise| promise.delayed_bytes as f64),
            ),
            (
                "migration_periods",
                "Sampling periods in which the guest had requests",
                |migration| promised(migration, |promise| promise.periods as f64),
            ),
            (
                "migration_breached_periods",
                "Those in which a request took longer than was promised",
                |migration| promised(migration, |promise| promise.breached_periods as f64),
            ),
        ];
        for (name, help, value) in gauges {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for migration in &self.gathered.migrations {
                let labels = MigrationLabels {
                    disk: migration.disk.clone(),
                    migration: migration.id.clone(),
                    direction: match migration.direction {
                        Direction::Outgoing => "outgoing",
                        Direction::Incoming => "incoming",
                    },
                    phase: migration.phase.name(),
                };
                ConstGauge::new(value(migration)).encode(family.encode_family(&labels)?)?;
            }
        }
        self.pauses(encoder)?;
        let mut family = encoder.encode_descriptor(
            "migrations_remembered",
            "Ended migrations in the history",
            None,
            MetricType::Gauge,
        )?;
        for (outcome, count) in self.gathered.ended {
            let labels = [("outcome", outcome)];
            ConstGauge::new(count as f64).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }

    fn pauses(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let mut family = encoder.encode_descriptor(
            "migration_pauses",
            "Pauses of the migration so far",
            None,
            MetricType::Gauge,
        )?;
        for migration in &self.gathered.migrations {
            let Some(promise) = &migration.promise else {
                continue;
            };
            for (reason, count) in [
                (PauseReason::GuestLatency, promise.pauses.guest_latency),
                (PauseReason::LinkQueue, promise.pauses.link_queue),
                (
                    PauseReason::InterfaceBudget,
                    promise.pauses.interface_budget,
                ),
            ] {
                let labels = PauseLabels {
                    disk: migration.disk.clone(),
                    migration: migration.id.clone(),
                    reason: reason.name(),
                };
                ConstGauge::new(f64::from(count)).encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }

    fn vms(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let help = "1 for the state that the virtual machine is in";
        let mut family = encoder.encode_descriptor("vm_state", help, None, MetricType::Gauge)?;
        for (vm, current) in &self.gathered.vms {
            for state in VmState::ALL {
                let labels = VmStateLabels {
                    vm: vm.clone(),
                    state: state.name(),
                };
                let value = f64::from(u8::from(state == *current));
                ConstGauge::new(value).encode(family.encode_family(&labels)?)?;
            }
        }
        let help = "Ended moves of virtual machines away from here in the history";
        let mut family =
            encoder.encode_descriptor("vm_migrations_remembered", help, None, MetricType::Gauge)?;
        for phase in [VmMigrationPhase::Completed, VmMigrationPhase::Aborted] {
            let moves = self.gathered.vm_moves.iter();
            let count = moves.filter(|migration| migration.phase == phase).count();
            let labels = [("outcome", phase.name())];
            ConstGauge::new(count as f64).encode(family.encode_family(&labels)?)?;
        }
        let help =
            "How long the guest stood still in the virtual machine's last move away from here";
        let mut family = encoder.encode_descriptor(
            "vm_migration_blackout_seconds",
            help,
            None,
            MetricType::Gauge,
        )?;
        let last: BTreeMap<_, _> = self
            .gathered
            .vm_moves
            .iter()
            .filter_map(|migration| Some((&migration.vm, migration.blackout_ms?)))
            .collect();
        for (vm, blackout) in last {
            let labels = VmLabels { vm: vm.clone() };
            ConstGauge::new(blackout / MILLIS).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }

    fn certificates(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let mut family = encoder.encode_descriptor(
            "certificate_end_timestamp_seconds",
            "When the certificate ends, in seconds since 1970",
            None,
            MetricType::Gauge,
        )?;
        for &(certificate, end) in &self.gathered.certificates {
            let labels = CertificateLabels { certificate };
            ConstGauge::new(end as f64).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }

    fn node(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let mut family = encoder.encode_descriptor(
            "peer_up",
            "1 when the peer answered lately",
            None,
            MetricType::Gauge,
        )?;
        for (peer, up) in &self.gathered.peers {
            let labels = PeerLabels { peer: peer.clone() };
            ConstGauge::new(f64::from(u8::from(*up))).encode(family.encode_family(&labels)?)?;
        }
        let mut family = encoder.encode_descriptor(
            "image_fetched_bytes",
            "Bytes of images that were fetched, by where they came from",
            None,
            MetricType::Counter,
        )?;
        for (from, bytes) in self.gathered.image_bytes {
            ConstCounter::new(bytes).encode(family.encode_family(&PlaceLabels { from })?)?;
        }
        let cpu = encoder.encode_descriptor(
            "cpu_seconds",
            "Processor time of the node",
            None,
            MetricType::Counter,
        )?;
        ConstCounter::new(self.gathered.cpu_seconds).encode(cpu)
    }
}
