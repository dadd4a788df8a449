//! Kills of nodes in each phase of a move of a process or a container, and of CRIU in the middle of a dump. Afterwards
//! the mover runs at exactly one place, and either works on with the partner or the move names the loss.

use std::io;
use std::time::{Duration, Instant};

use godwit_testkit::rdma::{Bed, MoveSeen, clean_up, kill_node, see_move, start_node};
use serde::Serialize;

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
            Ends::Stays => {
                found.runs_at == [Who::Source as usize]
                    && found.works
                    && says(&["goes on at node", "with its connections"])
            }
            Ends::Moves => {
                found.runs_at == [Who::Destination as usize]
                    && found.works
                    && said.is_none()
                    && found.phase == "completed"
            }
            Ends::Works => Ends::Stays.are(found) || Ends::Moves.are(found),
            Ends::MovesAlone => {
                found.runs_at == [Who::Destination as usize]
                    && says(&["runs at node", "connections were lost"])
            }
        }
    }
}

struct Case {
    name: &'static str,
    what: What,
    who: Who,
    /// Place of the kill. For a node, a fail point. For CRIU, a shell condition, with `$pid` for the process.
    at: &'static str,
    ends: Ends,
    /// True if the process has memory that is copied while it works.
    memory: bool,
}

const fn case(name: &'static str, who: Who, at: &'static str, ends: Ends) -> Case {
    Case {
        name,
        what: What::Process,
        who,
        at,
        ends,
        memory: false,
    }
}

/// Turns a case into one of a process with memory that is copied while it works.
const fn with_memory(case: Case) -> Case {
    Case {
        memory: true,
        ..case
    }
}

/// Returns a case of a container.
const fn contained(name: &'static str, who: Who, at: &'static str, ends: Ends) -> Case {
    Case {
        what: What::Container,
        ..case(name, who, at, ends)
    }
}

const CASES: &[Case] = &[
    with_memory(case(
        "death: source, copying memory",
        Who::Source,
        "process-precopying",
        Ends::Stays,
    )),
    with_memory(case(
        "death: source, sending what changed",
        Who::Source,
        "process-sending",
        Ends::Stays,
    )),
    // The node may or may not be back when the image is to come.
    with_memory(case(
        "death: destination, copying memory",
        Who::Destination,
        "process-arrival-round",
        Ends::Works,
    )),
    with_memory(case(
        "death: destination, restoring what changed",
        Who::Destination,
        "process-arrival-restored",
        Ends::Moves,
    )),
    case(
        "death: source, suspending",
        Who::Source,
        "process-suspending",
        Ends::Stays,
    ),
    case(
        "death: source, waiting",
        Who::Source,
        "process-waiting",
        Ends::Stays,
    ),
    case(
        "death: source, releasing",
        Who::Source,
        "process-releasing",
        Ends::Stays,
    ),
    case(
        "death: source, dumping",
        Who::Source,
        "process-dumping",
        Ends::Stays,
    ),
    case(
        "death: source, sending",
        Who::Source,
        "process-sending",
        Ends::Stays,
    ),
    case(
        "death: source, restoring",
        Who::Source,
        "process-restoring",
        Ends::Stays,
    ),
    case(
        "death: source, recreating",
        Who::Source,
        "process-recreating",
        Ends::Moves,
    ),
    case(
        "death: source, connecting",
        Who::Source,
        "process-connecting",
        Ends::Moves,
    ),
    case(
        "death: source, resuming",
        Who::Source,
        "process-resuming",
        Ends::Moves,
    ),
    case(
        "death: destination, before the restore",
        Who::Destination,
        "process-arrival-restoring",
        Ends::Stays,
    ),
    case(
        "death: destination, after the restore",
        Who::Destination,
        "process-arrival-restored",
        Ends::Moves,
    ),
    case(
        "death: destination, recreating",
        Who::Destination,
        "process-arrival-recreating",
        Ends::MovesAlone,
    ),
    case(
        "death: partner, waiting",
        Who::Partner,
        "process-partner-drain",
        Ends::Stays,
    ),
    case(
        "death: partner, connecting",
        Who::Partner,
        "process-partner-connect",
        Ends::Moves,
    ),
    case(
        "death: partner, resuming",
        Who::Partner,
        "process-partner-resume",
        Ends::Moves,
    ),
    case(
        "death: CRIU, the process is stopped",
        Who::Criu,
        "grep -q 'TracerPid:.*[1-9]' /proc/$pid/status",
        Ends::Stays,
    ),
    contained(
        "death in runc: source, suspending",
        Who::Source,
        "process-suspending",
        Ends::Stays,
    ),
    contained(
        "death in runc: source, waiting",
        Who::Source,
        "process-waiting",
        Ends::Stays,
    ),
    contained(
        "death in runc: source, releasing",
        Who::Source,
        "process-releasing",
        Ends::Stays,
    ),
    contained(
        "death in runc: source, dumping",
        Who::Source,
        "process-dumping",
        Ends::Stays,
    ),
    contained(
        "death in runc: source, sending",
        Who::Source,
        "process-sending",
        Ends::Stays,
    ),
    contained(
        "death in runc: source, restoring",
        Who::Source,
        "process-restoring",
        Ends::Stays,
    ),
    contained(
        "death in runc: source, recreating",
        Who::Source,
        "process-recreating",
        Ends::Moves,
    ),
    contained(
        "death in runc: source, connecting",
        Who::Source,
        "process-connecting",
        Ends::Moves,
    ),
    contained(
        "death in runc: source, resuming",
        Who::Source,
        "process-resuming",
        Ends::Moves,
    ),
    contained(
        "death in runc: destination, before the restore",
        Who::Destination,
        "process-arrival-restoring",
        Ends::Stays,
    ),
    contained(
        "death in runc: destination, after the restore",
        Who::Destination,
        "process-arrival-restored",
        Ends::Moves,
    ),
    contained(
        "death in runc: destination, recreating",
        Who::Destination,
        "process-arrival-recreating",
        Ends::MovesAlone,
    ),
];

/// The outcome of a move.
#[derive(Serialize)]
pub(crate) struct Death {
    pub(crate) case: &'static str,
    /// Guests with the process at the end of the move, answering or not.
    pub(crate) runs_at: Vec<usize>,
    /// The phase in which the move ended, and the error.
    pub(crate) phase: String,
    pub(crate) said: Option<String>,
    /// True if both processes worked on with each other and had checked everything.
    pub(crate) works: bool,
    /// True if the process ran at the one required place, with the required message.
    pub(crate) as_expected: bool,
    pub(crate) error: Option<String>,
}

/// Kills a node in each wanted case, and returns the outcomes.
pub(crate) fn deaths(bed: &Bed, wanted: impl Fn(&str) -> bool) -> Vec<Death> {
    let mut all = Vec::new();
    for case in CASES.iter().filter(|case| wanted(case.name)) {
        let found = death(bed, case);
        let works = if found.works {
            "works"
        } else {
            "does not work"
        };
        let said = found.error.as_ref().or(found.said.as_ref());
        println!(
            "  {:42} {} runs at {:?}, {works}: {}",
            found.case,
            if found.as_expected { "" } else { "WRONG:" },
            found.runs_at,
            said.map_or("moved", String::as_str)
        );
        all.push(found);
    }
    all
}

fn death(bed: &Bed, case: &Case) -> Death {
    let mut found = Death {
        case: case.name,
        runs_at: Vec::new(),
        phase: String::new(),
        said: None,
        works: false,
        as_expected: false,
        error: None,
    };
    if let Err(error) = run(bed, case, &mut found) {
        found.error = Some(error.to_string());
    }
    // After any outcome, the next case finds three nodes.
    for number in 1..=3 {
        let cleaned = clean_up(bed)
            .and_then(|()| container::clean_up(bed))
            .and_then(|()| bed.restart_node(number, 3, ""));
        if let Err(error) = cleaned {
            found.error.get_or_insert_with(|| error.to_string());
        }
    }
    found.as_expected = found.error.is_none() && case.ends.are(&found);
    found
}

fn run(bed: &Bed, case: &Case, found: &mut Death) -> io::Result<()> {
    let variant = if case.memory {
        checking::with_memory()
    } else {
        &VARIANTS[0]
    };
    let talkers = Talkers::start(bed, case.what, variant)?;
    let id = if case.who == Who::Criu {
        kill_criu(bed, case.at, &talkers)?
    } else {
        kill_and_restart(bed, case, &talkers)?
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

/// Kills the node when the move has reached the case's fail point, and starts the node again. Returns the move's id.
fn kill_and_restart(bed: &Bed, case: &Case, talkers: &Talkers<'_>) -> io::Result<String> {
    let victim = case.who as usize;
    bed.restart_node(
        victim,
        3,
        &format!("FAILPOINTS=\"{}=sleep(600000)\" ", case.at),
    )?;
    std::thread::sleep(WORK);
    let id = talkers.begin_move()?;
    let began = Instant::now();
    let there = format!("grep -q 'at a fail point.*{}' /run/node.log", case.at);
    while bed.guest(victim).run(&there)?.status != 0 {
        if began.elapsed() > REACHED {
            let seen = see_move(bed.guest(1), &id)?;
            return Err(io::Error::other(format!(
                "the move did not come to {}: {seen:?}",
                case.at
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
