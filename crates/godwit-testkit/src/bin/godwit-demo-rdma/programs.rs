//! What moves.

/// A program of Debian's, as it runs at both sides.
pub(crate) struct Program {
    pub(crate) name: &'static str,
    /// Without the partner's address, which clients have as their last argument.
    pub(crate) command: &'static str,
    /// How long to let it work before the move, in seconds.
    pub(crate) work_seconds: f64,
    /// Whether its server prints no result. Its client's result then stands for both: the client ends
    /// with one only after the server has answered its last message.
    pub(crate) silent_server: bool,
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
        name: "ibv_rc_pingpong -e",
        command: "ibv_rc_pingpong -d rxe0 -g 1 -e -n 12000",
        work_seconds: 0.5,
        silent_server: false,
    },
    Program {
        name: "ibv_rc_pingpong",
        command: "ibv_rc_pingpong -d rxe0 -g 1 -n 5000",
        work_seconds: 0.5,
        silent_server: false,
    },
    Program {
        name: "ib_write_bw",
        command: "ib_write_bw -d rxe0 -F -x 1 -s 65536 -n 12000",
        work_seconds: 0.5,
        silent_server: false,
    },
    Program {
        name: "ib_send_bw",
        command: "ib_send_bw -d rxe0 -F -x 1 -s 65536 -n 9000",
        work_seconds: 0.5,
        silent_server: false,
    },
    Program {
        name: "ib_read_bw -q 4",
        command: "ib_read_bw -d rxe0 -F -x 1 -q 4 -t 8 -s 65536 -n 2400",
        work_seconds: 0.5,
        silent_server: false,
    },
    Program {
        name: "ib_atomic_lat",
        command: "ib_atomic_lat -d rxe0 -F -x 1 -n 60000",
        work_seconds: 0.5,
        silent_server: true,
    },
];
