//! A process without RDMA, named by its control group. The process moves together with a child, which receives numbers
//! over a TCP connection all the time.

use std::io;

use godwit_testkit::rdma::{ALIAS, Bed, Moved, Place, move_control_group};

use crate::rdma::cases::container;

/// Name in the report.
pub(crate) const NAME: &str = "a process without RDMA";
/// Numbers to send, some hundred a second.
const NUMBERS: u32 = 1500;
/// The control group of both processes at the source.
const GROUP: &str = "talker";

/// Ends both processes.
pub(crate) fn clean_up(bed: &Bed) -> io::Result<()> {
    for number in 1..=3 {
        bed.guest(number).run(&format!(
            "pkill -9 -x socat; ip addr del {ALIAS} dev eth0; nft flush ruleset; rm -f /run/server.log /run/client.log; true"
        ))?;
    }
    Ok(())
}

/// Moves the process.
pub(crate) fn moves(bed: &Bed) -> io::Result<Moved> {
    container::prepare(bed)?;
    let (source, destination, other) = (bed.guest(1), bed.guest(2), bed.guest(3));
    let alias = container::ALIAS;
    source.must(&format!(
        "ip addr add {ALIAS} dev eth0; arping -q -U -c 1 -I eth0 {alias} >/dev/null 2>&1; true"
    ))?;
    let pid = source.background(
        "server",
        &format!(
            "bash -c \"mkdir -p /sys/fs/cgroup/{GROUP}; echo \\$\\$ >/sys/fs/cgroup/{GROUP}/cgroup.procs; \
             socat -u TCP-LISTEN:9000,bind={alias} STDOUT; echo ended\""
        ),
    )?;
    source.must(
        "for i in $(seq 200); do ss -ltn | grep -q :9000 && exit 0; sleep 0.05; done; exit 1",
    )?;
    other.background(
        "client",
        &format!(
            "bash -c \"for i in \\$(seq {NUMBERS}); do echo \\$i; sleep 0.01; done | socat -u STDIN TCP:{alias}:9000\""
        ),
    )?;
    source.must("for i in $(seq 200); do [ $(wc -l </run/server.log) -ge 20 ] && exit 0; sleep 0.05; done; exit 1")?;
    let moved = move_control_group(source, GROUP, destination, alias, "/run/server.log")?;
    let before = destination.must("wc -l </run/server.log")?;
    if before.trim().parse::<u32>().unwrap_or(NUMBERS) >= NUMBERS {
        return Err(io::Error::other("it had all numbers before it moved"));
    }
    let here = Place { guest: source, pid };
    if here.exists()? {
        return Err(io::Error::other("it runs at the source as well"));
    }
    destination.must(&format!(
        "for i in $(seq 900); do tail -n 1 /run/server.log | grep -qx ended && break; sleep 0.1; done; \
         (seq {NUMBERS}; echo ended) | cmp - /run/server.log"
    ))?;
    Ok(moved)
}
