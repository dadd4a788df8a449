//! Processes that cannot move: the preflight names every reason at once, and the processes stay untouched.

use std::io;

use godwit_testkit::rdma::{Bed, Place, RdmaGuest, listening, preflight};
use serde_json::{Value, json};

const WITH: &str = "env LD_PRELOAD=/opt/godwit/libgodwit_verbs.so ";

/// A process that cannot move, and a word of each expected reason.
struct Case {
    name: &'static str,
    /// Prefixes of the server's and the client's command.
    server: &'static str,
    client: &'static str,
    program: Program,
    gid_index: u8,
    /// Commands before and after at the destination, to spoil and to mend it. `$pid` is the process id.
    spoil: &'static str,
    mend: &'static str,
    reasons: &'static [&'static str],
}

/// A program of Debian's.
#[derive(Clone, Copy)]
enum Program {
    /// Over a reliable connection, with the client.
    Reliable,
    /// Over an unreliable connection, with the client.
    Unreliable,
    /// The server alone: the queue pair is not connected.
    Alone,
    /// The server of librdmacm's `rping`, alone.
    Manager,
}

/// Processes with the library over a reliable connection.
const USUAL: Case = Case {
    name: "",
    server: WITH,
    client: WITH,
    program: Program::Reliable,
    gid_index: 1,
    spoil: "true",
    mend: "true",
    reasons: &[],
};

const CASES: &[Case] = &[
    Case {
        name: "a process without the library",
        server: "",
        client: "",
        reasons: &["does not use the library"],
        ..USUAL
    },
    Case {
        name: "a partner without the library, no device and no CRIU at the destination",
        client: "",
        spoil: "rdma link del rxe0 && mv /usr/sbin/criu /usr/sbin/criu.away",
        mend: "rdma link add rxe0 type rxe netdev eth0 && mv /usr/sbin/criu.away /usr/sbin/criu",
        reasons: &[
            "of which no process that uses the library knows",
            "no RDMA device rxe0; it has none",
            "criu is not installed",
        ],
        ..USUAL
    },
    Case {
        name: "a CRIU that refuses, and nothing at the GID index",
        gid_index: 2,
        spoil: "mv /usr/sbin/criu /usr/sbin/criu.away && \
                printf '#!/bin/sh\\necho Error: no kernel support >&2\\nexit 1\\n' >/usr/sbin/criu && \
                chmod +x /usr/sbin/criu",
        mend: "mv /usr/sbin/criu.away /usr/sbin/criu",
        reasons: &[
            "nothing at that index",
            "`criu check` failed: Error: no kernel support",
        ],
        ..USUAL
    },
    Case {
        name: "an unreliable connection, and a process of the same number at the destination",
        program: Program::Unreliable,
        spoil: "echo $((pid - 1)) >/proc/sys/kernel/ns_last_pid; sleep 1000 >/dev/null 2>&1 & \
                sleep 0.1; grep -qx sleep /proc/$pid/comm",
        mend: "kill -9 $pid",
        reasons: &[
            "is neither a reliable connection nor for datagrams",
            "already, and a process keeps its number",
        ],
        ..USUAL
    },
    Case {
        name: "too few queue pairs and regions at the destination, where a control group limits the node",
        spoil: "{ mountpoint -q /sys/fs/cgroup || mount -t cgroup2 none /sys/fs/cgroup; } && \
                echo +rdma >/sys/fs/cgroup/cgroup.subtree_control && mkdir -p /sys/fs/cgroup/few && \
                echo rxe0 hca_object=0 >/sys/fs/cgroup/few/rdma.max && \
                cat /run/node.number >/sys/fs/cgroup/few/cgroup.procs",
        mend: "cat /run/node.number >/sys/fs/cgroup/cgroup.procs && rmdir /sys/fs/cgroup/few",
        reasons: &[
            "1 queue pairs on rxe0, and the destination's rxe0 has room for 0",
            "1 memory regions on rxe0, and the destination's rxe0 has room for 0",
            "1 completion queues on rxe0, and the destination's rxe0 has room for 0",
        ],
        ..USUAL
    },
    Case {
        name: "a queue pair without a partner",
        program: Program::Alone,
        reasons: &["is not connected; its partner could not find it after a move"],
        ..USUAL
    },
    Case {
        name: "a process that connects with the RDMA connection manager",
        program: Program::Manager,
        reasons: &["connects with the RDMA connection manager (/dev/infiniband/rdma_cm)"],
        ..USUAL
    },
    Case {
        name: "a lock, and a file that the destination does not have",
        server: "bash -c \"exec 9>/run/locked; flock 9; exec env LD_PRELOAD=/opt/godwit/libgodwit_verbs.so \\\"\\$@\\\"\" - ",
        reasons: &[
            "holds a lock on /run/locked",
            "the destination has no /run/locked,",
        ],
        ..USUAL
    },
    // The last case, since the child goes when all processes are cleared away.
    Case {
        name: "a process that has started another one that uses RDMA",
        server: "bash -c \"LD_PRELOAD=/opt/godwit/libgodwit_verbs.so ibv_rc_pingpong -d rxe0 -g 1 -p 18600 & \
                 until ss -ltn | grep -q :18600; do sleep 0.05; done; \
                 exec env LD_PRELOAD=/opt/godwit/libgodwit_verbs.so \\\"\\$@\\\"\" - ",
        reasons: &["would come along with process"],
        ..USUAL
    },
];

/// Asks for a move from guest 1 to guest 2 in every case.
pub(crate) fn refusals(bed: &Bed) -> io::Result<Vec<Value>> {
    // A second address at two guests only: GID index 2 does not exist at the destination.
    for number in [1, 3] {
        bed.guest(number)
            .must(&format!("ip addr add 10.0.9.{number}/24 dev eth0"))?;
    }
    // A guest that stands still in a case would not answer the next commands, and its own error would stay hidden.
    let found = CASES
        .iter()
        .map(|case| {
            refusal(bed, case).map_err(|error| io::Error::other(format!("{}: {error}", case.name)))
        })
        .collect::<io::Result<_>>()?;
    for number in [1, 3] {
        bed.guest(number)
            .must(&format!("ip addr del 10.0.9.{number}/24 dev eth0"))?;
    }
    Ok(found)
}

fn refusal(bed: &Bed, case: &Case) -> io::Result<Value> {
    let (source, destination, other) = (bed.guest(1), bed.guest(2), bed.guest(3));
    let (name, kind) = match case.program {
        Program::Reliable | Program::Alone | Program::Manager => ("ibv_rc_pingpong", "RC"),
        Program::Unreliable => ("ibv_uc_pingpong", "UC"),
    };
    let command = match case.program {
        // With an address the program opens the device at once.
        Program::Manager => format!("rping -s -a {}", source.address()),
        _ => format!("{name} -d rxe0 -g {} -n 100000000", case.gid_index),
    };
    let server = source.background("server", &format!("{}{command}", case.server))?;
    if matches!(case.program, Program::Manager) {
        source.must(&format!(
            "until ls -l /proc/{server}/fd | grep -q rdma_cm && godwit-verbs status {server}; do sleep 0.1; done"
        ))?;
    } else {
        listening(source)?;
    }
    let mut started = vec![(source, server)];
    if matches!(case.program, Program::Reliable | Program::Unreliable) {
        let client = format!("{}{command} {}", case.client, source.address());
        started.push((other, other.background("client", &client)?));
        // Connected, and at work.
        source.must(&format!(
            "until rdma resource show qp | grep -q 'type {kind} state RTS'; do sleep 0.05; done"
        ))?;
    }
    destination.must(&format!("pid={server}; {}", case.spoil))?;
    let said = preflight(
        Place {
            guest: source,
            pid: server,
        },
        destination,
    );
    destination.must(&format!("pid={server}; {}", case.mend))?;
    let said = said?;
    let mut lives = true;
    for (guest, pid) in started {
        lives &= alive(guest, pid)?;
        guest.must(&format!("kill -9 {pid}; rm -f /run/server.log; true"))?;
    }
    let named = |reason: &&str| said.iter().filter(|one| one.contains(reason)).count() == 1;
    let as_expected = lives && said.len() == case.reasons.len() && case.reasons.iter().all(named);
    Ok(json!({"case": case.name, "said": said, "as_expected": as_expected}))
}

fn alive(guest: &RdmaGuest, pid: u32) -> io::Result<bool> {
    let asked = guest.run(&format!(
        "[ -e /proc/{pid} ] && ! grep -q '^State:.Z' /proc/{pid}/status"
    ))?;
    Ok(asked.status == 0)
}
