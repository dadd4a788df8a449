//! Waiting for the turn: a process does not move while another move has the process or a partner. Nothing changes
//! before this move has claimed all of them, and a waiting move keeps no claim.

use std::sync::atomic::Ordering;
use std::time::Duration;

use godwit_verbs::control::{Answer as LibraryAnswer, Request};
use godwit_verbs::mover::{Taking, Wanted, ends_of};

use super::Running;
use super::preparing::preflight;
use super::preparing::reach::{ANSWER, Trouble};
use super::records::shown::shown_partners;
use super::steps::{failed, unexpected};
use crate::messages::{Answer, Ask};
use crate::status;

/// Time between two claims of a waiting move.
const AGAIN: Duration = Duration::from_millis(300);
/// Most changes of the partners between a search and the claim of all.
const MAX_CHANGES: u32 = 10;
/// Longest name of another move that is shown, in characters.
const MAX_NAME: usize = 200;

/// The outcome of a claim.
enum Claimed {
    /// This move has the process.
    Taken,
    /// The named move has the process.
    Waits(String),
}

impl Running {
    /// Waits until this move has the process and its partners.
    ///
    /// # Errors
    /// There is another obstacle, or the move was cancelled; no claim is kept then.
    pub(super) async fn wait_for_turn(&mut self) -> Result<(), Trouble> {
        let mut changes = 0;
        loop {
            self.still_wanted()?;
            if let Some(who) = self.processes.held.holder(self.plan.pid) {
                self.waits(who);
                self.looked = false;
                // Nodes end connections that are silent for long, and accept few at once.
                self.reach.keep(|_| false);
                tokio::time::sleep(AGAIN).await;
                continue;
            }
            if !self.looked && !self.look().await? {
                continue;
            }
            self.looked = false;
            let other = self.take_all().await?;
            self.shows(|view| view.waits_for = None);
            match other {
                Some((wanted, who)) => {
                    self.wait_for(&wanted, who).await?;
                    changes = 0;
                }
                None if self.partners_are_there().await? => return Ok(()),
                None => {
                    self.give_back_all().await;
                    changes += 1;
                    if changes == MAX_CHANGES {
                        return Err(failed("its partners change all the time".to_owned()));
                    }
                }
            }
        }
    }

    fn still_wanted(&self) -> Result<(), Trouble> {
        if self.cancelled.load(Ordering::Acquire) {
            return Err(failed("it was cancelled".to_owned()));
        }
        if self.processes.context.is_closing() {
            return Err(failed("the node ends".to_owned()));
        }
        Ok(())
    }

    fn waits(&self, who: String) {
        let who: String = who.chars().take(MAX_NAME).collect();
        self.shows(|view| view.waits_for = Some(who));
    }

    /// Finds partners and obstacles. Returns false if another move took the process meanwhile: the search may then have
    /// missed that move's process.
    async fn look(&mut self) -> Result<bool, Trouble> {
        let (pid, to) = (self.plan.pid, self.plan.to.clone());
        let (address, files) = (self.plan.address.as_ref(), &self.plan.files);
        let chosen = self.plan.chosen().again().await.map_err(failed)?;
        let name = chosen.name();
        let found = preflight::look(
            &self.processes,
            &mut self.reach,
            &chosen,
            &to,
            address,
            files,
        )
        .await;
        if self.processes.held.holder(pid).is_some() {
            return Ok(false);
        }
        let clear = found.clear(&name, &to).map_err(failed)?;
        if clear.layout != self.plan.layout {
            return Err(failed(format!("{name} has ended")));
        }
        self.plan.partners = clear.partners;
        self.plan.queue_pairs = clear.queue_pairs;
        self.plan.datagrams = clear.datagrams;
        let plan = &self.plan;
        self.reach
            .keep(|name| name == to || plan.partners.iter().any(|(partner, _)| partner == name));
        self.shows(|view| {
            view.partners = shown_partners(&self.plan.partners);
            view.queue_pairs = self.plan.queue_pairs;
        });
        Ok(true)
    }

    fn taking(&self) -> Taking {
        let own = &self.processes.context.config.name;
        Taking::new(own, self.plan.pid, &self.plan.partners)
    }

    /// Claims all processes, or returns the first that another move has and keeps no claim.
    async fn take_all(&mut self) -> Result<Option<(Wanted, String)>, Trouble> {
        let mut taking = self.taking();
        while let Some(wanted) = taking.next().cloned() {
            match self.claim(&wanted).await {
                Ok(Claimed::Taken) => taking.took(),
                Ok(Claimed::Waits(who)) => {
                    self.give_back(taking.give_back()).await;
                    return Ok(Some((wanted, who)));
                }
                Err(trouble) => {
                    // A request without an answer may have been fulfilled.
                    taking.took();
                    self.give_back(taking.give_back()).await;
                    return Err(trouble);
                }
            }
        }
        Ok(None)
    }

    async fn claim(&mut self, wanted: &Wanted) -> Result<Claimed, Trouble> {
        let (processes, id) = (&self.processes, &self.plan.id);
        if wanted.moves {
            let taken = processes.held.take_to_move(processes, id, wanted.pid);
            return Ok(taken.map_or_else(Claimed::Waits, |()| Claimed::Taken));
        }
        let asked = Ask::Claim {
            pid: wanted.pid,
            moving: self.plan.pid,
        };
        match self.reach.ask(&wanted.node, asked, ANSWER).await? {
            Answer::Done => Ok(Claimed::Taken),
            Answer::Waits(who) => Ok(Claimed::Waits(who)),
            _ => Err(unexpected()),
        }
    }

    /// Waits until the other move gives the process back. The process may be elsewhere then.
    async fn wait_for(&mut self, wanted: &Wanted, mut who: String) -> Result<(), Trouble> {
        // Nodes accept only few of these connections at once.
        self.reach.keep(|name| name == wanted.node);
        loop {
            self.waits(who);
            tokio::time::sleep(AGAIN).await;
            self.still_wanted()?;
            match self.claim(wanted).await {
                Ok(Claimed::Waits(other)) => who = other,
                Ok(Claimed::Taken) => {
                    self.give_back(std::slice::from_ref(wanted)).await;
                    return Ok(());
                }
                // The next search finds the reason.
                Err(_) => return Ok(()),
            }
        }
    }

    /// Returns true if the partners are still the found ones, now that no other move can change them.
    async fn partners_are_there(&mut self) -> Result<bool, Trouble> {
        if self.plan.plain {
            return Ok(true);
        }
        let ours = status(self.plan.pid).await;
        let ours = match ours {
            Ok(status) => status.queue_pairs,
            Err(error) => {
                self.give_back_all().await;
                return Err(failed(error));
            }
        };
        for (name, party) in self.plan.partners.clone() {
            let theirs = match self.reach.partner(&name, party.pid, Request::Status).await {
                Ok(LibraryAnswer::Status(status)) => status.queue_pairs,
                // The partner has ended, or is elsewhere.
                _ => return Ok(false),
            };
            if ends_of(&ours, party.pid, &theirs).as_ref() != Some(&party) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    async fn give_back_all(&mut self) {
        let mut taking = self.taking();
        while taking.next().is_some() {
            taking.took();
        }
        self.give_back(taking.give_back()).await;
    }

    /// Gives claims back. A node that does not hear this gives them back by itself after a while.
    async fn give_back(&mut self, taken: &[Wanted]) {
        for wanted in taken {
            if wanted.moves {
                let held = &self.processes.held;
                held.give_back_moved(&self.plan.id, wanted.pid);
                continue;
            }
            let mut partners = self.plan.partners.iter();
            let found =
                partners.find(|(name, party)| *name == wanted.node && party.pid == wanted.pid);
            let Some((_, party)) = found else { continue };
            let only = Some(party.numbers());
            let request = Request::Resume { only };
            let _unheard = self.reach.partner(&wanted.node, wanted.pid, request).await;
        }
    }
}
