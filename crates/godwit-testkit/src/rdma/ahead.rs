//! Pre-setup of a move: what the process will need is made at its destination and at its partner while it still runs.

use std::io;
use std::time::{Duration, Instant};

use godwit_verbs::control::{Answer, Request};
use godwit_verbs::shim::{Connection, HeldPair, PreparedPair};

use super::RdmaGuest;
use super::moving::{Place, unexpected};

/// How long a holder may take to begin.
const BEGIN: Duration = Duration::from_secs(20);

/// What is there ahead of a process.
pub(super) struct Ahead<'a> {
    holder: Place<'a>,
    partner: Place<'a>,
}

impl<'a> Ahead<'a> {
    /// Has everything made and connected.
    pub(super) fn prepare(
        from: Place<'_>,
        to: &'a RdmaGuest,
        partner: Place<'a>,
        links: &[(u32, u32)],
    ) -> io::Result<Self> {
        let Answer::Plan(plan) = from.ask(&Request::Plan)? else {
            return Err(io::Error::other("the library gave no plan"));
        };
        let ahead = Self {
            holder: start_holder(to, from.pid)?,
            partner,
        };
        let held = ahead.holder.ask(&Request::Hold { plan });
        let done = held.and_then(|held| match held {
            Answer::Held(pairs) => ahead.connect(&pairs, links),
            other => Err(unexpected(&other)),
        });
        match done {
            Ok(()) => Ok(ahead),
            Err(error) => {
                let partners: Vec<u32> = links.iter().map(|(_, theirs)| *theirs).collect();
                ahead.give_up(&partners);
                Err(error)
            }
        }
    }

    fn connect(&self, held: &[HeldPair], links: &[(u32, u32)]) -> io::Result<()> {
        let theirs = self.partner.status()?.queue_pairs;
        let mut at_partner = Vec::new();
        for (our, their) in links {
            let pair = held.iter().find(|pair| pair.number == *our);
            let reach = pair.and_then(|pair| Some((pair.local?, pair.physical)));
            let (remote, remote_physical) = reach.ok_or_else(|| gone(*our))?;
            at_partner.push(Connection {
                number: *their,
                remote,
                remote_physical,
                remote_keys: None,
            });
        }
        let answer = self.partner.ask(&Request::Prepare {
            connections: at_partner,
        })?;
        let Answer::Prepared(prepared) = answer else {
            return Err(unexpected(&answer));
        };
        let mut at_holder = Vec::new();
        for (our, their) in links {
            let port = theirs
                .iter()
                .find(|pair| pair.number == *their)
                .and_then(|pair| pair.local);
            let physical = prepared
                .iter()
                .find(|pair: &&PreparedPair| pair.number == *their)
                .map(|pair| pair.physical);
            let (remote, remote_physical) = port.zip(physical).ok_or_else(|| gone(*their))?;
            at_holder.push(Connection {
                number: *our,
                remote,
                remote_physical,
                remote_keys: None,
            });
        }
        self.holder
            .ask(&Request::ConnectHeld {
                connections: at_holder,
            })
            .map(drop)
    }

    /// Gives everything to the process that is there now. Says how long that took, in milliseconds.
    pub(super) fn attach(&self, moved: Place<'_>, partners: &[u32]) -> io::Result<f64> {
        let (answer, attaching) = moved.ask_timed(&Request::Attach {
            holder: self.holder.pid,
        })?;
        let Answer::Attached(attached) = answer else {
            return Err(unexpected(&answer));
        };
        let (_, switching) = self.partner.ask_timed(&Request::Switch {
            numbers: partners.to_vec(),
            remote_keys: attached.remote_keys,
        })?;
        Ok(attaching + switching)
    }

    /// Nothing of it is wanted any more.
    pub(super) fn give_up(&self, partners: &[u32]) {
        let stopped = self.holder.guest.run(&format!(
            "grep -qx godwit-verbs /proc/{0}/comm && kill -9 {0}",
            self.holder.pid
        ));
        let only = Some(partners.to_vec());
        let abandoned = self.partner.ask(&Request::Abandon { only });
        for error in [stopped.err(), abandoned.err()].into_iter().flatten() {
            eprintln!("what was made ahead was not given up: {error}");
        }
    }
}

fn gone(number: u32) -> io::Error {
    io::Error::other(format!("queue pair {number} is gone, or not connected"))
}

/// A holder, which must not have the number of the process that will come.
fn start_holder(to: &RdmaGuest, coming: u32) -> io::Result<Place<'_>> {
    let mut pid = to.background("holder", "godwit-verbs hold")?;
    if pid == coming {
        let second = to.background("holder", "godwit-verbs hold")?;
        to.must(&format!("kill -9 {pid}"))?;
        pid = second;
    }
    let holder = Place { guest: to, pid };
    let began = Instant::now();
    loop {
        match holder.status() {
            Ok(_) => return Ok(holder),
            Err(error) if began.elapsed() > BEGIN => return Err(error),
            Err(_) => std::thread::sleep(Duration::from_millis(50)),
        }
    }
}
