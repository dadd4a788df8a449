//! The demo: each program, each side.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use godwit_testkit::process::target_dir;
use godwit_testkit::rdma::{Bed, Moved, Place, RdmaGuest, certificates, move_process};
use godwit_testkit::report::write_report;

use crate::Arguments;
use crate::checking::{VARIANTS, check};
use crate::container::containers;
use crate::deaths::deaths;
use crate::holder::move_holder;
use crate::programs::{PROGRAMS, Program, Side, with_queue_pairs};
use crate::refusals::refusals;
use crate::report::{Move, Report};

/// The address that moves along.
pub(crate) const ALIAS: &str = "10.0.0.100/24";
/// The partner's, if it moves as well.
pub(crate) const PARTNER_ALIAS: &str = "10.0.0.101/24";
/// How long a program may take to connect all of its queue pairs.
const CONNECT: Duration = Duration::from_secs(60);
/// How long a program may take to end after its move.
const END: Duration = Duration::from_secs(180);
/// The port at which Debian's programs listen for each other.
const PORT: u16 = 18515;
/// The routing table of what goes to that port.
const TABLE: u32 = 100;

pub(crate) fn run(arguments: &Arguments) -> io::Result<bool> {
    let began = Instant::now();
    println!("booting three virtual machines with soft-RoCE");
    let bed = Bed::start(3, &payload()?)?;
    bed.start_nodes(3)?;
    println!(
        "  they and their nodes run after {:.0} s",
        began.elapsed().as_secs_f64()
    );
    let mut report = Report {
        passed: true,
        holder: None,
        refusals: Vec::new(),
        moves: Vec::new(),
        checked: Vec::new(),
        deaths: Vec::new(),
    };
    if arguments.wants("holder") && arguments.qps.is_empty() {
        let holder = move_holder(&bed)?;
        println!(
            "  a process that only holds a device: CRIU alone refused it: {}; with the plugin it runs on guest 2: {}",
            holder.refused_without_plugin, holder.restored_with_plugin
        );
        report.passed &= holder.refused_without_plugin && holder.restored_with_plugin;
        report.holder = Some(holder);
        clean_up(&bed)?;
    }
    if arguments.wants("refusals") && arguments.qps.is_empty() {
        report.refusals = refusals(&bed)?;
        for refusal in &report.refusals {
            println!("  refused: {}", refusal.case);
            for sentence in &refusal.said {
                println!("    {sentence}");
            }
            report.passed &= refusal.as_expected;
        }
        clean_up(&bed)?;
    }
    if arguments.wants("container") && arguments.qps.is_empty() {
        containers(&bed, &mut report)?;
    }
    for program in PROGRAMS
        .iter()
        .filter(|program| arguments.wants(&program.name) && arguments.qps.is_empty())
    {
        for side in [Side::Server, Side::Client] {
            record(&bed, program, side, arguments.pre_setup, &mut report)?;
        }
    }
    for count in &arguments.qps {
        let program = with_queue_pairs(*count);
        for pre_setup in [false, true] {
            record(&bed, &program, Side::Client, pre_setup, &mut report)?;
        }
    }
    for variant in VARIANTS
        .iter()
        .filter(|variant| arguments.wants(variant.name) && arguments.qps.is_empty())
    {
        let checked = check(
            &bed,
            variant,
            arguments.moves,
            arguments.loss,
            arguments.pre_setup,
        )?;
        match &checked.error {
            None => println!(
                "  {:30} {} moves, blackout {:5.0} ms: {}",
                variant.name,
                checked.moves,
                checked.blackout_ms_median,
                checked.said.join("; ")
            ),
            Some(error) => println!("  {:30} FAILED: {error}", variant.name),
        }
        report.passed &= checked.error.is_none();
        report.checked.push(checked);
        clean_up(&bed)?;
    }
    report.deaths = deaths(&bed, |name| {
        !arguments.only.is_empty() && arguments.wants(name)
    });
    for death in &report.deaths {
        println!(
            "  {:42} runs at {:?}, {}: {}",
            death.case,
            death.runs_at,
            if death.works {
                "works"
            } else {
                "does not work"
            },
            death
                .error
                .as_ref()
                .or(death.said.as_ref())
                .map_or("moved", String::as_str)
        );
        report.passed &= death.as_expected;
    }
    let path = write_report("demo-rdma", &report)?;
    println!("report: {}", path.display());
    if arguments.keep_logs {
        for entry in std::fs::read_dir(bed.logs())?.flatten() {
            if entry
                .path()
                .extension()
                .is_some_and(|extension| extension == "log")
            {
                std::fs::copy(
                    entry.path(),
                    target_dir().join("demo-rdma").join(entry.file_name()),
                )?;
            }
        }
    }
    Ok(report.passed
        && (report.holder.is_some()
            || !report.refusals.is_empty()
            || !report.moves.is_empty()
            || !report.checked.is_empty()
            || !report.deaths.is_empty()))
}

/// One move, said and put into the report.
fn record(
    bed: &Bed,
    program: &Program,
    side: Side,
    pre_setup: bool,
    report: &mut Report,
) -> io::Result<()> {
    let mut moved = Moved::default();
    let error = one_move(bed, program, side, pre_setup, &mut moved)
        .err()
        .map(|error| error.to_string());
    match &error {
        None => println!(
            "  {:20} {:6} {} QPs{}  blackout {:5.0} ms, wait-before-stop {:4.0} ms, restore_rdma {:6.1} ms: both sides ended with success",
            program.name,
            side.name(),
            moved.qps,
            if pre_setup { " with pre-setup" } else { "" },
            moved.blackout_ms,
            moved.wbs_ms,
            moved.breakdown_ms.restore_rdma
        ),
        Some(error) => println!("  {:20} {:6} FAILED: {error}", program.name, side.name()),
    }
    report.passed &= error.is_none();
    report
        .moves
        .push(Move::new(&program.name, side.name(), moved, error));
    clean_up(bed)
}

/// What goes into the guests, without symbols.
fn payload() -> io::Result<Vec<PathBuf>> {
    let here = std::env::current_exe()?;
    let built = here
        .parent()
        .ok_or_else(|| io::Error::other("this program is in no directory"))?;
    let into = target_dir().join("demo-rdma");
    std::fs::create_dir_all(&into)?;
    let mut files = Vec::new();
    for name in [
        "libgodwit_verbs.so",
        "godwit-verbs",
        "godwit-verbs-client",
        "godwit",
    ] {
        let file = into.join(name);
        let stripped = Command::new("strip")
            .arg("-o")
            .arg(&file)
            .arg(built.join(name))
            .status()?;
        if !stripped.success() {
            return Err(io::Error::other(format!(
                "{} is missing; make demo-rdma builds it",
                built.join(name).display()
            )));
        }
        files.push(file);
    }
    files.extend(certificates(&built.join("godwit"), &into.join("certs"), 3)?);
    let plugin = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../criu-plugin/build");
    let plugins = into.join("plugins");
    let compiled = Command::new(plugin).arg(&plugins).output()?;
    if !compiled.status.success() {
        return Err(io::Error::other(
            String::from_utf8_lossy(&compiled.stderr).into_owned(),
        ));
    }
    files.push(plugins);
    Ok(files)
}

/// Starts the program at guests 1 and 3, moves one side to guest 2, and waits for both to end.
fn one_move(
    bed: &Bed,
    program: &Program,
    side: Side,
    pre_setup: bool,
    moved: &mut Moved,
) -> io::Result<()> {
    let (source, destination, fixed) = (bed.guest(1), bed.guest(2), bed.guest(3));
    let alias = ALIAS.split('/').next().unwrap_or(ALIAS);
    // Announced, since the partner may know the address at the guest that it moved to before.
    source.must(&format!(
        "ip addr add {ALIAS} dev eth0; arping -q -U -c 1 -I eth0 {alias} >/dev/null 2>&1; true"
    ))?;
    let command = format!(
        "env LD_PRELOAD=/opt/godwit/libgodwit_verbs.so {}",
        program.command
    );
    let (server_guest, client_guest) = match side {
        Side::Server => (source, fixed),
        Side::Client => (fixed, source),
    };
    let to = match side {
        Side::Server => alias.to_owned(),
        Side::Client => {
            // What the client says comes from the address that moves along; what the node says to the partner's node must not,
            // or its connection would go with the process.
            source.must(&format!(
                "ip route replace {to}/32 dev eth0 src {alias} table {TABLE} && \
                 ip rule add to {to} ipproto tcp dport {PORT} lookup {TABLE}",
                to = fixed.address()
            ))?;
            fixed.address()
        }
    };
    let server = server_guest.background("server", &command)?;
    listening(server_guest)?;
    let client = client_guest.background("client", &format!("{command} {to}"))?;
    let (server, client) = (
        Place {
            guest: server_guest,
            pid: server,
        },
        Place {
            guest: client_guest,
            pid: client,
        },
    );
    // Both: a program whose side is not connected yet cannot move, and it speaks over TCP until then.
    connected(server)?;
    connected(client)?;
    std::thread::sleep(Duration::from_secs_f64(program.work_seconds));
    let (mover, partner, log) = match side {
        Side::Server => (server, client, "run/server.log"),
        Side::Client => (client, server, "run/client.log"),
    };
    *moved = move_process(mover, destination, ALIAS, log, pre_setup)?;
    ended(
        Place {
            guest: destination,
            pid: mover.pid,
        },
        log,
        program,
    )?;
    let other = if log == "run/server.log" {
        "run/client.log"
    } else {
        "run/server.log"
    };
    ended(partner, other, program)
}

pub(crate) fn listening(guest: &RdmaGuest) -> io::Result<()> {
    guest.must("for i in $(seq 200); do ss -ltn | grep -q ':18515' && exit 0; sleep 0.05; done; cat /run/server.log; exit 1").map(drop)
}

/// Waits until the process has a queue pair that sends.
pub(crate) fn connected(place: Place<'_>) -> io::Result<()> {
    let began = Instant::now();
    while began.elapsed() < CONNECT {
        // A process that has not opened its device yet does not answer.
        if let Ok(status) = place.status()
            && !status.queue_pairs.is_empty()
            && status.queue_pairs.iter().all(|pair| pair.remote.is_some())
        {
            return Ok(());
        }
    }
    let said = place.guest.run("cat /run/server.log")?.text;
    Err(io::Error::other(format!(
        "the program did not connect; it said: {said}"
    )))
}

/// Waits until the process has ended and judges by what it said: a restored process is nobody's child
/// whose exit status could be asked.
fn ended(place: Place<'_>, log: &str, program: &Program) -> io::Result<()> {
    let silent = program.silent_server && log == "run/server.log";
    let began = Instant::now();
    let gone = format!(
        "[ ! -e /proc/{0} ] || grep -q '^State:.Z' /proc/{0}/status",
        place.pid
    );
    while began.elapsed() < END {
        if place.guest.run(&gone)?.status == 0 {
            let said = place.guest.must(&format!("cat /{log}"))?;
            return if succeeded(&said, silent) {
                Ok(())
            } else {
                Err(io::Error::other(format!(
                    "guest {}'s side ended with: {said}",
                    place.guest.number()
                )))
            };
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    let status = place
        .status()
        .map(|status| format!("{:?}", status.queue_pairs));
    let said = place.guest.must(&format!("cat /{log}"))?;
    Err(io::Error::other(format!(
        "guest {}'s side still runs {} s after the move; it said {said}; its queue pairs are {}",
        place.guest.number(),
        END.as_secs(),
        status.unwrap_or_else(|error| error.to_string()),
    )))
}

/// Whether a program's output is that of a run to its end.
fn succeeded(said: &str, silent: bool) -> bool {
    let bad = ["ailed", "rror", "ouldn't", "nable"]
        .iter()
        .any(|word| said.contains(word));
    let pingpong = said.contains("iters in");
    // perftest prints its result below the header, if this program has one for this side.
    let perftest = said
        .lines()
        .skip_while(|line| !line.contains("#bytes"))
        .nth(1)
        .is_some_and(|line| {
            line.trim()
                .starts_with(|first: char| first.is_ascii_digit())
        });
    !bad && (silent || pingpong || perftest)
}

/// Everything as before the first move.
pub(crate) fn clean_up(bed: &Bed) -> io::Result<()> {
    for number in 1..=3 {
        bed.guest(number).run(&format!(
            "pkill -9 -f '^ib'; pkill -9 -x godwit-verbs-cl; ip addr del {ALIAS} dev eth0; ip addr del {PARTNER_ALIAS} dev eth0; \
             ip rule del lookup {TABLE}; ip route flush table {TABLE}; ip route flush 10.0.0.100/32; tc qdisc del dev eth0 root; nft flush ruleset; rm -rf /run/server.log /run/client.log /run/verbs-client-ends; true"
        ))?;
    }
    Ok(())
}
