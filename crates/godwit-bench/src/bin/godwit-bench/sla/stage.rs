//! Two nodes, a disk full of random data, and one measured migration at a time.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use godwit_bench::moved::compare_images;
use godwit_bench::watched::Watched;
use godwit_testkit::Cluster;
use godwit_testkit::cluster::{ClusterOptions, Node, release_binary};
use godwit_testkit::fio::{FioLoad, FioReport, RunningFio, Window, now_ms};
use godwit_testkit::image::write_random;
use godwit_testkit::network::{Link, Priority, Traffic};
use godwit_testkit::scenario::start_migration;
use serde_json::Value;

use crate::sla::scene::SceneOptions;

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
pub(crate) struct Crowding {
    /// Start and end, in ms since 1970.
    pub(crate) span: Range<u64>,
    sent_before: u64,
    /// Bytes per second of the other traffic, known at the end.
    pub(crate) rate: Option<f64>,
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
pub(crate) struct Stage {
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
pub(crate) struct Neighbour {
    cluster: Cluster,
    image: PathBuf,
}

/// The disk that moves while the guest works.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Moved<'a> {
    /// The guest's disk, with these options.
    Own(&'a [&'a str]),
    /// A neighbour's disk, at this many bytes per second; the guest's disk stays.
    Neighbours(&'a Neighbour, u64),
}

/// One migration and the guest's measurements.
#[derive(Debug)]
pub(crate) struct Run {
    /// The migration as shown by the source at the end.
    pub(crate) migration: Value,
    /// Start and end of the migration, in ms since 1970.
    pub(crate) lm: Range<u64>,
    /// Crowding of the link during the migration.
    pub(crate) crowding: Option<Crowding>,
    /// Quiet time before the migration.
    pub(crate) quiet: Range<u64>,
    /// End of the measurement.
    pub(crate) end: u64,
    /// Report of fio.
    pub(crate) guest: FioReport,
}

impl Stage {
    /// Starts two nodes at both ends of a narrow link with other traffic.
    pub(crate) fn crowded(scene: &SceneOptions) -> io::Result<Self> {
        let link = Link::new(Some(scene.link_bits()))?;
        let mut cluster = Cluster::prepare_on(
            &[("a", Some(link.left())), ("b", Some(link.right()))],
            nodes()?,
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
    pub(crate) fn loopback(
        bytes: u64,
        load: FioLoad,
        quiet: Duration,
        in_memory: bool,
    ) -> io::Result<Self> {
        let mut cluster = Cluster::prepare(&["a", "b"], nodes()?)?;
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
    ///
    /// # Errors
    /// A migration that does not complete, an error in the guest, or images that differ.
    pub(crate) fn run(&self, disk: &str, options: &[&str]) -> io::Result<Run> {
        self.run_while(disk, Moved::Own(options))
    }

    /// Moves the given disk while the guest writes to a new disk.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub(crate) fn run_while(&self, disk: &str, moved: Moved<'_>) -> io::Result<Run> {
        let (a, b) = (self.cluster.node("a"), self.cluster.node("b"));
        let image = self.image.to_string_lossy();
        a.godwit(&["disk", "import", disk, &image]).json()?;
        if let Moved::Neighbours(neighbour, _) = moved {
            neighbour.import(disk)?;
        }
        settle();
        let mut fio = self.load.start(&a.nbd(disk), self.cluster.dir())?;
        stay(&mut fio, WARM_UP)?;
        let quiet_from = now_ms();
        stay(&mut fio, self.quiet)?;

        let from = now_ms();
        let (node, id) = match moved {
            Moved::Own(options) => (a, start_migration(a, disk, "b", options)?),
            Moved::Neighbours(neighbour, rate) => neighbour.start(disk, rate)?,
        };
        let (shown, to, mut crowding) = self.follow(&mut fio, node, &id)?;
        if let (Some(crowd), Some(crowding)) = (&self.crowd, &mut crowding) {
            let rest = crowding.span.end.saturating_sub(now_ms());
            stay(&mut fio, Duration::from_millis(rest))?;
            crowd.look(crowding);
        }
        stay(&mut fio, AFTER)?;
        let end = now_ms();
        let guest = fio.stop()?;
        if guest.error != 0 {
            return Err(io::Error::other(format!(
                "the guest saw error {} during '{disk}': {}",
                guest.error, guest.messages
            )));
        }
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
            alive(fio)?;
        }
    }
}

impl Neighbour {
    /// Starts nodes c and d on loopback. The destination's images are in memory, like those of the guest's nodes.
    pub(crate) fn new(bytes: u64) -> io::Result<Self> {
        let mut cluster = Cluster::prepare(&["c", "d"], nodes()?)?;
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
    pub(crate) fn during(&self) -> Window {
        self.guest.window(self.lm.start, self.lm.end)
    }

    /// Returns the guest's measurements of the quiet time before.
    pub(crate) fn before(&self) -> Window {
        self.guest.window(self.quiet.start, self.quiet.end)
    }

    /// Returns the seconds from the accepted offer until the destination serves.
    pub(crate) fn lm_seconds(&self) -> f64 {
        self.migration["lm_seconds"].as_f64().unwrap_or(0.0)
    }

    /// Returns the source's account of the promise.
    pub(crate) fn promise(&self) -> &Value {
        &self.migration["promise"]
    }

    /// Returns the number of pauses of all kinds.
    pub(crate) fn pauses(&self) -> u64 {
        let kinds = ["guest_latency", "link_queue", "interface_budget"];
        let pauses = &self.promise()["pauses"];
        kinds
            .iter()
            .map(|kind| pauses[kind].as_u64().unwrap_or(0))
            .sum()
    }
}

fn nodes() -> io::Result<ClusterOptions> {
    Ok(ClusterOptions {
        godwit: release_binary()?,
        tls: true,
    })
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

/// Lets the load run; fails if the load has ended.
fn stay(fio: &mut RunningFio, how_long: Duration) -> io::Result<()> {
    std::thread::sleep(how_long);
    alive(fio)
}

fn alive(fio: &mut RunningFio) -> io::Result<()> {
    if fio.alive() {
        return Ok(());
    }
    Err(io::Error::other(fio.explain()))
}
