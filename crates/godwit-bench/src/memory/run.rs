//! One guest and one move.

use std::io;
use std::thread;
use std::time::{Duration, Instant};

use crate::common::watched::Watched;
use godwit_testkit::Cluster;
use godwit_testkit::cluster::{ClusterOptions, MemoryPool, Node};
use godwit_testkit::vm::{DirtyPages, GuestLoad, NodeGuest, NodeMachine, PointerChase, VM};
use serde_json::{Value, json};

use super::Method;
use super::timeline::{BIN, Span, Timeline, seconds};

/// Disk size: small, so that its copy is a negligible part of a move.
const DISK_MIB: u64 = 32;
/// Milliseconds between two beats of the guest, and so the precision of a blackout.
const BEAT_MS: u64 = 2;
/// Time between two looks at the progress of following memory. More looks would take processors from the guest.
const LOOK: Duration = Duration::from_millis(250);
/// Longest time for memory to follow.
const FOLLOWS: Duration = Duration::from_secs(120);
/// Warm-up of the guest's loads before the watch: their first pass touches memory that is not mapped yet.
const SETTLES: Duration = Duration::from_secs(3);
/// Seconds before and after a move that figures show.
const SHOWN_SECONDS: f64 = 2.0;

pub(super) struct Scene<'a> {
    pub(super) method: Method,
    pub(super) round: usize,
    pub(super) guest_mib: u64,
    /// MiB of pages for the writer to write each second.
    pub(super) dirty_mib: u64,
    pub(super) watch_seconds: f64,
    pub(super) longest_seconds: f64,
    pub(super) max_bandwidth: Option<&'a str>,
}

/// The course of a move, by the host's clock.
struct Moved {
    /// Start of the move of the memory, or of its counterpart.
    begun: Instant,
    /// First moment with the guest at the destination and memory still to follow.
    follows: Option<Instant>,
    ended: Instant,
    /// True if the move ended without being cancelled.
    by_itself: bool,
    bytes_over_network: u64,
    mover: Mover,
}

#[derive(Default)]
struct Mover {
    bytes: u64,
    seconds: f64,
    longest_hold_us: u64,
}

impl Scene<'_> {
    /// Starts the guest, moves it once and lets it verify all of its data.
    pub(super) fn play(&self) -> io::Result<Value> {
        let pool = MemoryPool::new()?;
        let cluster = pool.cluster(&["a", "b"], ClusterOptions::release()?)?;
        let guest = self.start(&cluster)?;
        let (a, b) = (cluster.node("a"), cluster.node("b"));
        let watch = Duration::from_secs_f64(self.watch_seconds);
        thread::sleep(SETTLES);
        let watched = Instant::now();
        thread::sleep(watch);
        guest.console.mark(FOLLOWS)?;
        let before = Instant::now();
        let moved = self.move_once(&guest, a, b)?;
        let blackout_ms = guest.console.beat_gap().as_secs_f64() * 1000.0;
        thread::sleep(watch);
        guest.alive()?;
        let windows = guest.console.windows();
        let node = if moved.by_itself { b } else { a };
        let verified = match guest.finish(node) {
            Ok(_) => true,
            Err(error) => {
                eprintln!("{} lost something: {error}", self.method.name());
                false
            }
        };
        node.godwit(&["vm", "stop", VM, "--force"]).json()?;
        let timeline = Timeline {
            windows,
            zero: moved.begun,
        };
        let before = Span {
            from: seconds(watched, moved.begun),
            to: seconds(before, moved.begun),
        };
        let mut run = self.run(&timeline, before, &moved);
        run["blackout_ms"] = blackout_ms.into();
        run["verified"] = verified.into();
        Ok(run)
    }

    /// Starts a guest that uses most of its memory: a quarter for the pointer chase, an eighth for the page writer, and
    /// three eighths written once.
    fn start(&self, cluster: &Cluster) -> io::Result<NodeGuest> {
        let load = GuestLoad {
            rate: 50,
            file_mb: DISK_MIB / 4,
            memory_mb: 0,
            pointer_chase: PointerChase {
                mib: self.guest_mib / 4,
                percent: 25,
            },
            dirty_pages: DirtyPages {
                mib: self.guest_mib / 8,
                rate_mib: self.dirty_mib,
            },
            cold_mib: self.guest_mib / 8 * 3 - 64,
            beat_ms: BEAT_MS,
            seed: self.round as u64 + 1,
            ..GuestLoad::default()
        };
        let pool = || MemoryPool::NAME.to_owned();
        let machine = NodeMachine {
            memory_mib: self.guest_mib,
            cpus: 2,
            memory_pool: self.method.uses_pool().then(pool),
        };
        let guest = NodeGuest::start_machine(cluster, "a", (1, DISK_MIB), &load, &machine)?;
        guest.loads_on_memory_work()?;
        Ok(guest)
    }

    fn move_once(&self, guest: &NodeGuest, a: &Node, b: &Node) -> io::Result<Moved> {
        let vm = format!("vm/{VM}");
        let mut words = vec!["migrate", &vm, "--to", b.name(), "--detach"];
        words.extend(self.method.options());
        if let Some(bandwidth) = self.max_bandwidth.filter(|_| !self.method.uses_pool()) {
            words.extend(["--max-bandwidth", bandwidth]);
        }
        let id = a.godwit(&words).json()?["id"].clone();
        let id = id.as_str().ok_or_else(|| io::Error::other("no id"))?;
        let mut watched = Watched::start(a, id)?;
        let (mut begun, mut follows) = (None, None);
        let by_itself = loop {
            let completed = watched.completed_within(LOOK)?;
            let now = Instant::now();
            let phase = watched.shown()["phase"].as_str().unwrap_or_default();
            if !matches!(phase, "" | "checking" | "copying_disks" | "starting") {
                begun.get_or_insert(now);
            }
            if phase == "pulling_memory" {
                follows.get_or_insert(now);
            }
            // A guest that runs at the destination cannot be taken back.
            let longest = match follows {
                Some(_) => FOLLOWS,
                None => self.longest(),
            };
            let late = begun.is_some_and(|at| now - at > longest);
            if completed || late {
                break completed;
            }
        };
        let shown = watched.shown().clone();
        if !by_itself {
            a.godwit(&["migration", "cancel", id]).json()?;
        }
        let mut moved = Moved {
            begun: begun.unwrap_or_else(Instant::now),
            follows,
            ended: Instant::now(),
            by_itself,
            bytes_over_network: sent(&shown)?,
            mover: Mover::default(),
        };
        if self.method == Method::ZeroCopy {
            moved.mover = follow(guest, b)?;
            let took = Duration::from_secs_f64(moved.mover.seconds);
            moved.follows = Some(moved.ended);
            moved.ended += took;
        }
        Ok(moved)
    }

    fn longest(&self) -> Duration {
        Duration::from_secs_f64(self.longest_seconds)
    }

    fn run(&self, timeline: &Timeline, before: Span, moved: &Moved) -> Value {
        let to = seconds(moved.ended, moved.begun);
        // A move of a few milliseconds lies within one window.
        let moving = Span {
            from: 0.0,
            to: to.max(BIN),
        };
        let following = moved.follows.map(|at| Span {
            from: seconds(at, moved.begun),
            to,
        });
        let shown = Span {
            from: -SHOWN_SECONDS,
            to: to + SHOWN_SECONDS,
        };
        let rates = following
            .map(|span| timeline.rates_mib(span))
            .unwrap_or_default();
        let mut run = json!({
            "method": self.method.name(), "round": self.round, "dirty_mib": self.dirty_mib, "ended": moved.by_itself,
            "total_seconds": to, "bytes_over_network": moved.bytes_over_network,
            "bytes_by_mover": moved.mover.bytes, "mover_seconds": moved.mover.seconds,
            "longest_hold_us": moved.mover.longest_hold_us,
            "rates_following_mib": rates.iter().map(|rate| rate.1).collect::<Vec<_>>(),
            "latencies_ns": timeline.latencies_ns(shown), "rates_mib": timeline.rates_mib(shown),
        });
        let mover = moved.mover.bytes as f64 / moved.mover.seconds;
        for (name, value) in [
            ("latency_before_ns", timeline.mean_ns(before)),
            ("latency_moving_ns", timeline.mean_ns(moving)),
            ("latency_worst_window_ns", timeline.worst_window_ns(moving)),
            ("slowest_16_accesses_ns", timeline.slowest_run_ns(moving)),
            ("rate_before_mib", timeline.rate_mib(before)),
            ("rate_moving_mib", timeline.rate_mib(moving)),
            (
                "rate_following_mib",
                following.and_then(|span| timeline.rate_mib(span)),
            ),
            (
                "mover_bytes_per_second",
                (moved.mover.seconds > 0.0).then_some(mover),
            ),
        ] {
            // A figure that a way does not have is left out.
            if let Some(value) = value {
                run[name] = value.into();
            }
        }
        run
    }
}

/// Waits until all memory has followed.
fn follow(guest: &NodeGuest, to: &Node) -> io::Result<Mover> {
    let deadline = Instant::now() + FOLLOWS;
    loop {
        let memory = guest.memory(to)?;
        let moving = &memory["moving"];
        if moving["ended"] == true && memory["bytes_in_pool"] == 0 {
            return Ok(Mover {
                bytes: moving["bytes_moved"].as_u64().unwrap_or(0),
                seconds: moving["seconds"].as_f64().unwrap_or(0.0),
                longest_hold_us: moving["longest_hold_us"].as_u64().unwrap_or(0),
            });
        }
        if moving["ended"] == true || Instant::now() > deadline {
            let why = format!("not all of the memory followed: {memory}");
            return Err(io::Error::other(why));
        }
        thread::sleep(LOOK);
    }
}

fn sent(shown: &Value) -> io::Result<u64> {
    let sent = shown["memory_bytes"].as_u64();
    sent.ok_or_else(|| io::Error::other(format!("no memory_bytes in {shown}")))
}
