//! Requests of one kind, and the resulting measurements of a server.

use std::io;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use serde::Serialize;

use super::device::Device;
use super::server::Server;
use super::stamps::Stamps;
use godwit_testkit::process::cpu_seconds;
use godwit_testkit::random::Random;

/// Time before the measurement.
const WARM_UP: Duration = Duration::from_millis(300);

/// The access pattern, by fio's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Access {
    RandomRead,
    RandomWrite,
    Read,
    Write,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Workload {
    pub(crate) access: Access,
    /// Bytes of each request: a multiple of 4 KiB.
    pub(crate) bytes: usize,
    pub(crate) depth: usize,
}

/// One server's turn at a workload.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Measured {
    /// Requests answered per second.
    pub(crate) iops: f64,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    /// CPU seconds of the server per second.
    pub(crate) server_cpu: f64,
    /// CPU seconds per second of this process, the client. Near 1 the client is the limit, not the server.
    pub(crate) client_cpu: f64,
}

impl Measured {
    /// Returns the requests per second of the server's CPU time.
    pub(crate) fn iops_per_cpu_second(&self) -> f64 {
        self.iops / self.server_cpu.max(1e-6)
    }

    /// Returns the server's CPU seconds for a million requests.
    pub(crate) fn cpu_seconds_per_mio(&self) -> f64 {
        1e6 / self.iops_per_cpu_second()
    }
}

impl Access {
    /// Returns fio's name of the pattern.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::RandomRead => "randread",
            Self::RandomWrite => "randwrite",
            Self::Read => "read",
            Self::Write => "write",
        }
    }

    const fn writes(self) -> bool {
        matches!(self, Self::RandomWrite | Self::Write)
    }

    const fn random(self) -> bool {
        matches!(self, Self::RandomRead | Self::RandomWrite)
    }
}

/// A client at work.
struct Worker<'a> {
    workload: &'a Workload,
    device: Box<dyn Device>,
    stamps: &'a mut Stamps,
    random: Random,
    blocks: u64,
    next: u64,
    /// Start of each place's request, and its byte offset on the disk.
    started: Vec<(Instant, u64)>,
    free: Vec<usize>,
    done: Vec<usize>,
}

impl Workload {
    /// Returns 4 KiB at random and 1 MiB in sequence, written and read, at these depths. Writes come first, so that
    /// reads find them.
    pub(crate) fn all(depths: &[usize]) -> Vec<Self> {
        let kinds = [
            (Access::RandomWrite, 4 << 10),
            (Access::RandomRead, 4 << 10),
            (Access::Write, 1 << 20),
            (Access::Read, 1 << 20),
        ];
        let each = |(access, bytes)| {
            depths.iter().map(move |&depth| Self {
                access,
                bytes,
                depth,
            })
        };
        kinds.into_iter().flat_map(each).collect()
    }

    /// Sends requests to the server for the time `lasts`. Writes count only once durable. Reads come from the disk: the
    /// image leaves the page cache first.
    pub(crate) fn run(
        &self,
        server: &Server,
        stamps: &mut Stamps,
        lasts: Duration,
        seed: u64,
    ) -> io::Result<Measured> {
        stamps.leave_page_cache()?;
        let mut device = server.connect(self.depth, self.bytes)?;
        for place in 0..self.depth {
            stamps.prepare(&mut *device, place, self.bytes);
        }
        let mut worker = Worker {
            workload: self,
            device,
            random: Random::new(seed),
            blocks: stamps.bytes() / self.bytes as u64,
            stamps,
            next: 0,
            started: vec![(Instant::now(), 0); self.depth],
            free: (0..self.depth).collect(),
            done: Vec::with_capacity(self.depth),
        };
        let mut latencies =
            Histogram::<u64>::new_with_max(60_000_000_000, 3).map_err(io::Error::other)?;
        worker.work(WARM_UP, &mut latencies)?;
        latencies.reset();
        let cpu = |process| {
            cpu_seconds(process).ok_or_else(|| io::Error::other(format!("{process} is gone")))
        };
        let both = || io::Result::Ok((cpu(server.pid())?, cpu(std::process::id())?));
        let (before, from) = (both()?, Instant::now());
        worker.work(lasts, &mut latencies)?;
        if self.access.writes() {
            // A server may only have buffered the writes so far.
            worker.device.flush()?;
        }
        let (after, seconds) = (both()?, from.elapsed().as_secs_f64());
        Ok(Measured {
            iops: latencies.len() as f64 / seconds,
            p50_us: latencies.value_at_quantile(0.5) as f64 / 1000.0,
            p99_us: latencies.value_at_quantile(0.99) as f64 / 1000.0,
            server_cpu: (after.0 - before.0) / seconds,
            client_cpu: (after.1 - before.1) / seconds,
        })
    }
}

impl Worker<'_> {
    fn work(&mut self, lasts: Duration, latencies: &mut Histogram<u64>) -> io::Result<()> {
        let bytes = self.workload.bytes;
        let end = Instant::now() + lasts;
        loop {
            if Instant::now() < end {
                self.fill()?;
            } else if self.free.len() == self.workload.depth {
                return Ok(());
            }
            self.device.done(&mut self.done)?;
            let now = Instant::now();
            for place in self.done.drain(..) {
                let (at, offset) = self.started[place];
                latencies.saturating_record((now - at).as_nanos() as u64);
                if self.workload.access.writes() {
                    self.stamps.end(offset, bytes);
                } else {
                    self.stamps
                        .check_read(&*self.device, place, offset, bytes)?;
                }
                self.free.push(place);
            }
        }
    }

    /// Keeps as many requests in flight as the depth.
    fn fill(&mut self) -> io::Result<()> {
        let bytes = self.workload.bytes;
        let writes = self.workload.access.writes();
        let at = Instant::now();
        while let Some(place) = self.free.pop() {
            let offset = loop {
                let offset = self.choose() * bytes as u64;
                let device = &mut *self.device;
                if !writes || self.stamps.begin(device, place, offset, bytes) {
                    break offset;
                }
            };
            self.device.submit(place, writes, offset)?;
            self.started[place] = (at, offset);
        }
        self.device.notify()
    }

    fn choose(&mut self) -> u64 {
        if self.workload.access.random() {
            self.random.below(self.blocks)
        } else {
            self.next = (self.next + 1) % self.blocks;
            self.next
        }
    }
}
