//! Pre-setup: makes the objects of the process at the destination and the partners' replacements while the process
//! works.

use godwit_verbs::control::{Answer as LibraryAnswer, Request};
use godwit_verbs::mover::{ahead_at_holder, ahead_at_partner};

use super::super::Running;
use super::super::steps::{failed, unexpected};
use super::reach::{ANSWER, Trouble};
use crate::host::threads::threads_of;
use crate::messages::Ask;

impl Running {
    /// Makes and connects everything ahead; nothing is left after an error.
    pub(in crate::outgoing) async fn pre_set_up(&mut self) -> Result<(), Trouble> {
        let made = self.make_ahead().await;
        match &made {
            Ok(()) => self.plan.ahead = true,
            Err(trouble) => {
                let why = trouble.clone().into_text();
                self.warn(format!("nothing was made ahead of the process: {why}"));
                self.give_up_ahead().await;
            }
        }
        made
    }

    async fn make_ahead(&mut self) -> Result<(), Trouble> {
        let LibraryAnswer::Plan(plan) = self.own(Request::Plan).await? else {
            return Err(unexpected());
        };
        let (to, pid) = (self.plan.to.clone(), self.plan.pid);
        // A holder must not have any of these numbers, which the process needs.
        let threads = threads_of(pid).map_err(failed)?;
        let asked = Ask::Hold { pid, threads, plan };
        let held = self.reach.library(&to, asked).await?;
        let LibraryAnswer::Held(held) = held else {
            return Err(unexpected());
        };
        let mut at_holder = Vec::new();
        for (name, party) in self.plan.partners.clone() {
            let connections = ahead_at_partner(&party, &held).map_err(failed)?;
            let request = Request::Prepare { connections };
            let prepared = self.reach.partner(&name, party.pid, request).await?;
            let LibraryAnswer::Prepared(prepared) = prepared else {
                return Err(unexpected());
            };
            let theirs = self.partner_pairs(&name, party.pid).await?;
            at_holder.extend(ahead_at_holder(&party, &theirs, &prepared).map_err(failed)?);
        }
        let asked = Ask::ConnectHeld {
            connections: at_holder,
        };
        self.reach.library(&to, asked).await.map(drop)
    }

    /// Gives up the objects made ahead. A node without this request gives the objects up when the move ends.
    async fn give_up_ahead(&mut self) {
        let to = self.plan.to.clone();
        let _unheard = self.reach.ask(&to, Ask::GiveUpHeld, ANSWER).await;
        for (name, party) in &self.plan.partners {
            let only = Some(party.numbers());
            let request = Request::Abandon { only };
            let _unheard = self.reach.partner(name, party.pid, request).await;
        }
    }

    /// Warns the user.
    pub(in crate::outgoing) fn warn(&self, text: String) {
        tracing::warn!(id = self.plan.id, text, "a process moves with a warning");
        self.shows(|view| view.warnings.push(text));
    }
}
