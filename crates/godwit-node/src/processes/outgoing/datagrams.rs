//! Whoever sends datagrams to the process is told where it is.

use godwit_verbs::control::{Answer as LibraryAnswer, Request};
use godwit_verbs::mover::Ending;

use super::Running;
use super::reach::{ANSWER, Trouble};
use super::steps::Where;
use crate::processes::messages::Ask;

impl Running {
    /// Has every node tell its processes, once the process goes on. Nothing depends on it but datagrams, which may be lost
    /// at any time.
    pub(super) async fn tell_senders(&mut self, ending: &Ending) {
        let Some(place) = self.plan.may_have_others(ending) else {
            return;
        };
        let to = self.plan.to.clone();
        let request = Request::Redirects;
        let asked = match place {
            Where::Here => self.own(request).await,
            Where::There => self.reach.library(&to, Ask::Moved { request }).await,
        };
        let redirects = match asked {
            Ok(LibraryAnswer::Redirects(redirects)) => redirects,
            Ok(_) => return,
            Err(trouble) => return self.nobody_told("no node", trouble),
        };
        if redirects.is_empty() {
            return;
        }
        let peers = self.node.config.peers.iter().map(|peer| peer.name.clone());
        let names: Vec<String> = peers.chain([self.node.config.name.clone()]).collect();
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

    fn nobody_told(&self, who: &str, trouble: Trouble) {
        let why = trouble.into_text();
        self.warn(format!(
            "senders of datagrams were not told where the process is, {who}: {why}"
        ));
    }
}
