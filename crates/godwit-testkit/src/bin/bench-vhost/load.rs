//! What the client asks for.

use std::collections::HashMap;
use std::io;
use std::time::{Duration, Instant};

use godwit_testkit::process::cpu_seconds;
use godwit_testkit::random::Random;
use godwit_testkit::vhost_client::{Client, Options, Status};
use hdrhistogram::Histogram;
use serde::Serialize;

use crate::server::Server;

const PATIENCE: Duration = Duration::from_secs(30);
const SECTOR: u64 = 512;

/// Before anything counts.
const WARM_UP: Duration = Duration::from_millis(300);

/// Requests of one kind.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Workload {
    pub(crate) name: &'static str,
    pub(crate) depth: usize,
    bytes: u32,
    writes: bool,
    random: bool,
}

const fn small(name: &'static str, writes: bool, depth: usize) -> Workload {
    Workload {
        name,
        depth,
        bytes: 4 << 10,
        writes,
        random: true,
    }
}

const fn large(name: &'static str, writes: bool, depth: usize) -> Workload {
    Workload {
        name,
        depth,
        bytes: 1 << 20,
        writes,
        random: false,
    }
}

/// All that are measured.
pub(crate) const WORKLOADS: [Workload; 8] = [
    small("random read", false, 1),
    small("random read", false, 32),
    small("random write", true, 1),
    small("random write", true, 32),
    large("sequential read", false, 1),
    large("sequential read", false, 32),
    large("sequential write", true, 1),
    large("sequential write", true, 32),
];

/// One server's turn at a workload.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Measured {
    pub(crate) iops: f64,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    /// CPU seconds of the server for each second that passed.
    pub(crate) server_cpu: f64,
}

impl Measured {
    pub(crate) fn iops_per_cpu_second(&self) -> f64 {
        self.iops / self.server_cpu.max(1e-6)
    }
}

/// A client in the middle of its work.
struct Worker<'a> {
    workload: &'a Workload,
    client: Client,
    random: Random,
    blocks: u64,
    next: u64,
    started: HashMap<u16, (Instant, u64)>,
    free: Vec<u64>,
}

impl Workload {
    /// Asks the server for so long.
    ///
    /// # Errors
    /// When the server refuses, or a request fails.
    pub(crate) fn run(
        &self,
        server: &Server,
        disk: u64,
        lasts: Duration,
        seed: u64,
    ) -> io::Result<Measured> {
        let options = Options {
            data: self.depth * self.bytes as usize,
            ..Options::default()
        };
        let mut client = Client::connect(server.socket(), options)?;
        client.start()?;
        let data = client.data();
        let mut worker = Worker {
            workload: self,
            free: (0..self.depth as u64)
                .map(|place| data + place * u64::from(self.bytes))
                .collect(),
            client,
            random: Random::new(seed),
            blocks: disk / u64::from(self.bytes),
            next: 0,
            started: HashMap::with_capacity(self.depth),
        };
        let mut latencies =
            Histogram::<u64>::new_with_max(60_000_000_000, 3).map_err(io::Error::other)?;
        worker.work(WARM_UP, &mut latencies)?;
        latencies.reset();
        let cpu =
            || cpu_seconds(server.pid()).ok_or_else(|| io::Error::other("the server is gone"));
        let (before, from) = (cpu()?, Instant::now());
        worker.work(lasts, &mut latencies)?;
        let (after, seconds) = (cpu()?, from.elapsed().as_secs_f64());
        Ok(Measured {
            iops: latencies.len() as f64 / seconds,
            p50_us: latencies.value_at_quantile(0.5) as f64 / 1000.0,
            p99_us: latencies.value_at_quantile(0.99) as f64 / 1000.0,
            server_cpu: (after - before) / seconds,
        })
    }
}

impl Worker<'_> {
    fn work(&mut self, lasts: Duration, latencies: &mut Histogram<u64>) -> io::Result<()> {
        let end = Instant::now() + lasts;
        loop {
            if Instant::now() < end {
                self.fill();
            } else if self.started.is_empty() {
                return Ok(());
            }
            let first = self.client.queues[0].wait(PATIENCE);
            let mut next = Some(first.ok_or_else(|| io::Error::other("no answer in time"))?);
            while let Some(done) = next {
                let taken = self.started.remove(&done.head);
                let (at, place) = taken.ok_or_else(|| io::Error::other("an unknown answer"))?;
                latencies.saturating_record(at.elapsed().as_nanos() as u64);
                self.free.push(place);
                let status = self.client.status(0, done.head);
                if status != Status::OK {
                    return Err(io::Error::other(format!("a request failed: {status:?}")));
                }
                next = self.client.queues[0].done();
            }
        }
    }

    /// Keeps as many requests in flight as the depth says.
    fn fill(&mut self) {
        while let Some(place) = self.free.pop() {
            let block = if self.workload.random {
                self.random.below(self.blocks)
            } else {
                self.next = (self.next + 1) % self.blocks;
                self.next
            };
            let bytes = self.workload.bytes;
            let sector = block * u64::from(bytes) / SECTOR;
            let at = Instant::now();
            let head = if self.workload.writes {
                self.client.submit_write(0, sector, place, bytes)
            } else {
                self.client.submit_read(0, sector, place, bytes)
            };
            self.started.insert(head, (at, place));
        }
        self.client.queues[0].notify();
    }
}
