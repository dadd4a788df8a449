//! The programs that move.

use std::borrow::Cow;

use godwit_testkit::rdma::Program;

const fn program(name: &'static str, command: &'static str) -> Program {
    Program {
        name: Cow::Borrowed(name),
        command: Cow::Borrowed(command),
        work_seconds: 0.5,
        silent_server: false,
    }
}

/// All programs. GID index 1 is the guest's own address: the mover's address adds another.
pub(crate) const PROGRAMS: &[Program] = &[
    program(
        "ibv_rc_pingpong -e",
        "ibv_rc_pingpong -d rxe0 -g 1 -e -n 12000",
    ),
    program("ibv_rc_pingpong", "ibv_rc_pingpong -d rxe0 -g 1 -n 5000"),
    program(
        "ib_write_bw",
        "ib_write_bw -d rxe0 -F -x 1 -s 65536 -n 7000",
    ),
    program("ib_send_bw", "ib_send_bw -d rxe0 -F -x 1 -s 65536 -n 6000"),
    program(
        "ib_read_bw -q 4",
        "ib_read_bw -d rxe0 -F -x 1 -q 4 -t 8 -s 65536 -n 1600",
    ),
    Program {
        name: Cow::Borrowed("ib_atomic_lat"),
        command: Cow::Borrowed("ib_atomic_lat -d rxe0 -F -x 1 -n 40000"),
        work_seconds: 0.5,
        silent_server: true,
    },
];
