//! Debian's RDMA programs with and without the library, all without a move: no program may be worse off with the
//! library.

use std::io;

use godwit_testkit::rdma::Bed;
use serde_json::{Value, json};

/// The programs, one a line: a name, the command at guest 1, and the command at guest 3, with `$a` and `$b` for their
/// addresses. A line with one command alone is for both sides: the server without a partner's address, and the client with
/// one. Some clients need no server. qperf's own connections name no GID, which RoCE needs. UCX runs over the transport
/// alone: the upper layers of Debian's UCX need unreliable datagrams, with which UCX aborts on this device.
const PAIRS: &str = "rping | rping -s -a $a -C 5 | rping -c -a $a -C 5
ucmatose | ucmatose | ucmatose -s $a
udaddy | udaddy | udaddy -s $a
rstream | rstream -S 100 -C 5 | rstream -s $a -S 100 -C 5
riostream | riostream -S 100 -C 5 | riostream -s $a -S 100 -C 5
cmtime | cmtime | cmtime -s $a -c 5
rcopy | rcopy | rcopy /etc/services $a:/tmp/copied
rdma_server | rdma_server | rdma_client -s $a
rdma_xserver | rdma_xserver -c r | rdma_xclient -s $a -c r
rdma_xserver -c x | rdma_xserver -c x | rdma_xclient -s $a -c x
mckey | mckey -m 239.1.2.3 -b $a | mckey -s -m 239.1.2.3 -b $b
ibv_devices |  | ibv_devices
ibv_devinfo |  | ibv_devinfo -v
ibv_rc_pingpong -g 1 -n 50
ibv_rc_pingpong -g 1 -n 50 -e
ibv_rc_pingpong -g 1 -n 50 -N
ibv_rc_pingpong -g 1 -n 50 -t
ibv_uc_pingpong -g 1 -n 50
ibv_ud_pingpong -g 1 -n 50
ibv_srq_pingpong -g 1 -n 50
ibv_xsrq_pingpong -g 1 -n 50
ib_send_lat -F -x 1 -n 50
ib_send_lat -F -R -n 50
ib_send_bw -F -x 1 -n 50 -c UD -s 1024
ib_send_bw -F -x 1 -n 50 -c UC
ib_write_bw -F -x 1 -n 50 -R
ib_write_lat -F -x 1 -n 50
ib_read_lat -F -x 1 -n 50
ib_read_bw -F -x 1 -n 50
ib_atomic_bw -F -x 1 -n 50
ib_atomic_lat -F -x 1 -n 50
qperf -cm1 | qperf | qperf -t 1 -cm1 $a rc_lat rc_bw rc_rdma_read_bw rc_rdma_write_bw
ucx_perftest rc am_lat | ucx_perftest | ucx_perftest -x rc_verbs -d rxe0:1 -n 50 -w 5 $a -t am_lat
ucx_perftest rc am_bw | ucx_perftest | ucx_perftest -x rc_verbs -d rxe0:1 -n 50 -w 5 $a -t am_bw
ucx_perftest rc put_bw | ucx_perftest | ucx_perftest -x rc_verbs -d rxe0:1 -n 50 -w 5 $a -t put_bw
fi_pingpong | fi_pingpong -p verbs -e msg -I 5 | fi_pingpong -p verbs -e msg -I 5 $a
fi_info |  | fi_info -p verbs";

/// The commands at guest 1 and at guest 3.
struct Pair {
    name: &'static str,
    /// Server command; empty if the client needs no server.
    server: &'static str,
    client: &'static str,
}

impl Pair {
    fn of(line: &'static str) -> Self {
        let mut parts = line.split(" | ");
        let name = parts.next().unwrap_or_default();
        Self {
            name,
            server: parts.next().unwrap_or(name).trim(),
            client: parts.next().unwrap_or_default(),
        }
    }
}

/// The setting that puts a program behind the library.
const WITH: &str = "LD_PRELOAD=/opt/godwit/libgodwit_verbs.so";
/// Longest run time of a program, in seconds. Some programs never end by themselves.
const LIMIT: u32 = 40;

/// Runs the wanted programs, each without and with the library.
pub(crate) fn compared(bed: &Bed, wants: impl Fn(&str) -> bool) -> io::Result<Vec<Value>> {
    let mut all = Vec::new();
    for pair in PAIRS.lines().map(Pair::of) {
        let name = format!("programs: {}", pair.name);
        if !wants(&name) {
            continue;
        }
        let without = best(bed, &pair, "")?;
        // A program that does not work here at all gets no second attempt.
        let with = if without == 0 {
            best(bed, &pair, WITH)?
        } else {
            run(bed, &pair, WITH, 2)?
        };
        all.push(json!({"program": pair.name, "without": without, "with": with}));
    }
    if wants("programs: rdma-core") {
        all.extend(own_tests(bed)?);
    }
    Ok(all)
}

/// Returns the client's exit status, of a second attempt if need be: on a busy host a server may not listen yet.
fn best(bed: &Bed, pair: &Pair, library: &str) -> io::Result<i32> {
    match run(bed, pair, library, 2)? {
        0 => Ok(0),
        _ => run(bed, pair, library, 8),
    }
}

fn run(bed: &Bed, pair: &Pair, library: &str, seconds: u32) -> io::Result<i32> {
    let (server_guest, client_guest) = (bed.guest(1), bed.guest(3));
    let (a, b) = (server_guest.address(), client_guest.address());
    let at = |command: &str| command.replace("$a", &a).replace("$b", &b);
    if !pair.server.is_empty() {
        let server = at(pair.server);
        server_guest.must(&format!(
            "(env {library} setsid timeout {} {server} </dev/null >/run/compared.log 2>&1 & echo $! >/run/compared.pid); sleep {seconds}",
            LIMIT + 20
        ))?;
    }
    let client = match pair.client {
        "" => format!("{} {a}", pair.server),
        client => at(client),
    };
    let ended = client_guest.run(&format!(
        "env {library} timeout {LIMIT} {client} </dev/null >/run/compared.log 2>&1"
    ))?;
    if !pair.server.is_empty() {
        server_guest.run("kill $(cat /run/compared.pid); sleep 0.2; true")?;
    }
    Ok(ended.status)
}

/// Runs rdma-core's own tests, each of which is a program to compare. The tests talk to themselves at one guest.
fn own_tests(bed: &Bed) -> io::Result<Vec<Value>> {
    let guest = bed.guest(1);
    // Debian ships the tests compressed, as parts of the documentation.
    guest
        .must("cd /opt/rdma-core-tests && gunzip -f ./*.gz 2>/dev/null; ls run_tests.py base.py")?;
    let mut said = [String::new(), String::new()];
    for (library, said) in ["", WITH].into_iter().zip(&mut said) {
        // The tests run longer than a command may take.
        guest.must(&format!(
            "rm -f /run/own.status; (cd /opt/rdma-core-tests; env {library} setsid python3 run_tests.py --dev rxe0 -v </dev/null \
             >/run/own.log 2>&1; echo $? >/run/own.status) >/dev/null 2>&1 &"
        ))?;
        while guest
            .run("for i in $(seq 50); do [ -s /run/own.status ] && exit 0; sleep 1; done; exit 1")?
            .status
            != 0
        {}
        *said = guest.must("grep -E '^test.* \\.\\.\\. ' /run/own.log; tail -n 3 /run/own.log")?;
    }
    let [without, with] = said.map(|said| outcomes(&said));
    println!(
        "  rdma-core's tests: {} without the library, {} with it succeed",
        successes(&without),
        successes(&with)
    );
    let mut worse = Vec::new();
    for (test, outcome) in &without {
        let there = with
            .iter()
            .find(|(other, _)| other == test)
            .map(|(_, outcome)| *outcome);
        if there != Some(*outcome) {
            println!("  {test}: {outcome} without the library, {there:?} with it");
            let (without, with) = (u8::from(!*outcome), u8::from(there != Some(true)));
            let program = "rdma-core's tests";
            worse.push(json!({"program": program, "test": test, "without": without, "with": with}));
        }
    }
    let fewer = successes(&without) == 0 || with.len() < without.len();
    let program = "rdma-core's tests as a whole";
    worse.push(json!({"program": program, "without": 0, "with": u8::from(fewer)}));
    Ok(worse)
}

/// Returns each test, and true unless the test failed.
fn outcomes(said: &str) -> Vec<(String, bool)> {
    let lines = said.lines().filter_map(|line| line.split_once(" ... "));
    lines
        .map(|(test, outcome)| {
            (
                test.to_owned(),
                outcome.starts_with("ok") || outcome.starts_with("skipped"),
            )
        })
        .collect()
}

fn successes(outcomes: &[(String, bool)]) -> usize {
    outcomes.iter().filter(|(_, succeeded)| *succeeded).count()
}
