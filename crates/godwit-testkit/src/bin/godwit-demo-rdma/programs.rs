//! What moves.

use std::borrow::Cow;

/// A program of Debian's, as it runs at both sides.
pub(crate) struct Program {
    pub(crate) name: Cow<'static, str>,
    /// Without the partner's address, which clients have as their last argument.
    pub(crate) command: Cow<'static, str>,
    /// How long to let it work before the move, in seconds.
    pub(crate) work_seconds: f64,
    /// Whether its server prints no result. Its client's result then stands for both: the client ends
    /// with one only after the server has answered its last message.
    pub(crate) silent_server: bool,
}

/// A program with this many queue pairs, which moves slowly enough to be found at work.
pub(crate) fn with_queue_pairs(count: u32) -> Program {
    Program {
        name: Cow::Owned(format!("ib_write_bw -q {count}")),
        command: Cow::Owned(format!(
            "ib_write_bw -d rxe0 -F -x 1 -q {count} -t 4 -s 4096 -n {}",
            (24_000 / count).max(60)
        )),
        work_seconds: 0.5,
        silent_server: false,
    }
}

/// Which side moves.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Server,
    Client,
}

impl Side {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Side::Server => "server",
            Side::Client => "client",
        }
    }
}

/// All of them. GID index 1 is the guest's own address: the address that moves along adds another.
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
        command: Cow::Borrowed("ib_write_bw -d rxe0 -F -x 1 -s 65536 -n 12000"),
        work_seconds: 0.5,
        silent_server: false,
    },
    Program {
        name: Cow::Borrowed("ib_send_bw"),
        command: Cow::Borrowed("ib_send_bw -d rxe0 -F -x 1 -s 65536 -n 9000"),
        work_seconds: 0.5,
        silent_server: false,
    },
    Program {
        name: Cow::Borrowed("ib_read_bw -q 4"),
        command: Cow::Borrowed("ib_read_bw -d rxe0 -F -x 1 -q 4 -t 8 -s 65536 -n 2400"),
        work_seconds: 0.5,
        silent_server: false,
    },
    Program {
        name: Cow::Borrowed("ib_atomic_lat"),
        command: Cow::Borrowed("ib_atomic_lat -d rxe0 -F -x 1 -n 60000"),
        work_seconds: 0.5,
        silent_server: true,
    },
];
