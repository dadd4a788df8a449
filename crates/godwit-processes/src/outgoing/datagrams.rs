//! Redirects of datagrams: tells senders the process's new place.

use godwit_move::Ending;
use godwit_verbs::control::{Answer as LibraryAnswer, Request};

use super::Running;
use super::preparing::reach::{ANSWER, Trouble};
use super::steps::Where;
use crate::messages::Ask;

impl Running {
    /// Has every node tell its processes the new place once the process goes on, and tells the process the missed
    /// redirects. Only datagrams depend on this step, and a datagram may be lost at any time.
    pub(super) async fn tell_senders(&mut self, ending: &Ending) {
        if let Some(place) = self.plan.may_have_others(ending) {
            self.tell_others(place).await;
        }
        match ending {
            // A plain process has no library to tell.
            _ if self.plan.plain => {}
            Ending::Moved { .. } => self.tell_it(Where::There).await,
            Ending::Stayed { .. } => self.tell_it(Where::Here).await,
            Ending::Gone { .. } => {}
        }
    }

    async fn tell_others(&mut self, place: Where) {
        let redirects = match self.asked_at(place, Request::Redirects).await {
            Ok(LibraryAnswer::Redirects(redirects)) => redirects,
            Ok(_) => return,
            Err(trouble) => return self.nobody_told("no node", trouble),
        };
        if redirects.is_empty() {
            return;
        }
        let peers = self
            .processes
            .context
            .config
            .peers
            .iter()
            .map(|peer| peer.name.clone());
        let names: Vec<String> = peers
            .chain([self.processes.context.config.name.clone()])
            .collect();
        for name in names {
            let asked = Ask::Redirect {
                redirects: redirects.clone(),
            };
            match self.reach.ask(&name, asked, ANSWER).await {
                Ok(_) => {}
                Err(trouble) => self.nobody_told(&format!("not all of node '{name}'"), trouble),
            }
        }
    }

    /// Tells the process the missed redirects, and none older: earlier redirects are in the image, and the number of a
    /// queue pair left long ago may belong to another queue pair now.
    async fn tell_it(&mut self, place: Where) {
        let redirects = self.processes.moves.take_missed(&self.plan.id);
        if redirects.is_empty() {
            return;
        }
        if let Err(trouble) = self.asked_at(place, Request::Redirect { redirects }).await {
            let why = trouble.into_text();
            self.warn(format!(
                "the process does not send datagrams to all of those that have moved: {why}"
            ));
        }
    }

    async fn asked_at(&mut self, place: Where, request: Request) -> Result<LibraryAnswer, Trouble> {
        let to = self.plan.to.clone();
        match place {
            Where::Here => self.own(request).await,
            Where::There => self.reach.library(&to, Ask::Moved { request }).await,
        }
    }

    fn nobody_told(&self, who: &str, trouble: Trouble) {
        let why = trouble.into_text();
        self.warn(format!(
            "senders of datagrams were not told where the process is, {who}: {why}"
        ));
    }
}
