//! Debian's programs, run at two guests, one side of which moves to the third.

use std::borrow::Cow;
use std::io;
use std::time::{Duration, Instant};

use godwit_verbs::abi::IBV_QPS_RTS;
use godwit_verbs::shim::QueuePairState;

use super::{Bed, Place, RdmaGuest};

/// The address of the mover.
pub const ALIAS: &str = "10.0.0.100/24";
/// The partner's address, if the partner moves as well.
pub const PARTNER_ALIAS: &str = "10.0.0.101/24";
/// Longest time for a program to connect all of its queue pairs.
const CONNECT: Duration = Duration::from_secs(60);
/// Longest time for a program to end after its move.
const END: Duration = Duration::from_secs(180);
/// Longest time for a checking process to end.
const CHECKED_END: Duration = Duration::from_secs(120);
/// The port at which Debian's programs listen for each other.
const PORT: u16 = 18515;
/// The routing table of traffic to this port.
const TABLE: u32 = 100;

/// A program of Debian's, for both sides.
pub struct Program {
    pub name: Cow<'static, str>,
    /// Command without the partner's address, the last argument of clients.
    pub command: Cow<'static, str>,
    /// Seconds of work before the move.
    pub work_seconds: f64,
    /// True if the server prints no result. The client's result then stands for both: the client ends with one only
    /// after the server has answered its last message.
    pub silent_server: bool,
}

/// The moving side.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The side that listens; of programs that write or read, the target.
    Server,
    /// The connecting side, which sends requests.
    Client,
}

impl Side {
    /// Returns the name for people and programs.
    pub fn name(self) -> &'static str {
        match self {
            Side::Server => "server",
            Side::Client => "client",
        }
    }

    /// Returns the path of the side's output, without a leading slash.
    fn log(self) -> &'static str {
        match self {
            Side::Server => "run/server.log",
            Side::Client => "run/client.log",
        }
    }
}

/// A program at work at guests 1 and 3.
pub struct AtWork<'a> {
    /// The side at guest 1, which can move with [`ALIAS`].
    pub mover: Place<'a>,
    /// The output file, which the mover has open and takes along.
    pub log: &'static str,
    /// The side at guest 3.
    pub partner: Place<'a>,
    partner_log: &'static str,
    silent_server: bool,
}

impl<'a> AtWork<'a> {
    /// Starts the program, connects the sides and lets them work; `side` will be at guest 1.
    pub fn start(bed: &'a Bed, program: &Program, side: Side) -> io::Result<Self> {
        let (source, fixed) = (bed.guest(1), bed.guest(3));
        let alias = bare(ALIAS);
        // Announced, since the partner may still know the address at the guest to which it moved before.
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
                // The client's traffic comes from the mover's address. The node's traffic to the partner's node must
                // not, or its connection would go with the process.
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
        // Both: a program whose side is not connected yet cannot move, and the sides speak over TCP until then.
        connected(server)?;
        connected(client)?;
        std::thread::sleep(Duration::from_secs_f64(program.work_seconds));
        let (mover, partner, other) = match side {
            Side::Server => (server, client, Side::Client),
            Side::Client => (client, server, Side::Server),
        };
        Ok(Self {
            mover,
            log: side.log(),
            partner,
            partner_log: other.log(),
            silent_server: program.silent_server,
        })
    }

    /// Waits until both sides have ended, the moved one at `there`.
    pub fn ended(&self, there: &RdmaGuest) -> io::Result<()> {
        let moved = Place {
            guest: there,
            pid: self.mover.pid,
        };
        for (place, log) in [(moved, self.log), (self.partner, self.partner_log)] {
            ended(place, log, self.silent_server && log == Side::Server.log())?;
        }
        Ok(())
    }

    /// Checks that both sides still run, the moved one at `there`, without a failed request.
    pub fn works(&self, there: &RdmaGuest) -> io::Result<()> {
        let moved = Place {
            guest: there,
            pid: self.mover.pid,
        };
        for (place, log) in [(moved, self.log), (self.partner, self.partner_log)] {
            let status = place.status()?;
            if status.queue_pairs.iter().any(|pair| pair.failed) {
                return Err(io::Error::other(format!(
                    "a request of the process in guest {} has failed; it said {}",
                    place.guest.number(),
                    said(place, log)
                )));
            }
        }
        Ok(())
    }
}

fn bare(address: &str) -> &str {
    address.split('/').next().unwrap_or(address)
}

/// Waits until one of Debian's programs listens in the guest.
pub fn listening(guest: &RdmaGuest) -> io::Result<()> {
    guest.must("for i in $(seq 200); do ss -ltn | grep -q ':18515' && exit 0; sleep 0.05; done; cat /run/server.log; exit 1").map(drop)
}

/// Waits until all queue pairs of the process are connected, or can send if they are for datagrams.
pub fn connected(place: Place<'_>) -> io::Result<()> {
    let ready = |pair: &QueuePairState| {
        pair.remote.is_some() || !pair.reliable_connection && pair.state == IBV_QPS_RTS
    };
    let began = Instant::now();
    while began.elapsed() < CONNECT {
        // A process that has not opened its device yet does not answer.
        if let Ok(status) = place.status()
            && !status.queue_pairs.is_empty()
            && status.queue_pairs.iter().all(ready)
        {
            return Ok(());
        }
        // Each query takes the guest's only processor from the connecting programs.
        std::thread::sleep(Duration::from_millis(200));
    }
    let said = place.guest.run("cat /run/server.log")?.text;
    Err(io::Error::other(format!(
        "the program did not connect; it said: {said}"
    )))
}

/// Waits until the process has ended and judges the output: a restored process has no parent to report the exit status.
fn ended(place: Place<'_>, log: &str, silent: bool) -> io::Result<()> {
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
    let status = place.status().map(|status| {
        let pairs = status.queue_pairs;
        let failed = pairs.iter().filter(|pair| pair.failed).count();
        let kept: usize = pairs.iter().map(|pair| pair.kept).sum();
        format!(
            "of {} queue pairs {failed} have failed, and {kept} requests are kept back",
            pairs.len()
        )
    });
    Err(io::Error::other(format!(
        "guest {}'s side still runs {} s after the move; {}",
        place.guest.number(),
        END.as_secs(),
        status.unwrap_or_else(|error| error.to_string()),
    )))
}

/// Returns true if a program's output shows a run to the end.
fn succeeded(said: &str, silent: bool) -> bool {
    let bad = ["ailed", "rror", "ouldn't", "nable"]
        .iter()
        .any(|word| said.contains(word));
    let pingpong = said.contains("iters in");
    // perftest prints the result below the header, if this program has one for this side.
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

/// Returns the output of the process.
pub fn said(place: Place<'_>, log: &str) -> String {
    let output = place.guest.run(&format!("cat /{log}"));
    output.map_or_else(|error| error.to_string(), |output| output.text)
}

/// Waits for the end of a `godwit-verbs-client`; returns the summary of checks. `log` has no leading slash.
pub fn checked_end(place: Place<'_>, log: &str) -> io::Result<String> {
    let began = Instant::now();
    let gone = format!(
        "[ ! -e /proc/{0} ] || grep -q '^State:.Z' /proc/{0}/status",
        place.pid
    );
    while place.guest.run(&gone)?.status != 0 {
        if began.elapsed() > CHECKED_END {
            let status = place
                .status()
                .map(|status| format!("{:?}", status.queue_pairs));
            return Err(io::Error::other(format!(
                "guest {}'s side does not end; its queue pairs are {}",
                place.guest.number(),
                status.unwrap_or_else(|error| error.to_string())
            )));
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    let said = said(place, log);
    let last = said.trim().lines().last().unwrap_or("nothing");
    if last.starts_with("checked: ") {
        return Ok(last.trim_start_matches("checked: ").to_owned());
    }
    Err(io::Error::other(format!(
        "guest {}'s side ended with: {last}",
        place.guest.number()
    )))
}

/// Restores the state before the first move.
pub fn clean_up(bed: &Bed) -> io::Result<()> {
    for number in 1..=3 {
        bed.guest(number).run(&format!(
            "pkill -9 -f '^ib'; pkill -9 -x godwit-verbs-cl; ip addr del {ALIAS} dev eth0; ip addr del {PARTNER_ALIAS} dev eth0; \
             ip rule del lookup {TABLE}; ip route flush table {TABLE}; ip route flush 10.0.0.100/32; tc qdisc del dev eth0 root; nft flush ruleset; rm -rf /usr/lib/criu/godwit_rdma.so /run/server.log /run/client.log /run/verbs-client-ends /run/verbs-client-loses; true"
        ))?;
    }
    Ok(())
}
