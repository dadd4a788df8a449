//! Kills of nodes in each phase of a move of a process or a container, and of CRIU in the middle of a dump. Afterwards
//! the mover runs at exactly one place, and either works on with the partner or the move names the loss.

use std::io;
use std::time::{Duration, Instant};

use godwit_testkit::rdma::{Bed, MoveSeen, clean_up, kill_node, see_move, start_node};
use serde_json::{Value, json};

use self::Ends::{Moves, MovesAlone, Stays, Works};
use self::Who::{Criu, Destination, Partner, Source};
use crate::rdma::cases::checking::{self, VARIANTS};
use crate::rdma::cases::container;
use crate::rdma::cases::talkers::{Talkers, What};

/// Time of work before the move.
const WORK: Duration = Duration::from_millis(500);
/// Longest time until a move reaches the point of the kill.
const REACHED: Duration = Duration::from_secs(90);
/// Longest time for a move to end, with a node restarted meanwhile.
const END: Duration = Duration::from_secs(240);

/// The victim: a node, by the guest's number, or CRIU.
#[derive(Clone, Copy, PartialEq)]
enum Who {
    Source = 1,
    Destination = 2,
    Partner = 3,
    /// No node: the CRIU that dumps the process.
    Criu,
}

impl Who {
    /// Returns the victim in words, and the start of the names of its fail points.
    const fn names(self) -> (&'static str, &'static str) {
        match self {
            Source => ("source", "process"),
            Destination => ("destination", "process-arrival"),
            Partner => ("partner", "process-partner"),
            Criu => ("CRIU", ""),
        }
    }
}

/// The required end of a move whose node is killed and starts again at once.
#[derive(Clone, Copy, Debug)]
enum Ends {
    /// The process goes on at the source, with its connections.
    Stays,
    /// The process runs at the destination, with its connections.
    Moves,
    /// The process goes on at either, with its connections.
    Works,
    /// The process runs at the destination, without its connections: its new keys are not known.
    MovesAlone,
}

impl Ends {
    /// Returns true if the move's outcome and message are these.
    fn are(self, found: &Death) -> bool {
        let said = found.said.as_deref();
        let says =
            |words: &[&str]| said.is_some_and(|said| words.iter().all(|word| said.contains(word)));
        match self {
            Stays => {
                found.runs_at == [Source as usize]
                    && found.works
                    && says(&["goes on at node", "with its connections"])
            }
            Moves => {
                found.runs_at == [Destination as usize]
                    && found.works
                    && said.is_none()
                    && found.phase == "completed"
            }
            Works => Stays.are(found) || Moves.are(found),
            MovesAlone => {
                found.runs_at == [Destination as usize]
                    && says(&["runs at node", "connections were lost"])
            }
        }
    }
}

/// The victim's process and its place.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Bare,
    /// A process with memory that is copied while it works.
    WithMemory,
    /// A container.
    Contained,
}

/// A kill: of whom, when, and where. For a node the place is the end of a fail point's name, for CRIU a shell condition
/// with `$pid` for the process.
#[derive(Clone, Copy)]
struct Kill(Who, &'static str, &'static str, Ends);

/// Kills while memory is copied. The destination may or may not be back when the image is to come.
const WITH_MEMORY: [Kill; 4] = [
    Kill(Source, "copying memory", "precopying", Stays),
    Kill(Source, "sending what changed", "sending", Stays),
    Kill(Destination, "copying memory", "round", Works),
    Kill(Destination, "restoring what changed", "restored", Moves),
];

/// Kills of processes and containers alike.
const ANY: [Kill; 12] = [
    Kill(Source, "suspending", "suspending", Stays),
    Kill(Source, "waiting", "waiting", Stays),
    Kill(Source, "releasing", "releasing", Stays),
    Kill(Source, "dumping", "dumping", Stays),
    Kill(Source, "sending", "sending", Stays),
    Kill(Source, "restoring", "restoring", Stays),
    Kill(Source, "recreating", "recreating", Moves),
    Kill(Source, "connecting", "connecting", Moves),
    Kill(Source, "resuming", "resuming", Moves),
    Kill(Destination, "before the restore", "restoring", Stays),
    Kill(Destination, "after the restore", "restored", Moves),
    Kill(Destination, "recreating", "recreating", MovesAlone),
];

/// Kills of partners and of CRIU.
const OTHERS: [Kill; 4] = [
    Kill(Partner, "waiting", "drain", Stays),
    Kill(Partner, "connecting", "connect", Moves),
    Kill(Partner, "resuming", "resume", Moves),
    Kill(
        Criu,
        "the process is stopped",
        "grep -q 'TracerPid:.*[1-9]' /proc/$pid/status",
        Stays,
    ),
];

/// A kill during the move of a process or a container.
pub(crate) struct Case(Kind, Kill);

/// Returns all cases.
pub(crate) fn cases() -> impl Iterator<Item = Case> {
    let of = |kind, kills: &'static [Kill]| kills.iter().map(move |kill| Case(kind, *kill));
    of(Kind::WithMemory, &WITH_MEMORY)
        .chain(of(Kind::Bare, &ANY))
        .chain(of(Kind::Bare, &OTHERS))
        .chain(of(Kind::Contained, &ANY))
}

impl Case {
    pub(crate) fn name(&self) -> String {
        let place = if self.0 == Kind::Contained {
            " in runc"
        } else {
            ""
        };
        let Kill(who, when, ..) = self.1;
        format!("death{place}: {}, {when}", who.names().0)
    }
}

/// The outcome of a move.
#[derive(Default)]
struct Death {
    /// Guests with the process at the end of the move, answering or not.
    runs_at: Vec<usize>,
    /// The phase in which the move ended, and the error.
    phase: String,
    said: Option<String>,
    /// True if both processes worked on with each other and had checked everything.
    works: bool,
}

/// Kills a node or CRIU, and returns the outcome.
pub(crate) fn death(bed: &Bed, case: &Case) -> Value {
    let mut found = Death::default();
    let mut error = run(bed, case, &mut found).err();
    // After any outcome, the next case finds three nodes.
    for number in 1..=3 {
        let cleaned = clean_up(bed)
            .and_then(|()| container::clean_up(bed))
            .and_then(|()| bed.restart_node(number, 3, ""));
        error = error.or(cleaned.err());
    }
    let as_expected = error.is_none() && case.1.3.are(&found);
    json!({
        "case": case.name(), "runs_at": found.runs_at, "phase": found.phase, "said": found.said, "works": found.works,
        "as_expected": as_expected, "error": error.map(|error| error.to_string()),
    })
}

fn run(bed: &Bed, case: &Case, found: &mut Death) -> io::Result<()> {
    let variant = match case.0 {
        Kind::WithMemory => checking::with_memory(),
        _ => &VARIANTS[0],
    };
    let what = match case.0 {
        Kind::Contained => What::Container,
        _ => What::Process,
    };
    let talkers = Talkers::start(bed, what, variant)?;
    let Kill(who, _, at, _) = case.1;
    let id = match who {
        Criu => kill_criu(bed, at, &talkers)?,
        _ => {
            let point = format!("{}-{at}", who.names().1);
            kill_and_restart(bed, who as usize, &point, &talkers)?
        }
    };
    let seen = wait_for_end(bed, &id)?;
    found.phase.clone_from(&seen.phase);
    found.said = seen.error.map(|error| error.message);
    let mut places = Vec::new();
    for number in 1..=2 {
        if let Some(place) = talkers.at(number)? {
            found.runs_at.push(number);
            places.push(place);
        }
    }
    let [place] = places[..] else {
        return Ok(());
    };
    place.status()?;
    if found
        .said
        .as_deref()
        .is_some_and(|said| said.contains("lost"))
    {
        return Ok(());
    }
    std::thread::sleep(WORK);
    talkers.end(place)?;
    found.works = true;
    Ok(())
}

/// Kills the node when the move has reached the fail point, and starts the node again. Returns the move's id.
fn kill_and_restart(
    bed: &Bed,
    victim: usize,
    point: &str,
    talkers: &Talkers<'_>,
) -> io::Result<String> {
    bed.restart_node(victim, 3, &format!("FAILPOINTS=\"{point}=sleep(600000)\" "))?;
    std::thread::sleep(WORK);
    let id = talkers.begin_move()?;
    let began = Instant::now();
    let there = format!("grep -q 'at a fail point.*{point}' /run/node.log");
    while bed.guest(victim).run(&there)?.status != 0 {
        if began.elapsed() > REACHED {
            let seen = see_move(bed.guest(1), &id)?;
            return Err(io::Error::other(format!(
                "the move did not come to {point}: {seen:?}"
            )));
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    kill_node(bed.guest(victim))?;
    start_node(bed.guest(victim), 3, "")?;
    Ok(id)
}

/// Kills the dumping CRIU once the condition holds. Returns the move's id.
fn kill_criu(bed: &Bed, condition: &str, talkers: &Talkers<'_>) -> io::Result<String> {
    let source = bed.guest(1);
    source.must(&format!(
        "cat >/run/killer <<'END'\npid={}\nuntil criu=$(pgrep -f '^criu dump') && {condition}; do :; done\n\
         kill -9 $criu && echo killed\nEND\n",
        talkers.mover.pid
    ))?;
    let killer = source.background("killer", "bash /run/killer")?;
    std::thread::sleep(WORK);
    let id = talkers.begin_move()?;
    let killed = source.must(&format!(
        "while [ $SECONDS -lt 80 ]; do grep -q killed /run/killer.log && exit 0; sleep 0.2; done; kill -9 {killer}; \
         cat /run/killer.log; exit 1"
    ));
    killed.map_err(|error| io::Error::other(format!("no CRIU was killed: {error}")))?;
    Ok(id)
}

fn wait_for_end(bed: &Bed, id: &str) -> io::Result<MoveSeen> {
    let began = Instant::now();
    loop {
        // A starting node does not answer yet.
        let seen = see_move(bed.guest(1), id);
        match seen {
            Ok(seen) if seen.ended() => return Ok(seen),
            _ if began.elapsed() < END => std::thread::sleep(Duration::from_millis(300)),
            Ok(seen) => return Err(io::Error::other(format!("the move does not end: {seen:?}"))),
            Err(error) => return Err(error),
        }
    }
}
