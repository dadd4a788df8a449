//! The programs that move.

use std::borrow::Cow;

use godwit_testkit::rdma::Program;

/// All programs. GID index 1 is the guest's own address: the mover's address adds another.
pub(crate) const PROGRAMS: &[Program] = &[
    Program {
        name: Cow::Borrowed("ibv_rc_pingpong -e"),
        command: Cow::Borrowed("ibv_rc_pingpong -d rxe0 -g 1 -e -n 12000"),
        work_seconds: 0.5,
        silent_server: false,
    },
    Program {
        name: Cow::Borrowed("ibv_rc_pingpong"),
        command: Cow::Borrowed("ibv_rc_pingpong -d rxe0 -g 1 -n 5000"),
        work_seconds: 0.5,
        silent_server: false,
    },
    Program {
        name: Cow::Borrowed("ib_write_bw"),
        command: Cow::Borrowed("ib_write_bw -d rxe0 -F -x 1 -s 65536 -n 7000"),
        work_seconds: 0.5,
        silent_server: false,
    },
    Program {
        name: Cow::Borrowed("ib_send_bw"),
        command: Cow::Borrowed("ib_send_bw -d rxe0 -F -x 1 -s 65536 -n 6000"),
        work_seconds: 0.5,
        silent_server: false,
    },
    Program {
        name: Cow::Borrowed("ib_read_bw -q 4"),
        command: Cow::Borrowed("ib_read_bw -d rxe0 -F -x 1 -q 4 -t 8 -s 65536 -n 1600"),
        work_seconds: 0.5,
        silent_server: false,
    },
    Program {
        name: Cow::Borrowed("ib_atomic_lat"),
        command: Cow::Borrowed("ib_atomic_lat -d rxe0 -F -x 1 -n 40000"),
        work_seconds: 0.5,
        silent_server: true,
    },
];
