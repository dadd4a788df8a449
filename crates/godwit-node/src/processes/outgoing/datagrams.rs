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
        let peers = self.node.config.peers.iter().map(|peer| peer.name.clone());
        let names: Vec<String> = peers.chain([self.node.config.name.clone()]).collect();
        if !redirects.is_empty() {
            for name in &names {
                let asked = Ask::Redirect {
                    redirects: redirects.clone(),
                };
                match self.reach.ask(name, asked, ANSWER).await {
                    Ok(_) => {}
                    Err(trouble) => self.nobody_told(&format!("not all of node '{name}'"), trouble),
                }
            }
        }
        self.tell_it(place, &names).await;
    }

    /// Tells the process where others have gone while it could not be told.
    async fn tell_it(&mut self, place: Where, names: &[String]) {
        let mut others = Vec::new();
        for name in names {
            match self.reach.library(name, Ask::Redirects).await {
                Ok(LibraryAnswer::Redirects(redirects)) => others.extend(redirects),
                Ok(_) => {}
                Err(trouble) => {
                    let why = trouble.into_text();
                    self.warn(format!(
                        "the process was not told where others have moved to that it may send datagrams to: {why}"
                    ));
                }
            }
        }
        if others.is_empty() {
            return;
        }
        let request = Request::Redirect { redirects: others };
        let to = self.plan.to.clone();
        let told = match place {
            Where::Here => self.own(request).await,
            Where::There => self.reach.library(&to, Ask::Moved { request }).await,
        };
        if let Err(trouble) = told {
            let why = trouble.into_text();
            self.warn(format!(
                "the process does not send datagrams to all of those that have moved: {why}"
            ));
        }
    }

    fn nobody_told(&self, who: &str, trouble: Trouble) {
        let why = trouble.into_text();
        self.warn(format!(
            "senders of datagrams were not told where the process is, {who}: {why}"
        ));
    }
}
