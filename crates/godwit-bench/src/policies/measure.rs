//! One measurement: disks under load, moved at once by one policy, and verified at the end.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_testkit::NbdTarget;
use godwit_testkit::cluster::Node;
use godwit_testkit::nbd::NbdConnection;
use godwit_testkit::process::wait_for;
use godwit_testkit::scenario::{migration, start_migration};
use serde_json::{Value, json};

use super::load::{Had, Kind, Load, Plan};
use super::policy::Policy;
use super::relay;
use super::site::{Made, PATIENCE, Site};
use crate::common::{awaited, interrupt, named};

/// Time between two looks at the progress of the moves.
const LOOK: Duration = Duration::from_millis(50);

#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) policy: Policy,
    pub(super) plan: Plan,
    /// Bytes of each disk.
    pub(super) disk: u64,
    /// Bytes of each disk from its base image; 0 for no base image.
    pub(super) base: u64,
    /// Number of machines that move at once.
    pub(super) machines: usize,
    /// Time after which an unfinished move is given up.
    pub(super) limit: Duration,
    /// Time to watch the load of a disk that does not move.
    pub(super) watched: Duration,
}

/// Measures the case once.
pub(super) fn measure(site: &Site, case: &Case) -> io::Result<Value> {
    let at = match case.policy.words {
        Some(_) => site.a(),
        None => site.b(),
    };
    let mut guests = Vec::new();
    for number in 0..case.machines {
        let made = site.make(at, case.disk, case.base)?;
        guests.push(Guest::start(site, case, at, made, number as u64)?);
    }
    let before = warm_up(&guests, case)?;
    // No measurement pays for the previous one's writes.
    rustix::fs::sync();
    let begun = Instant::now();
    let wire = site.link.carried_bytes()?;
    let had = had(&guests);
    let end = match case.policy.words {
        Some(words) => moved(site, case, words, &guests, begun)?,
        None => {
            std::thread::sleep(case.watched);
            End::default()
        }
    };
    let meanwhile = self::had(&guests) - had;
    let seconds = begun.elapsed().as_secs_f64();
    let mut run = figures(&before, meanwhile, seconds, &end);
    run["wire_bytes"] = (site.link.carried_bytes()? - wire).into();
    run["policy"] = case.policy.name.into();
    run["load"] = case.plan.kind.name().into();
    run["machines"] = case.machines.into();
    run["converged"] = (case.policy.words.is_some() && !end.given_up).into();
    if case.policy.words == Some(&[]) {
        run["reason"] = reason(site.a(), &end).into();
    }
    run["verified_bytes"] = verified(site, case, guests, &end)?.into();
    Ok(run)
}

/// Returns the figures of a move. Times are seconds since the command that requests the move; a move that was given up
/// took until then. The cost is the seconds until the source may go, the lost seconds of the guest's work, and once
/// more the seconds with the guest dependent on two nodes.
fn figures(before: &Before, meanwhile: Had, seconds: f64, end: &End) -> Value {
    let pace = meanwhile.bytes() as f64 / seconds;
    let kept = before.pace().map_or(1.0, |usual| (pace / usual).min(1.0));
    let needed = end
        .free
        .zip(end.handed_over)
        .map(|(free, over)| free - over);
    let seconds = end.free.unwrap_or(seconds);
    let lost = (1.0 - kept) * seconds;
    json!({
        "seconds": seconds, "handed_over_seconds": end.handed_over, "source_needed_seconds": needed,
        "write_before": rate(before.had.written, before.had.writing),
        "write": rate(meanwhile.written, meanwhile.writing),
        "read_before": rate(before.had.read, before.had.reading), "read": rate(meanwhile.read, meanwhile.reading),
        "lost_seconds": lost, "cost": seconds + lost + needed.unwrap_or(0.0),
    })
}

/// Ends the loads, reads all disks at their owners, and removes them. Returns the bytes found right.
fn verified(site: &Site, case: &Case, guests: Vec<Guest>, end: &End) -> io::Result<u64> {
    let mut bytes = 0;
    for guest in guests {
        let (policy, load) = (case.policy.name, case.plan.kind.name());
        let who = format!("{policy} under {load}, {}", guest.name);
        let failed = named(&who);
        let owner = match end.given_up {
            false => site.b(),
            true => owner_of(site, &guest.name)?,
        };
        let model = guest.load.stop().map_err(&failed)?;
        let mut disk = NbdConnection::connect(&owner.nbd(&guest.name))?;
        bytes += model.verify(&mut disk).map_err(&failed)?;
        drop(disk);
        site.remove(&guest.name)?;
    }
    Ok(bytes)
}

/// A machine with its load.
struct Guest {
    name: String,
    load: Load,
}

impl Guest {
    fn start(site: &Site, case: &Case, at: &Node, made: Made, number: u64) -> io::Result<Self> {
        let (target, across) = match case.policy.words {
            Some(_) => (at.nbd(&made.name), None),
            None => {
                let address = relay::start(&site.link, at.spec().dir.join("nbd.sock"))?;
                let target = NbdTarget::tcp(address, &made.name);
                (target, Some(Arc::clone(&site.link)))
            }
        };
        let plan = Plan {
            seed: case.plan.seed + number,
            ..case.plan.clone()
        };
        Ok(Self {
            load: Load::start(target, plan, made.model, across)?,
            name: made.name,
        })
    }
}

/// The loads' progress before the move.
struct Before {
    had: Had,
    lasted: Duration,
}

impl Before {
    /// Returns the bytes a second.
    fn pace(&self) -> Option<f64> {
        rate(self.had.bytes(), self.lasted)
    }
}

/// Waits until each load has completed its first pass, which fills its region, and has shown its speed.
fn warm_up(guests: &[Guest], case: &Case) -> io::Result<Before> {
    let through = |passes: u64| {
        wait_for(case.limit + PATIENCE, || {
            let done = |guest: &Guest| guest.load.had().passes >= passes;
            let failed = guests.iter().any(|guest| guest.load.failed());
            (failed || guests.iter().all(done)).then_some(!failed)
        })
    };
    if through(1) != Some(true) {
        return Err(io::Error::other("the load fails before anything has moved"));
    }
    let (begun, had) = (Instant::now(), had(guests));
    // The pace of a load that writes and then reads shows only over a whole turn.
    if case.plan.kind == Kind::Ior {
        through(2);
    } else {
        std::thread::sleep(Duration::from_secs(2));
    }
    Ok(Before {
        had: self::had(guests) - had,
        lasted: begun.elapsed(),
    })
}

fn had(guests: &[Guest]) -> Had {
    guests.iter().fold(Had::default(), |sum, guest| {
        let had = guest.load.had();
        Had {
            written: sum.written + had.written,
            writing: sum.writing + had.writing,
            read: sum.read + had.read,
            reading: sum.reading + had.reading,
            passes: sum.passes + had.passes,
        }
    })
}

fn rate(bytes: u64, time: Duration) -> Option<f64> {
    (bytes > 0 && !time.is_zero()).then(|| bytes as f64 / time.as_secs_f64())
}

/// The end of the moves.
#[derive(Debug, Default)]
struct End {
    ids: Vec<String>,
    handed_over: Option<f64>,
    free: Option<f64>,
    given_up: bool,
}

/// Moves all disks at once.
fn moved(
    site: &Site,
    case: &Case,
    words: &[&str],
    guests: &[Guest],
    begun: Instant,
) -> io::Result<End> {
    let mut end = End {
        ids: begin(site, words, guests)?,
        ..End::default()
    };
    let mut followed = vec![false; guests.len()];
    loop {
        interrupt::check()?;
        let at = begun.elapsed();
        let shown = disks(site.a())?;
        let mut open = 0;
        for (guest, followed) in guests.iter().zip(&mut followed) {
            let disk = find(&shown, &guest.name);
            if guest.load.failed() {
                return Err(io::Error::other(format!(
                    "the load of {} has ended",
                    guest.name
                )));
            }
            let departed = disk["state"] == "departed";
            if departed && !*followed {
                guest.load.follow(site.b().nbd(&guest.name));
                *followed = true;
            }
            if disk["state"] == "serving" && disk["migration"].is_null() {
                let shown = end.ids.iter().map(|id| migration(site.a(), id));
                let shown: Vec<_> = shown.collect();
                return Err(io::Error::other(format!("a move ended: {shown:?}")));
            }
            open += usize::from(!departed || disk["owes"] == true);
        }
        if end.handed_over.is_none() && followed.iter().all(|followed| *followed) {
            end.handed_over = Some(at.as_secs_f64());
        }
        if open == 0 {
            end.free = Some(at.as_secs_f64());
            return Ok(end);
        }
        if at > case.limit {
            give_up(site, &end.ids)?;
            end.given_up = true;
            return Ok(end);
        }
        std::thread::sleep(LOOK);
    }
}

/// Requests the moves of all disks at the same time, and returns their ids.
fn begin(site: &Site, words: &[&str], guests: &[Guest]) -> io::Result<Vec<String>> {
    let words = [&["--sla", "off"], words].concat();
    std::thread::scope(|scope| {
        let start = |guest: &Guest| {
            let (name, words) = (guest.name.clone(), words.clone());
            scope.spawn(move || start_migration(site.a(), &name, "b", &words))
        };
        let threads: Vec<_> = guests.iter().map(start).collect();
        let ids = threads.into_iter().map(|thread| {
            let id = thread.join();
            Ok(id.map_err(|_| io::Error::other("asking for a move panicked"))??)
        });
        ids.collect()
    })
}

/// Cancels the moves that can be cancelled and waits for the others.
fn give_up(site: &Site, ids: &[String]) -> io::Result<()> {
    for id in ids {
        // A move that has handed its disk over cannot be cancelled.
        let _ = site.a().godwit(&["migration", "cancel", id]).text();
    }
    let over = || {
        let over = |id: &String| {
            let shown = migration(site.a(), id);
            let ended = shown["phase"] == "aborted" || shown["phase"] == "completed";
            ended && shown["source_needed"] != true
        };
        ids.iter().all(over).then_some(())
    };
    awaited("the end of a move that was given up", PATIENCE, over)
}

fn owner_of<'a>(site: &'a Site, disk: &str) -> io::Result<&'a Node> {
    let serves = |node: &Node| node.disk(disk).is_ok_and(|shown| shown["serves"] == true);
    let owner = [site.a(), site.b()].into_iter().find(|node| serves(node));
    owner.ok_or_else(|| io::Error::other(format!("nobody serves {disk}")))
}

/// Returns the node's last reason for its choice.
fn reason(node: &Node, end: &End) -> Option<String> {
    let shown = migration(node, end.ids.first()?);
    shown["options"]["policy_reason"]
        .as_str()
        .map(str::to_owned)
}

fn disks(node: &Node) -> io::Result<Value> {
    Ok(node.godwit(&["disk", "list"]).json()?)
}

fn find<'a>(shown: &'a Value, name: &str) -> &'a Value {
    let all = shown.as_array().map(Vec::as_slice).unwrap_or_default();
    let found = all.iter().find(|disk| disk["name"] == name);
    found.unwrap_or(&Value::Null)
}
