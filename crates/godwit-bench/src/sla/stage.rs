//! Two nodes, a disk full of random data, and one measured migration at a time.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::common::moved::compare_images;
use crate::common::watched::Watched;
use crate::common::{interrupt, named};
use godwit_testkit::Cluster;
use godwit_testkit::cluster::{ClusterOptions, Node};
use godwit_testkit::fio::{FioLoad, FioReport, RunningFio, Window, now_ms};
use godwit_testkit::image::write_random;
use godwit_testkit::network::{Link, Priority, Traffic};
use godwit_testkit::scenario::start_migration;
use serde_json::Value;

use super::scene::SceneOptions;

const WARM_UP: Duration = Duration::from_secs(2);
const AFTER: Duration = Duration::from_secs(3);
/// Time between two looks at the migration.
const LOOK: Duration = Duration::from_millis(100);
/// Longest time for a migration.
const PATIENCE: Duration = Duration::from_secs(300);
/// Milliseconds before the observed end from which an answered write may exist at one side only.
const MOVED_BEFORE: u64 = 1000;

/// A link with other traffic.
#[derive(Debug)]
struct Crowd {
    traffic: Traffic,
    usual: u64,
    crowded: u64,
    lasts: Duration,
}

/// A time with more of the other traffic.
#[derive(Clone, Debug)]
pub(super) struct Crowding {
    /// Start and end, in ms since 1970.
    pub(super) span: Range<u64>,
    sent_before: u64,
    /// Bytes per second of the other traffic, known at the end.
    pub(super) rate: Option<f64>,
}

impl Crowd {
    fn begin(&self) -> Crowding {
        self.traffic.set_rate(self.crowded);
        let now = now_ms();
        Crowding {
            span: now..now + self.lasts.as_millis() as u64,
            sent_before: self.traffic.sent(),
            rate: None,
        }
    }

    /// Ends the crowding when its time is over.
    fn look(&self, crowding: &mut Crowding) {
        let now = now_ms();
        if crowding.rate.is_none() && now >= crowding.span.end {
            self.traffic.set_rate(self.usual);
            crowding.span.end = now;
            let seconds = (now - crowding.span.start) as f64 / 1000.0;
            crowding.rate = Some((self.traffic.sent() - crowding.sent_before) as f64 / seconds);
        }
    }
}

/// The environment of the measured migrations.
#[derive(Debug)]
pub(super) struct Stage {
    cluster: Cluster,
    image: PathBuf,
    load: FioLoad,
    quiet: Duration,
    crowd: Option<Crowd>,
    /// Dropped after the nodes, which live in its namespaces.
    _link: Option<Link>,
}

/// Two more nodes, with a disk that no guest uses.
#[derive(Debug)]
pub(super) struct Neighbour {
    cluster: Cluster,
    image: PathBuf,
}

/// The disk that moves while the guest works.
#[derive(Clone, Copy, Debug)]
pub(super) enum Moved<'a> {
    /// The guest's disk, with these options.
    Own(&'a [&'a str]),
    /// A neighbour's disk, at this many bytes per second; the guest's disk stays.
    Neighbours(&'a Neighbour, u64),
}

/// One migration and the guest's measurements.
#[derive(Debug)]
pub(super) struct Run {
    /// The migration as shown by the source at the end.
    pub(super) migration: Value,
    /// Start and end of the migration, in ms since 1970.
    pub(super) lm: Range<u64>,
    /// Crowding of the link during the migration.
    pub(super) crowding: Option<Crowding>,
    /// Quiet time before the migration.
    pub(super) quiet: Range<u64>,
    /// End of the measurement.
    pub(super) end: u64,
    /// Report of fio.
    pub(super) guest: FioReport,
}

impl Stage {
    /// Starts two nodes at both ends of a narrow link with other traffic.
    pub(super) fn crowded(scene: &SceneOptions) -> io::Result<Self> {
        let link = Link::new(Some(scene.link_bits()))?;
        let mut cluster = Cluster::prepare_on(
            &[("a", Some(link.left())), ("b", Some(link.right()))],
            ClusterOptions::release()?,
        )?;
        cluster.start_all()?;
        let image = random_image(cluster.dir(), scene.image_bytes())?;
        let usual = scene.traffic(scene.usual_percent);
        let traffic = Traffic::start(&link, usual, scene.message_kib << 10, Priority::Urgent)?;
        Ok(Self {
            cluster,
            image,
            load: scene.load(),
            quiet: Duration::from_secs(4),
            crowd: Some(Crowd {
                traffic,
                usual,
                crowded: scene.traffic(scene.crowded_percent),
                lasts: scene.crowded(),
            }),
            _link: Some(link),
        })
    }

    /// Starts two nodes on loopback. The destination's images are in memory, the source's on request. The load's region
    /// carries its checksums.
    pub(super) fn loopback(
        bytes: u64,
        load: FioLoad,
        quiet: Duration,
        in_memory: bool,
    ) -> io::Result<Self> {
        let mut cluster = Cluster::prepare(&["a", "b"], ClusterOptions::release()?)?;
        cluster.put_in_memory("b", bytes)?;
        if in_memory {
            cluster.put_in_memory("a", bytes)?;
        }
        cluster.start_all()?;
        let image = random_image(cluster.dir(), bytes)?;
        load.prepare(&image)?;
        Ok(Self {
            cluster,
            image,
            load,
            quiet,
            crowd: None,
            _link: None,
        })
    }

    /// Moves a new disk from a to b with these options while the guest writes.
    pub(super) fn run(&self, disk: &str, options: &[&str]) -> io::Result<Run> {
        self.run_while(disk, Moved::Own(options))
    }

    /// Moves the given disk while the guest writes to a new disk.
    pub(super) fn run_while(&self, disk: &str, moved: Moved<'_>) -> io::Result<Run> {
        let (a, b) = (self.cluster.node("a"), self.cluster.node("b"));
        let image = self.image.to_string_lossy();
        a.godwit(&["disk", "import", disk, &image]).json()?;
        if let Moved::Neighbours(neighbour, _) = moved {
            neighbour.import(disk)?;
        }
        settle();
        let mut fio = self.load.start(&a.nbd(disk), self.cluster.dir())?;
        fio.stay(WARM_UP)?;
        let quiet_from = now_ms();
        fio.stay(self.quiet)?;

        let from = now_ms();
        let (node, id) = match moved {
            Moved::Own(options) => (a, start_migration(a, disk, "b", options)?),
            Moved::Neighbours(neighbour, rate) => neighbour.start(disk, rate)?,
        };
        let (shown, to, mut crowding) = self.follow(&mut fio, node, &id)?;
        if let (Some(crowd), Some(crowding)) = (&self.crowd, &mut crowding) {
            let rest = crowding.span.end.saturating_sub(now_ms());
            fio.stay(Duration::from_millis(rest))?;
            crowd.look(crowding);
        }
        fio.stay(AFTER)?;
        let end = now_ms();
        let guest = fio.stop()?;
        guest.succeeded().map_err(named(disk))?;
        let holders: &[&Node] = match moved {
            Moved::Own(_) => {
                let images = (a.image(disk)?, b.image(disk)?);
                compare_images(&images.0, &images.1, &guest.samples, to - MOVED_BEFORE)?;
                &[b, a]
            }
            Moved::Neighbours(neighbour, _) => &[neighbour.node("d"), neighbour.node("c"), a],
        };
        for node in holders {
            node.godwit(&["disk", "rm", disk]).text()?;
        }
        Ok(Run {
            migration: shown,
            lm: from..to,
            crowding,
            quiet: quiet_from..from,
            end,
            guest,
        })
    }

    /// Watches the migration to its end and crowds the link once half of the disk was copied.
    fn follow(
        &self,
        fio: &mut RunningFio,
        node: &Node,
        id: &str,
    ) -> io::Result<(Value, u64, Option<Crowding>)> {
        let started = Instant::now();
        let mut watched = Watched::start(node, id)?;
        let mut crowding: Option<Crowding> = None;
        loop {
            interrupt::check()?;
            let completed = watched.completed_within(LOOK)?;
            let shown = watched.shown();
            if completed {
                return Ok((shown.clone(), now_ms(), crowding));
            }
            if started.elapsed() > PATIENCE {
                return Err(io::Error::other(format!(
                    "the migration takes more than {PATIENCE:?}: {shown}"
                )));
            }
            if let Some(crowd) = &self.crowd {
                let copied = shown["progress"]["bytes_copied"].as_u64().unwrap_or(0);
                match &mut crowding {
                    None if copied * 2 >= self.load.region.end => crowding = Some(crowd.begin()),
                    None => {}
                    Some(crowding) => crowd.look(crowding),
                }
            }
            fio.check()?;
        }
    }
}

impl Neighbour {
    /// Starts nodes c and d on loopback. The destination's images are in memory, like those of the guest's nodes.
    pub(super) fn new(bytes: u64) -> io::Result<Self> {
        let mut cluster = Cluster::prepare(&["c", "d"], ClusterOptions::release()?)?;
        cluster.put_in_memory("d", bytes)?;
        cluster.start_all()?;
        let image = random_image(cluster.dir(), bytes)?;
        Ok(Self { cluster, image })
    }

    fn node(&self, name: &str) -> &Node {
        self.cluster.node(name)
    }

    fn import(&self, disk: &str) -> io::Result<()> {
        let image = self.image.to_string_lossy();
        let import = ["disk", "import", disk, &image];
        self.node("c").godwit(&import).json().map(drop)?;
        Ok(())
    }

    fn start(&self, disk: &str, rate: u64) -> io::Result<(&Node, String)> {
        let rate = rate.to_string();
        let options = ["--sla", "off", "--max-bandwidth", &rate];
        let node = self.node("c");
        Ok((node, start_migration(node, disk, "d", &options)?))
    }
}

impl Run {
    /// Returns the guest's measurements during the migration.
    pub(super) fn during(&self) -> Window {
        self.guest.window(self.lm.start, self.lm.end)
    }

    /// Returns the guest's measurements of the quiet time before.
    pub(super) fn before(&self) -> Window {
        self.guest.window(self.quiet.start, self.quiet.end)
    }

    /// Returns the seconds from the accepted offer until the destination serves.
    pub(super) fn lm_seconds(&self) -> f64 {
        self.migration["lm_seconds"].as_f64().unwrap_or(0.0)
    }

    /// Returns the source's account of the promise.
    pub(super) fn promise(&self) -> &Value {
        &self.migration["promise"]
    }

    /// Returns the number of pauses of all kinds.
    pub(super) fn pauses(&self) -> u64 {
        let kinds = ["guest_latency", "link_queue", "interface_budget"];
        let pauses = &self.promise()["pauses"];
        kinds
            .iter()
            .map(|kind| pauses[kind].as_u64().unwrap_or(0))
            .sum()
    }
}

fn random_image(dir: &Path, bytes: u64) -> io::Result<PathBuf> {
    let image = dir.join("random.img");
    write_random(&image, bytes, 42)?;
    Ok(image)
}

/// Flushes earlier writes, so that they do not disturb the measurement.
fn settle() {
    rustix::fs::sync();
    std::thread::sleep(Duration::from_secs(1));
}
