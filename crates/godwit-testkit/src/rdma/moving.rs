//! A move of one RDMA process between guests, step by step, as a node's mover will take them.
//!
//! 1. Both sides: keep new requests back, wait until nothing is in flight.
//! 2. Source: give the device's objects back, dump with CRIU, with the address that moves along.
//! 3. Destination: restore behind a guard that drops what comes too early, make the objects again.
//! 4. Both sides: connect to each other's new queue pairs, go on.

use std::io;
use std::time::{Duration, Instant};

use godwit_verbs::control::{Answer, Request, Status};
use godwit_verbs::preflight::{self, Offer, is_other_end};
use godwit_verbs::shim::{Connection, QueuePairState, Recreated};
use serde::Serialize;

use super::RdmaGuest;
use super::ahead::Ahead;

/// How long requests in flight may take to complete.
const DRAIN_BOUND: Duration = Duration::from_secs(20);

/// A request that is longer goes through a file.
const LONGEST_ARGUMENT: usize = 60_000;

/// A process in a guest.
#[derive(Clone, Copy)]
pub struct Place<'a> {
    /// The guest.
    pub guest: &'a RdmaGuest,
    /// The process; it keeps its number when it moves.
    pub pid: u32,
}

impl Place<'_> {
    /// Asks the process's library.
    ///
    /// # Errors
    /// Also if the library answers with an error.
    pub fn ask(&self, request: &Request) -> io::Result<Answer> {
        self.ask_timed(request).map(|(answer, _)| answer)
    }

    /// As [`Place::ask`]; with it, how long the process took, in milliseconds and without the way to the guest.
    ///
    /// # Errors
    /// Those of [`Place::ask`].
    pub fn ask_timed(&self, request: &Request) -> io::Result<(Answer, f64)> {
        let text = serde_json::to_string(request)?;
        let asked = format!("godwit-verbs ask --time {}", self.pid);
        let said = if text.len() < LONGEST_ARGUMENT {
            self.guest.must(&format!("{asked} '{text}'"))?
        } else {
            self.guest.put("/run/request.json", &text)?;
            self.guest.must(&format!("{asked} - </run/request.json"))?
        };
        let (answer, took) = said.trim().split_once('\n').unwrap_or((said.trim(), ""));
        let microseconds = took
            .split_whitespace()
            .find_map(|word| word.parse::<f64>().ok());
        match serde_json::from_str(answer)? {
            Answer::Error(error) => Err(io::Error::other(error)),
            answer => Ok((answer, microseconds.unwrap_or(0.0) / 1e3)),
        }
    }

    /// Its queue pairs, and what keeps it from moving.
    ///
    /// # Errors
    /// Those of [`Place::ask`].
    pub fn status(&self) -> io::Result<Status> {
        match self.ask(&Request::Status)? {
            Answer::Status(status) => Ok(status),
            other => Err(unexpected(&other)),
        }
    }
}

pub(super) fn unexpected(answer: &Answer) -> io::Error {
    io::Error::other(format!(
        "the library gave an answer to another question: {answer:?}"
    ))
}

/// Where the time of a move went, in milliseconds. The process does nothing with RDMA from the first
/// suspension to the end: that is the blackout.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Breakdown {
    /// Giving the device's objects back.
    pub dump_rdma: f64,
    /// CRIU's dump.
    pub dump_others: f64,
    /// The image on its way.
    pub transfer: f64,
    /// Making the objects again and connecting them, or taking what was made ahead: how long the processes took for
    /// what they were asked.
    pub restore_rdma: f64,
    /// CRIU's restore.
    pub full_restore: f64,
}

/// What a move took.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Moved {
    /// From the first suspension until both sides go on, in milliseconds.
    pub blackout_ms: f64,
    /// Its parts.
    pub breakdown_ms: Breakdown,
    /// Wait-before-stop, in milliseconds: asked for and done.
    pub wbs_ms: f64,
    /// Queue pairs that moved.
    pub qps: usize,
    /// What was made ahead of the process, while it ran, in milliseconds; nothing without pre-setup.
    pub pre_setup_ms: Option<f64>,
}

fn milliseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

/// Does `first` and `second` at once.
fn both<T: Send, U: Send>(
    first: impl FnOnce() -> io::Result<T> + Send,
    second: impl FnOnce() -> io::Result<U> + Send,
) -> io::Result<(T, U)> {
    std::thread::scope(|scope| {
        let first = scope.spawn(first);
        let second = second();
        let first = first
            .join()
            .unwrap_or_else(|_| Err(io::Error::other("a thread of the move panicked")));
        Ok((first?, second?))
    })
}

/// Moves `from`'s process to `to`, with `alias` (an address and its length) and the files in `carried`.
/// `partner` is the process that it is connected to. With `pre_setup` the device's objects are made ahead of the
/// process. If something fails before the dump, both go on where they are.
///
/// # Errors
/// What failed, in one sentence.
pub fn move_process(
    from: Place<'_>,
    to: &RdmaGuest,
    partner: Place<'_>,
    alias: &str,
    carried: &str,
    pre_setup: bool,
) -> io::Result<Moved> {
    let against = preflight(from, to, partner)?;
    if !against.is_empty() {
        return Err(io::Error::other(against.join("; ")));
    }
    let pairs = from.status()?.queue_pairs;
    let links = links(&pairs, &partner.status()?.queue_pairs)?;
    let partners: Vec<u32> = links.iter().map(|(_, theirs)| *theirs).collect();
    let layout = layout(from)?;
    let mut moved = Moved {
        qps: pairs.len(),
        ..Moved::default()
    };
    let began = Instant::now();
    let ahead = if pre_setup {
        Some(Ahead::prepare(from, to, partner, &links)?)
    } else {
        None
    };
    moved.pre_setup_ms = ahead.as_ref().map(|_| milliseconds(began));
    let journey = Journey {
        from,
        to,
        partner,
        links: &links,
        partners: &partners,
        alias,
        carried,
        layout: &layout,
    };
    let result = journey.go(ahead.as_ref(), &mut moved);
    match (&ahead, &result) {
        (Some(ahead), Err(_)) => ahead.give_up(&partners),
        (Some(_), Ok(())) => drop(partner.ask(&Request::Tidy)?),
        (None, _) => {}
    }
    result.map(|()| moved)
}

/// A move whose ways are known.
struct Journey<'a> {
    from: Place<'a>,
    to: &'a RdmaGuest,
    partner: Place<'a>,
    /// Queue pairs and the partner's that they are connected to.
    links: &'a [(u32, u32)],
    /// The partner's.
    partners: &'a [u32],
    alias: &'a str,
    carried: &'a str,
    layout: &'a str,
}

impl Journey<'_> {
    fn go(&self, ahead: Option<&Ahead<'_>>, moved: &mut Moved) -> io::Result<()> {
        let Journey {
            from,
            to,
            partner,
            links,
            partners,
            alias,
            carried,
            layout,
        } = *self;
        let began = Instant::now();
        let stopped = stop(from, partner, links, partners);
        moved.wbs_ms = milliseconds(began);
        if let Err(error) = stopped {
            resume_at_source(from, partner, partners);
            return Err(error);
        }
        let step = Instant::now();
        if let Err(error) = from.ask(&Request::Release) {
            go_on_at_source(from, partner, links, partners);
            return Err(error);
        }
        moved.breakdown_ms.dump_rdma = milliseconds(step);

        let step = Instant::now();
        let dumped = from.guest.must(&format!(
        "rm -rf /run/image && mkdir /run/image && criu dump -t {} -D /run/image -o dump.log \
         --tcp-established --network-lock nftables || {{ grep -a Error /run/image/dump.log; exit 1; }}",
        from.pid
    ));
        if let Err(error) = dumped {
            go_on_at_source(from, partner, links, partners);
            return Err(error);
        }
        moved.breakdown_ms.dump_others = milliseconds(step);

        if let Err(error) = carry_over(from, to, alias, carried, &mut moved.breakdown_ms) {
            let became = match bring_back(from, to, alias, layout) {
                Ok(()) => {
                    go_on_at_source(from, partner, links, partners);
                    "the process goes on where it was".to_owned()
                }
                Err(lost) => {
                    resume_partner(partner, partners);
                    format!("the process was not restored where it was either and is lost: {lost}")
                }
            };
            return Err(io::Error::other(format!("{error}; {became}")));
        }
        let here = Place {
            guest: to,
            pid: from.pid,
        };
        let restored = match ahead.map(|ahead| ahead.attach(here, partners)) {
            Some(Ok(took)) => Ok(took),
            // Without what was made ahead it is as if there were none.
            Some(Err(error)) => {
                eprintln!("what was made ahead is not used: {error}");
                reconnect(here, partner, links)
            }
            None => reconnect(here, partner, links),
        };
        let took = match restored {
            Ok(took) => took,
            Err(error) => {
                // It has run there, so its image is no longer what it is.
                resume_partner(partner, partners);
                return Err(io::Error::other(format!(
                    "{error}; the process runs at guest {} without its RDMA connections",
                    to.number()
                )));
            }
        };
        let ((_, first), (_, second)) = both(
            || here.ask_timed(&Request::Resume { only: None }),
            || {
                partner.ask_timed(&Request::Resume {
                    only: Some(partners.to_vec()),
                })
            },
        )?;
        moved.breakdown_ms.restore_rdma = took + first.max(second);
        moved.blackout_ms = milliseconds(began);
        Ok(())
    }
}

/// The image's way to the destination, and the restore there.
fn carry_over(
    from: Place<'_>,
    to: &RdmaGuest,
    alias: &str,
    carried: &str,
    took: &mut Breakdown,
) -> io::Result<()> {
    let step = Instant::now();
    to.must("rm -rf /run/image; (setsid socat -u TCP-LISTEN:8000,reuseaddr EXEC:'tar -xf - -C /' >/run/socat.log 2>&1; echo $? >/run/socat.status) & until ss -ltn | grep -q :8000; do sleep 0.02; done")?;
    from.guest.must(&format!(
        "ip addr del {alias} dev eth0 2>/dev/null; nft list tables | grep 'inet CRIU' | while read -r table; do nft delete $table; done; \
         tar -C / -cf - run/image {carried} | socat -u - TCP:{}:8000",
        to.address()
    ))?;
    to.must("until [ -s /run/socat.status ]; do sleep 0.02; done; [ $(cat /run/socat.status) = 0 ]; s=$?; rm /run/socat.status; exit $s")?;
    took.transfer = milliseconds(step);

    let step = Instant::now();
    restore(to, alias)?;
    took.full_restore = milliseconds(step);
    Ok(())
}

/// Restores the image behind a guard, with the address that moves along.
fn restore(to: &RdmaGuest, alias: &str) -> io::Result<()> {
    let bare = alias.split('/').next().unwrap_or(alias);
    to.must(&format!(
        "nft table ip guard '{{ chain in {{ type filter hook input priority -300; ip daddr {bare} drop; }}; }}' && \
         ip addr add {alias} dev eth0 && \
         {{ criu restore -D /run/image -o restore.log --tcp-established -d || {{ grep -a Error /run/image/restore.log; exit 1; }}; }} && \
         nft delete table ip guard && (arping -q -U -c 1 -I eth0 {bare} >/dev/null 2>&1 &)"
    ))?;
    Ok(())
}

/// Says where the process's heap, arguments and environment lie, in a shell. That was drawn when the program began and
/// CRIU restores it; a process that only has the number lies elsewhere, and one that has ended nowhere.
fn ask_layout(pid: u32) -> String {
    format!("sed 's/.*) //' /proc/{pid}/stat 2>/dev/null | cut -d' ' -f45-49")
}

/// The process's layout (see [`ask_layout`]).
fn layout(place: Place<'_>) -> io::Result<String> {
    let said = place.guest.must(&ask_layout(place.pid))?;
    let numbers: Option<Vec<u64>> = said
        .split_whitespace()
        .map(|word| word.parse().ok().filter(|number| *number > 0))
        .collect();
    match numbers {
        Some(numbers) if numbers.len() == 5 => Ok(said.trim().to_owned()),
        _ => Err(io::Error::other(format!(
            "process {} does not run, or its layout in memory cannot be read: {said:?}",
            place.pid
        ))),
    }
}

/// After a failure at the destination before the process ran there: it is restored where it was, from the image that
/// is still there.
fn bring_back(from: Place<'_>, to: &RdmaGuest, alias: &str, layout: &str) -> io::Result<()> {
    let bare = alias.split('/').next().unwrap_or(alias);
    // Whatever the restore came to, nothing of it may run, and nobody may hear of its end. The number alone does not
    // say that it is this process: another one may have taken it meanwhile, which is why the restore failed.
    to.must(&format!(
        "here() {{ [ \"$({asked})\" = '{layout}' ]; }}; \
         nft table ip guard '{{ chain out {{ type filter hook output priority -300; ip saddr {bare} drop; }}; }}' && \
         {{ here && kill -9 {}; for i in $(seq 100); do here || break; sleep 0.05; done; \
         ip addr del {alias} dev eth0 2>/dev/null; nft delete table ip guard; ! here; }}",
        from.pid,
        asked = ask_layout(from.pid)
    ))?;
    from.guest
        .run(&format!("ip addr del {alias} dev eth0 2>/dev/null"))?;
    restore(from.guest, alias)
}

/// The partner finds out by its own requests that the other side is gone.
fn resume_partner(partner: Place<'_>, partners: &[u32]) {
    let only = Some(partners.to_vec());
    if let Err(error) = partner.ask(&Request::Resume { only }) {
        eprintln!("guest {} did not go on: {error}", partner.guest.number());
    }
}

/// All reasons against a move of `from` to `to`, one sentence each. `partner` is where its connections should end.
///
/// # Errors
/// If a guest cannot be asked.
pub fn preflight(from: Place<'_>, to: &RdmaGuest, partner: Place<'_>) -> io::Result<Vec<String>> {
    // A process that does not answer does not use the library, which is a reason of its own.
    let (status, other) = (from.status().ok(), partner.status().ok());
    let offered = to.must(&format!("godwit-verbs offer {}", from.pid))?;
    let offer: Offer = serde_json::from_str(&offered)?;
    let partners = other.map_or_else(Vec::new, |status| status.queue_pairs);
    Ok(preflight::against(
        from.pid,
        status.as_ref(),
        &offer,
        &partners,
    ))
}

/// Which queue pair is connected to which of the partner's, by the numbers that applications know.
fn links(ours: &[QueuePairState], theirs: &[QueuePairState]) -> io::Result<Vec<(u32, u32)>> {
    let connected = ours.iter().filter(|pair| pair.remote.is_some());
    connected
        .map(|pair| {
            let other = theirs.iter().find(|other| is_other_end(pair, other));
            other
                .map(|other| (pair.number, other.number))
                .ok_or_else(|| {
                    io::Error::other(format!("queue pair {} is connected to nobody", pair.number))
                })
        })
        .collect()
}

/// Wait-before-stop at both sides.
fn stop(
    from: Place<'_>,
    partner: Place<'_>,
    links: &[(u32, u32)],
    partners: &[u32],
) -> io::Result<()> {
    let suspended = both(
        || from.ask(&Request::Suspend { only: None }),
        || {
            partner.ask(&Request::Suspend {
                only: Some(partners.to_vec()),
            })
        },
    )?;
    let (Answer::Suspended(ours), Answer::Suspended(theirs)) = &suspended else {
        return Err(unexpected(&suspended.0));
    };
    let sent = |pairs: &[QueuePairState], number| {
        pairs
            .iter()
            .find(|pair| pair.number == number)
            .map_or(0, |pair| pair.sent)
    };
    let mut for_us = Vec::new();
    let mut for_them = Vec::new();
    for (our, their) in links {
        for_us.push((*our, sent(theirs, *their)));
        for_them.push((*their, sent(ours, *our)));
    }
    let bound_ms = DRAIN_BOUND.as_millis() as u64;
    both(
        || {
            from.ask(&Request::Drain {
                peer_sent: for_us,
                bound_ms,
            })
        },
        || {
            partner.ask(&Request::Drain {
                peer_sent: for_them,
                bound_ms,
            })
        },
    )?;
    Ok(())
}

/// Makes the objects of `moved` again and connects both sides. Says how long that took, in milliseconds.
fn reconnect(moved: Place<'_>, partner: Place<'_>, links: &[(u32, u32)]) -> io::Result<f64> {
    let (answer, making) = moved.ask_timed(&Request::Recreate { device: None })?;
    let Answer::Recreated(Recreated {
        remote_keys,
        queue_pairs,
    }) = answer
    else {
        return Err(unexpected(&answer));
    };
    let theirs = partner.status()?.queue_pairs;
    let find = |pairs: &[QueuePairState], number| {
        let found = pairs.iter().find(|pair| pair.number == number).cloned();
        found.ok_or_else(|| io::Error::other(format!("queue pair {number} is gone")))
    };
    let (mut at_partner, mut at_moved) = (Vec::new(), Vec::new());
    for (our, their) in links {
        let (new, old) = (find(&queue_pairs, *our)?, find(&theirs, *their)?);
        let (Some(new_port), Some(old_port)) = (new.local, old.local) else {
            return Err(io::Error::other(format!(
                "queue pair {our} has no address at its new place"
            )));
        };
        at_partner.push(Connection {
            number: *their,
            remote: new_port,
            remote_physical: new.physical,
            remote_keys: Some(remote_keys.clone()),
        });
        at_moved.push(Connection {
            number: *our,
            remote: old_port,
            remote_physical: old.physical,
            remote_keys: None,
        });
    }
    let ((_, first), (_, second)) = both(
        || {
            partner.ask_timed(&Request::Connect {
                connections: at_partner,
            })
        },
        || {
            moved.ask_timed(&Request::Connect {
                connections: at_moved,
            })
        },
    )?;
    Ok(making + first.max(second))
}

/// After a failure once the objects were given back: they are made again where the process is.
fn go_on_at_source(from: Place<'_>, partner: Place<'_>, links: &[(u32, u32)], partners: &[u32]) {
    if let Err(error) = reconnect(from, partner, links) {
        eprintln!("the connections were not made again: {error}");
    }
    resume_at_source(from, partner, partners);
}

/// Both sides go on with each other where they are.
fn resume_at_source(from: Place<'_>, partner: Place<'_>, partners: &[u32]) {
    for (place, only) in [(from, None), (partner, Some(partners.to_vec()))] {
        if let Err(error) = place.ask(&Request::Resume { only }) {
            eprintln!("guest {} did not go on: {error}", place.guest.number());
        }
    }
}
