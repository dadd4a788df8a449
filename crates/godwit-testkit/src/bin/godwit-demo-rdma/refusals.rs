//! Processes that cannot move: the preflight names every reason at once, and nothing happens to them.

use std::io;

use godwit_testkit::rdma::{Bed, Place, RdmaGuest, listening, preflight};

use crate::report::Refusal;

const WITH: &str = "env LD_PRELOAD=/opt/godwit/libgodwit_verbs.so ";

/// What is there, and a word of each reason that there is.
struct Case {
    name: &'static str,
    /// In front of the server's and the client's command.
    server: &'static str,
    client: &'static str,
    gid_index: u8,
    /// What is done at the destination before, and undone after.
    spoil: &'static str,
    mend: &'static str,
    reasons: &'static [&'static str],
}

const CASES: &[Case] = &[
    Case {
        name: "a process without the library",
        server: "",
        client: "",
        gid_index: 1,
        spoil: "true",
        mend: "true",
        reasons: &["does not use the library"],
    },
    Case {
        name: "a partner without the library, no device and no CRIU at the destination",
        server: WITH,
        client: "",
        gid_index: 1,
        spoil: "rdma link del rxe0 && mv /usr/sbin/criu /usr/sbin/criu.away",
        mend: "rdma link add rxe0 type rxe netdev eth0 && mv /usr/sbin/criu.away /usr/sbin/criu",
        reasons: &[
            "of which no process that uses the library knows",
            "no RDMA device rxe0; it has none",
            "criu is not installed",
        ],
    },
    Case {
        name: "a CRIU that refuses, and nothing at the GID index",
        server: WITH,
        client: WITH,
        gid_index: 2,
        spoil: "mv /usr/sbin/criu /usr/sbin/criu.away && \
                printf '#!/bin/sh\\necho Error: no kernel support >&2\\nexit 1\\n' >/usr/sbin/criu && \
                chmod +x /usr/sbin/criu",
        mend: "mv /usr/sbin/criu.away /usr/sbin/criu",
        reasons: &[
            "nothing at that index",
            "`criu check` failed: Error: no kernel support",
        ],
    },
];

/// Asks for a move from guest 1 to guest 2 in every case.
pub(crate) fn refusals(bed: &Bed) -> io::Result<Vec<Refusal>> {
    // A second address at two guests only: GID index 2 is nothing at the destination.
    for number in [1, 3] {
        bed.guest(number)
            .must(&format!("ip addr add 10.0.9.{number}/24 dev eth0"))?;
    }
    let found = CASES.iter().map(|case| refusal(bed, case)).collect();
    for number in [1, 3] {
        bed.guest(number)
            .must(&format!("ip addr del 10.0.9.{number}/24 dev eth0"))?;
    }
    found
}

fn refusal(bed: &Bed, case: &Case) -> io::Result<Refusal> {
    let (source, destination, other) = (bed.guest(1), bed.guest(2), bed.guest(3));
    let command = format!("ibv_rc_pingpong -d rxe0 -g {} -n 100000000", case.gid_index);
    let server = source.background("server", &format!("{}{command}", case.server))?;
    listening(source)?;
    let client = format!("{}{command} {}", case.client, source.address());
    let client = other.background("client", &client)?;
    // Connected, and at work.
    source.must("until ss -tn | grep -q ':18515' || rdma resource show qp | grep -q 'state RTS'; do sleep 0.05; done; \
                 until rdma resource show qp | grep -q 'type RC state RTS'; do sleep 0.05; done")?;
    destination.must(case.spoil)?;
    let place = |guest, pid| Place { guest, pid };
    let said = preflight(place(source, server), destination);
    destination.must(case.mend)?;
    let (said, lives) = (said?, alive(source, server)? && alive(other, client)?);
    for (guest, pid) in [(source, server), (other, client)] {
        guest.must(&format!("kill -9 {pid}; rm -f /run/server.log; true"))?;
    }
    let named = |reason: &&str| said.iter().filter(|one| one.contains(reason)).count() == 1;
    let as_expected = lives && said.len() == case.reasons.len() && case.reasons.iter().all(named);
    Ok(Refusal {
        case: case.name,
        said,
        as_expected,
    })
}

fn alive(guest: &RdmaGuest, pid: u32) -> io::Result<bool> {
    let asked = guest.run(&format!(
        "[ -e /proc/{pid} ] && ! grep -q '^State:.Z' /proc/{pid}/status"
    ))?;
    Ok(asked.status == 0)
}
