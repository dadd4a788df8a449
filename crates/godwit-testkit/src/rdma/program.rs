//! Programs of Debian's that run at two guests, one side of which moves to the third.

use std::borrow::Cow;
use std::io;
use std::time::{Duration, Instant};

use godwit_verbs::abi::IBV_QPS_RTS;
use godwit_verbs::shim::QueuePairState;

use super::{Bed, Place, RdmaGuest};

/// The address that moves along.
pub const ALIAS: &str = "10.0.0.100/24";
/// The partner's, if it moves as well.
pub const PARTNER_ALIAS: &str = "10.0.0.101/24";
/// How long a program may take to connect all of its queue pairs.
const CONNECT: Duration = Duration::from_secs(60);
/// How long a program may take to end after its move.
const END: Duration = Duration::from_secs(180);
/// How long processes that check everything may take to end.
const CHECKED_END: Duration = Duration::from_secs(120);
/// The port at which Debian's programs listen for each other.
const PORT: u16 = 18515;
/// The routing table of what goes to that port.
const TABLE: u32 = 100;

/// A program of Debian's, as it runs at both sides.
pub struct Program {
    /// What reports call it.
    pub name: Cow<'static, str>,
    /// Without the partner's address, which clients have as their last argument.
    pub command: Cow<'static, str>,
    /// How long to let it work before the move, in seconds.
    pub work_seconds: f64,
    /// Whether its server prints no result. Its client's result then stands for both: the client ends
    /// with one only after the server has answered its last message.
    pub silent_server: bool,
}

/// Which side moves.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The one that listens; of programs that write or read, the one that is written or read.
    Server,
    /// The one that connects, and asks.
    Client,
}

impl Side {
    /// For people and programs.
    pub fn name(self) -> &'static str {
        match self {
            Side::Server => "server",
            Side::Client => "client",
        }
    }

    /// What the side says, without a slash in front.
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
    /// What it has open and takes along.
    pub log: &'static str,
    /// The side at guest 3.
    pub partner: Place<'a>,
    partner_log: &'static str,
    silent_server: bool,
}

impl<'a> AtWork<'a> {
    /// Starts the program, connects it and lets it work; `side` will be at guest 1.
    ///
    /// # Errors
    /// If it does not connect, with what it said.
    pub fn start(bed: &'a Bed, program: &Program, side: Side) -> io::Result<Self> {
        let (source, fixed) = (bed.guest(1), bed.guest(3));
        let alias = bare(ALIAS);
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
                // What the client says comes from the address that moves along; what the node says to the partner's node
                // must not, or its connection would go with the process.
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

    /// Waits until both sides have ended, of which one is at `there` now.
    ///
    /// # Errors
    /// If they do not, or not with success, with what they said.
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

    /// Looks whether both sides run still, of which one is at `there` now, and none of their requests has failed.
    ///
    /// # Errors
    /// If not, with what is wrong.
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
///
/// # Errors
/// If none does, with what it said.
pub fn listening(guest: &RdmaGuest) -> io::Result<()> {
    guest.must("for i in $(seq 200); do ss -ltn | grep -q ':18515' && exit 0; sleep 0.05; done; cat /run/server.log; exit 1").map(drop)
}

/// Waits until all queue pairs of the process are connected, or can send if they are for datagrams.
///
/// # Errors
/// If they are not in time, with what the server in its guest said.
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
        // Asking takes the guest's only processor from what is to connect.
        std::thread::sleep(Duration::from_millis(200));
    }
    let said = place.guest.run("cat /run/server.log")?.text;
    Err(io::Error::other(format!(
        "the program did not connect; it said: {said}"
    )))
}

/// Waits until the process has ended and judges by what it said: a restored process is nobody's child
/// whose exit status could be asked.
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

/// What the process has said.
pub fn said(place: Place<'_>, log: &str) -> String {
    let output = place.guest.run(&format!("cat /{log}"));
    output.map_or_else(|error| error.to_string(), |output| output.text)
}

/// Waits for the end of a `godwit-verbs-client`; gives what it has checked. `log` has no slash in front.
///
/// # Errors
/// If it does not end, or something was not as it has to be.
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

/// Makes everything as before the first move.
///
/// # Errors
/// If a guest does not answer.
pub fn clean_up(bed: &Bed) -> io::Result<()> {
    for number in 1..=3 {
        bed.guest(number).run(&format!(
            "pkill -9 -f '^ib'; pkill -9 -x godwit-verbs-cl; ip addr del {ALIAS} dev eth0; ip addr del {PARTNER_ALIAS} dev eth0; \
             ip rule del lookup {TABLE}; ip route flush table {TABLE}; ip route flush 10.0.0.100/32; tc qdisc del dev eth0 root; nft flush ruleset; rm -rf /usr/lib/criu/godwit_rdma.so /run/server.log /run/client.log /run/verbs-client-ends /run/verbs-client-loses; true"
        ))?;
    }
    Ok(())
}
