//! Two processes that check all of their traffic (`godwit-verbs-client`). They talk with each other and move in turns,
//! each to the guest without one.

use std::io;
use std::time::Duration;

use godwit_testkit::rdma::{
    ALIAS, Bed, Moved, PARTNER_ALIAS, Place, checked_end, connected, move_process, said,
};
use godwit_testkit::report::median;
use serde_json::{Value, json};

/// A kind of traffic and of moves, by its name and the options of `godwit-verbs-client`.
pub(crate) struct Variant {
    pub(crate) name: &'static str,
    options: &'static str,
}

const fn variant(name: &'static str, options: &'static str) -> Variant {
    Variant { name, options }
}

/// All variants.
pub(crate) const VARIANTS: &[Variant] = &[
    variant("checked: receive queues", "--events"),
    variant(
        "checked: shared receive queue",
        "--events --epoll --shared-receives",
    ),
    variant("checked: both ends at once", "--events"),
    variant("checked: datagrams", "--datagrams"),
    variant(
        "checked: datagrams, shared receive queue",
        "--datagrams --events --shared-receives",
    ),
    variant(
        "checked: datagrams, both ends at once",
        "--datagrams --events",
    ),
    variant("checked: windows of type 1", "--events --windows 1"),
    variant(
        "checked: windows of type 2",
        "--events --shared-receives --windows 2",
    ),
    variant(
        "checked: windows of type 2, both ends at once",
        "--events --windows 2",
    ),
    variant(
        "checked: windows of type 1, pre-setup",
        "--events --windows 1",
    ),
    variant("checked: windows of type 2, pre-setup", "--windows 2"),
    variant("checked: memory", "--events --memory 40"),
    variant("checked: memory, pre-setup", "--memory 40"),
];

impl Variant {
    /// Returns true if a move that fails at the destination comes first.
    fn fails_first(&self) -> bool {
        ["checked: receive queues", "checked: memory"].contains(&self.name)
    }

    /// Returns true if both processes move at once; otherwise in turns.
    fn moves_both(&self) -> bool {
        self.name.ends_with("both ends at once")
    }

    /// Returns true if objects are made ahead, even if other variants move without pre-setup.
    fn has_pre_setup(&self) -> bool {
        self.name.ends_with("pre-setup")
    }

    /// Returns true if the processes send datagrams, which may be lost during a move.
    fn sends_datagrams(&self) -> bool {
        self.options.contains("--datagrams")
    }

    /// Returns the MiB of memory that each process has and writes, to give pre-copy work.
    fn memory(&self) -> u64 {
        let words = self
            .options
            .split(' ')
            .skip_while(|word| *word != "--memory");
        words.skip(1).find_map(|mib| mib.parse().ok()).unwrap_or(0)
    }

    /// Checks that memory was copied while the process worked, and not again with the image.
    fn copied_ahead(&self, moved: &Moved) -> io::Result<()> {
        let memory = self.memory() << 20;
        let with_image = moved.image_bytes - moved.pre_copied_bytes;
        if memory == 0 || moved.pre_copied_bytes > memory && with_image < memory / 2 {
            return Ok(());
        }
        Err(io::Error::other(format!(
            "of {memory} bytes of memory {} were copied in {} rounds while the process worked, and {with_image} with its image",
            moved.pre_copied_bytes, moved.pre_copy_rounds
        )))
    }
}

/// Returns a variant with memory that is copied while the processes work.
pub(crate) fn with_memory() -> &'static Variant {
    let mut variants = VARIANTS.iter();
    variants
        .find(|variant| variant.memory() > 0)
        .unwrap_or(&VARIANTS[0])
}

/// Time of work between two moves.
const WORK: Duration = Duration::from_millis(500);
/// Time after a move in which lost datagrams may be found: a sender begins again after 250 ms of silence.
const SETTLE: Duration = Duration::from_secs(2);
pub(crate) const ENDS: &str = "/run/verbs-client-ends";
const LOSES: &str = "/run/verbs-client-loses";

/// A process and the address and file that move along.
pub(crate) struct Mover {
    guest: usize,
    pid: u32,
    alias: &'static str,
    pub(crate) log: &'static str,
}

impl Mover {
    pub(crate) fn place<'a>(&self, bed: &'a Bed) -> Place<'a> {
        Place {
            guest: bed.guest(self.guest),
            pid: self.pid,
        }
    }
}

/// Moves the processes `moves` times, with `loss` percent of their packets lost meanwhile. Every second move is of the
/// partner, after the other one or at once with it.
pub(crate) fn check(
    bed: &Bed,
    variant: &Variant,
    moves: usize,
    loss: f64,
    pre_setup: bool,
) -> Value {
    let pre_setup = pre_setup || variant.has_pre_setup();
    let mut blackouts = Vec::new();
    let said = run(bed, variant, (moves, loss), pre_setup, &mut blackouts);
    let mut checked = json!({
        "variant": variant.name, "moves": blackouts.len(), "loss_percent": loss, "blackout_ms": median(&blackouts),
    });
    match said {
        Ok(said) => checked["said"] = json!(said),
        Err(error) => checked["error"] = error.to_string().into(),
    }
    checked
}

/// Moves the processes, and returns their output at the end.
fn run(
    bed: &Bed,
    variant: &Variant,
    (moves, loss): (usize, f64),
    pre_setup: bool,
    blackouts: &mut Vec<f64>,
) -> io::Result<Vec<String>> {
    let (mut first, mut second) = start(bed, variant)?;
    connected(first.place(bed))?;
    if variant.fails_first() {
        std::thread::sleep(WORK);
        fail_once(bed, &first, pre_setup)?;
    }
    let rounds = if variant.moves_both() {
        moves.div_ceil(2)
    } else {
        moves
    };
    for number in 0..rounds {
        std::thread::sleep(WORK);
        let moved = if variant.moves_both() {
            while_it_moves(bed, variant, &[1, 2, 3], loss, || {
                both(bed, &mut first, &mut second, pre_setup).map(Vec::from)
            })
        } else {
            let (moving, staying) = match number % 2 {
                0 => (&mut first, &second),
                _ => (&mut second, &first),
            };
            in_turn(bed, variant, (moving, staying), loss, pre_setup).map(|ms| vec![ms])
        };
        blackouts.extend(moved.map_err(|error| {
            let said = told(bed, [&first, &second]);
            io::Error::other(format!("round {}: {error}; {said}", number + 1))
        })?);
    }
    std::thread::sleep(WORK);
    first.place(bed).guest.must(&format!("touch {ENDS}"))?;
    [&first, &second]
        .into_iter()
        .map(|one| checked_end(one.place(bed), one.log))
        .collect()
}

/// Moves one process to the free guest, and returns its blackout.
fn in_turn(
    bed: &Bed,
    variant: &Variant,
    (moving, staying): (&mut Mover, &Mover),
    loss: f64,
    pre_setup: bool,
) -> io::Result<f64> {
    let free = 6 - moving.guest - staying.guest;
    let from = moving.place(bed);
    let lossy = [moving.guest, staying.guest];
    let moved = while_it_moves(bed, variant, &lossy, loss, || {
        move_process(from, bed.guest(free), moving.alias, moving.log, pre_setup)
    })?;
    moving.guest = free;
    variant.copied_ahead(&moved)?;
    Ok(moved.blackout_ms)
}

/// Moves both processes at once, one to the free guest and the other to the guest of the first. Returns the blackout of
/// each.
fn both(bed: &Bed, first: &mut Mover, second: &mut Mover, pre_setup: bool) -> io::Result<[f64; 2]> {
    let free = 6 - first.guest - second.guest;
    let moves = [(&*first, free), (&*second, first.guest)];
    let moved = std::thread::scope(|scope| {
        let begun = moves.map(|(moving, to)| {
            scope.spawn(move || {
                let from = moving.place(bed);
                move_process(from, bed.guest(to), moving.alias, moving.log, pre_setup)
            })
        });
        begun.map(|one| {
            one.join()
                .unwrap_or_else(|_| Err(io::Error::other("whoever moved it panicked")))
        })
    });
    let outcomes = moved.each_ref().map(|one| match one {
        Ok(_) => "moved".to_owned(),
        Err(error) => error.to_string(),
    });
    let [Ok(one), Ok(other)] = moved else {
        return Err(io::Error::other(outcomes.join("; ")));
    };
    second.guest = std::mem::replace(&mut first.guest, free);
    Ok([one.blackout_ms, other.blackout_ms])
}

/// Tries a move to guest 2 that fails: CRIU seems to work there and restores nothing, because another process takes the
/// process id just then. Both processes have to go on at their guests.
fn fail_once(bed: &Bed, moving: &Mover, pre_setup: bool) -> io::Result<()> {
    let destination = bed.guest(2);
    destination.must(&format!(
        "mv /usr/sbin/criu /usr/sbin/criu.away && chmod +x /usr/sbin/criu.away && \
         printf '#!/bin/sh\\n[ \"$1\" = check ] && exit 0\\necho {} >/proc/sys/kernel/ns_last_pid\\n\
         sleep 1000 >/dev/null 2>&1 &\\necho Error: not today >\"$4/restore.log\"\\nexit 1\\n' \
         >/usr/sbin/criu && chmod +x /usr/sbin/criu",
        moving.pid - 1
    ))?;
    let moved = move_process(
        moving.place(bed),
        destination,
        moving.alias,
        moving.log,
        pre_setup,
    );
    destination.must("mv /usr/sbin/criu.away /usr/sbin/criu")?;
    destination.must(&format!(
        "grep -qx sleep /proc/{0}/comm || {{ echo the process that took the number is gone; exit 1; }}; \
         kill -9 {0}; for i in $(seq 100); do [ -e /proc/{0} ] || exit 0; sleep 0.05; done; exit 1",
        moving.pid
    ))?;
    match moved {
        Err(error) if error.to_string().contains("with its connections") => {
            println!("  a move that failed: {error}");
            Ok(())
        }
        Err(error) => Err(error),
        Ok(_) => Err(io::Error::other("a move without CRIU succeeded")),
    }
}

/// Starts the server on guest 1 and the client on guest 3, each with an address of its own.
pub(crate) fn start(bed: &Bed, variant: &Variant) -> io::Result<(Mover, Mover)> {
    if variant.memory() > 0 {
        // Without the plugin CRIU refuses the device's queues of a working process.
        (1..=3).try_for_each(|number| {
            let install =
                "mkdir -p /usr/lib/criu && cp /opt/godwit/plugins/godwit_rdma.so /usr/lib/criu/";
            bed.guest(number).must(install).map(drop)
        })?;
    }
    let command = format!(
        "env LD_PRELOAD=/opt/godwit/libgodwit_verbs.so godwit-verbs-client {}",
        variant.options
    );
    let (server, client) = (bed.guest(1), bed.guest(3));
    let bare = |alias: &str| alias.split('/').next().unwrap_or(alias).to_owned();
    for (guest, alias) in [(server, ALIAS), (client, PARTNER_ALIAS)] {
        guest.must(&format!(
            "ip addr add {alias} dev eth0; arping -q -U -c 1 -I eth0 {} >/dev/null 2>&1; true",
            bare(alias)
        ))?;
    }
    client.must(&format!(
        "ip route replace {}/32 dev eth0 src {}",
        bare(ALIAS),
        bare(PARTNER_ALIAS)
    ))?;
    let first = Mover {
        guest: 1,
        pid: server.background("server", &command)?,
        alias: ALIAS,
        log: "run/server.log",
    };
    // A different process id than the server's: either process may move to the former guest of the other.
    client.must("for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16; do true & done; wait")?;
    let second = Mover {
        guest: 3,
        pid: client.background("client", &format!("{command} {}", bare(ALIAS)))?,
        alias: PARTNER_ALIAS,
        log: "run/client.log",
    };
    Ok((first, second))
}

/// Runs `act`, which moves a process, while the guests in `lossy` lose `percent` of their sent packets.
fn while_it_moves<T>(
    bed: &Bed,
    variant: &Variant,
    lossy: &[usize],
    percent: f64,
    act: impl FnOnce() -> io::Result<T>,
) -> io::Result<T> {
    let all_guests = |command: &str| {
        let mut guests = (1..=3).map(|number| bed.guest(number));
        guests.try_for_each(|guest| guest.must(command).map(drop))
    };
    if variant.sends_datagrams() {
        all_guests(&format!("touch {LOSES}"))?;
    }
    for guest in lossy {
        lose(bed, *guest, percent)?;
    }
    let moved = act();
    for guest in lossy {
        lose(bed, *guest, 0.0)?;
    }
    if variant.sends_datagrams() {
        // The next datagram to arrive reveals a loss.
        std::thread::sleep(SETTLE);
        all_guests(&format!("rm {LOSES}"))?;
    }
    moved
}

/// Returns the output of both processes.
fn told(bed: &Bed, both: [&Mover; 2]) -> String {
    both.map(|one| said(one.place(bed), "run/*.log")).join("; ")
}

/// Makes `guest` lose this share of sent packets from now on.
fn lose(bed: &Bed, guest: usize, percent: f64) -> io::Result<()> {
    let guest = bed.guest(guest);
    if percent > 0.0 {
        guest.must(&format!(
            "tc qdisc replace dev eth0 root netem loss {percent}%"
        ))?;
    } else {
        guest.run("tc qdisc del dev eth0 root 2>/dev/null")?;
    }
    Ok(())
}
