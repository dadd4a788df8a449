//! The load of a disk's guest: its requests, its throughput, and the verification of its reads.

pub(crate) mod content;
mod steps;

use std::io;
use std::ops::Sub;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use godwit_testkit::NbdTarget;
use godwit_testkit::nbd::NbdConnection;
use godwit_testkit::network::Link;

use self::content::{BLOCK, Model, boxed, same};
pub(crate) use self::steps::{Kind, Plan};
use self::steps::{Step, Steps};

/// Longest backlog that a load makes up for after a delay.
const MADE_UP: Duration = Duration::from_millis(500);

/// The progress of a load so far.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Had {
    pub(crate) written: u64,
    pub(crate) writing: Duration,
    pub(crate) read: u64,
    pub(crate) reading: Duration,
    /// Completed passes over the whole region.
    pub(crate) passes: u64,
}

impl Had {
    /// Returns the bytes written and read.
    pub(crate) const fn bytes(&self) -> u64 {
        self.written + self.read
    }
}

impl Sub for Had {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self {
            written: self.written - before.written,
            writing: self.writing.saturating_sub(before.writing),
            read: self.read - before.read,
            reading: self.reading.saturating_sub(before.reading),
            passes: self.passes - before.passes,
        }
    }
}

#[derive(Debug, Default)]
struct Told {
    had: Had,
    stop: bool,
    /// The target to continue at.
    follow: Option<NbdTarget>,
}

/// A guest that works in its own thread, one request at a time.
#[derive(Debug)]
pub(crate) struct Load {
    told: Arc<Mutex<Told>>,
    thread: JoinHandle<io::Result<Model>>,
}

impl Load {
    /// Starts the load, on the left side of `across` if there is a link.
    pub(crate) fn start(
        at: NbdTarget,
        plan: Plan,
        model: Model,
        across: Option<Arc<Link>>,
    ) -> io::Result<Self> {
        let told = Arc::default();
        let shared = Arc::clone(&told);
        let thread = std::thread::Builder::new().spawn(move || {
            if let Some(link) = across {
                link.left().enter()?;
            }
            let guest = Guest {
                connection: NbdConnection::connect(&at)?,
                model,
                told: shared,
            };
            guest.work(&plan)
        })?;
        Ok(Self { told, thread })
    }

    pub(crate) fn had(&self) -> Had {
        lock(&self.told).had
    }

    /// Redirects the requests to the disk at another host, after the machine moved there.
    pub(crate) fn follow(&self, to: NbdTarget) {
        lock(&self.told).follow = Some(to);
    }

    /// Returns true if the load has ended by itself, which only happens on a failure.
    pub(crate) fn failed(&self) -> bool {
        self.thread.is_finished()
    }

    /// Ends the load and returns the model of the disk's content.
    pub(crate) fn stop(self) -> io::Result<Model> {
        lock(&self.told).stop = true;
        let ended = self.thread.join();
        ended.unwrap_or_else(|_| Err(io::Error::other("the load panicked")))
    }
}

fn lock(told: &Mutex<Told>) -> MutexGuard<'_, Told> {
    told.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Guest {
    connection: NbdConnection,
    model: Model,
    told: Arc<Mutex<Told>>,
}

impl Guest {
    fn work(mut self, plan: &Plan) -> io::Result<Model> {
        let mut steps = Steps::new(plan);
        let (mut block, mut expected) = (boxed(), boxed());
        let mut due = Instant::now();
        loop {
            let follow = {
                let mut told = lock(&self.told);
                if told.stop {
                    return Ok(self.model);
                }
                told.had.passes = steps.passes();
                told.follow.take()
            };
            if let Some(target) = follow {
                self.connection = NbdConnection::connect(&target)?;
            }
            let Some(step) = steps.next() else {
                std::thread::sleep(Duration::from_millis(10));
                continue;
            };
            // The first pass runs at full speed.
            if let Some(rate) = plan.rate.filter(|_| steps.passes() > 0) {
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
                due += Duration::from_secs_f64(BLOCK as f64 / rate as f64);
                due = due.max(Instant::now().checked_sub(MADE_UP).unwrap_or(due));
            }
            match step {
                Step::Write(at) => self.model.write(at, &mut block),
                Step::Read(at) => self.model.expected(at, &mut expected),
            }
            let begun = Instant::now();
            match step {
                Step::Write(at) => self.connection.write_at((at * BLOCK) as u64, &block[..])?,
                Step::Read(at) => {
                    (self.connection).read_at((at * BLOCK) as u64, &mut block[..])?;
                }
            }
            let took = begun.elapsed();
            {
                let mut told = lock(&self.told);
                let had = &mut told.had;
                let (bytes, time) = match step {
                    Step::Write(_) => (&mut had.written, &mut had.writing),
                    Step::Read(_) => (&mut had.read, &mut had.reading),
                };
                *bytes += BLOCK as u64;
                *time += took;
            }
            if let Step::Read(at) = step {
                same(at, &block, &expected)?;
            }
        }
    }
}
