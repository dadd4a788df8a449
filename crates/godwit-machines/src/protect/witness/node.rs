//! A third node as witness.

use std::sync::Arc;

use godwit_api::ErrorBody;
use godwit_context::Context;
use godwit_core::units::MigrationId;
use godwit_core::wire::{Features, Purpose, RefusalCode, TrafficClass};
use godwit_peers::config::PeerConfig;
use godwit_peers::dial::DialError;
use godwit_peers::{framed, greeting};
use godwit_protect::Grant;

use super::messages::{LONGEST, Question, Reply, WITHIN, Wish};
use super::{Answer, Change, Protection, Swap, Witness, WitnessError};

/// A peer that stores the grants.
#[derive(Debug)]
pub(super) struct NodeWitness {
    context: Arc<Context>,
    name: String,
}

impl NodeWitness {
    /// Creates the witness.
    ///
    /// # Errors
    /// The node has no such peer.
    pub(super) fn new(context: Arc<Context>, name: &str) -> Result<Self, ErrorBody> {
        context.peer(name)?;
        let name = name.to_owned();
        Ok(Self { context, name })
    }

    async fn ask(&self, of: &Protection, wish: Wish) -> Result<Option<Grant>, WitnessError> {
        let Self { context, name } = self;
        if of.nodes.contains(name) {
            return Err(WitnessError::Unusable(format!(
                "node '{name}' is one of the two nodes of the protection: a witness is a third node"
            )));
        }
        ask(context, name, of, wish).await?.into_grant()
    }
}

impl Witness for NodeWitness {
    fn grant<'a>(&'a self, of: &'a Protection) -> Answer<'a, Option<Grant>> {
        Box::pin(async {
            self.ask(of, Wish::Read).await.map_err(|error| match error {
                WitnessError::Unknown(why) => WitnessError::Unreachable(why),
                other => other,
            })
        })
    }

    fn swap<'a>(&'a self, of: &'a Protection, change: Change) -> Answer<'a, Swap> {
        Box::pin(async move {
            change.check()?;
            Ok(change.outcome(self.ask(of, Wish::Swap(change)).await?))
        })
    }
}

/// Asks a peer about a grant. The outcome is unknown once the question may have arrived.
pub(super) async fn ask(
    context: &Context,
    name: &str,
    of: &Protection,
    ask: Wish,
) -> Result<Reply, WitnessError> {
    let peer = context
        .peer(name)
        .map_err(|error| WitnessError::Unusable(error.message))?;
    let dialled = tokio::time::timeout(WITHIN, dial(context, peer, of)).await;
    let silent = || format!("node '{name}' does not answer");
    let mut connection = dialled.map_err(|_| WitnessError::Unreachable(silent()))??;
    let question = Question {
        nodes: of.nodes.clone(),
        ask,
    };
    let asked = async {
        framed::write(&mut connection, &question, LONGEST, WITHIN).await?;
        let length = framed::length(&mut connection, LONGEST).await?;
        framed::body(&mut connection, length).await
    };
    match tokio::time::timeout(WITHIN, asked).await {
        Ok(Ok(reply)) => Ok(reply),
        Ok(Err(error)) => Err(WitnessError::Unknown(format!("node '{name}': {error}"))),
        Err(_) => Err(WitnessError::Unknown(silent())),
    }
}

async fn dial(
    context: &Context,
    peer: &PeerConfig,
    of: &Protection,
) -> Result<godwit_peers::PeerConnection, WitnessError> {
    let hello = |purpose, id| {
        let own = &context.config.name;
        greeting::hello(own, "", TrafficClass::Control, purpose, MigrationId(id))
    };
    let name = &peer.name;
    let failed = |error: &DialError| format!("node '{name}': {error}");
    let question = hello(Purpose::Witness, of.id.0);
    match context.dialer.dial(peer, question).await {
        Ok((connection, _)) => Ok(connection),
        Err(error @ DialError::Unreachable { .. }) => {
            Err(WitnessError::Unreachable(failed(&error)))
        }
        Err(DialError::Refused(refusal)) => {
            let why = format!("node '{name}' refused: {refusal}");
            Err(match refusal.code {
                RefusalCode::Busy | RefusalCode::Internal => WitnessError::Unreachable(why),
                _ => WitnessError::Unusable(why),
            })
        }
        // An older node hangs up at the unknown purpose, and tells its features in the answer to another purpose.
        Err(error) => {
            let probe = hello(Purpose::Resolve, [0; 16]);
            match context.dialer.dial(peer, probe).await {
                Ok((_, agreed)) if !agreed.features.contain(Features::WITNESS) => {
                    Err(WitnessError::Unusable(format!(
                        "node '{name}' cannot be a witness: it runs a version without witnesses"
                    )))
                }
                _ => Err(WitnessError::Unreachable(failed(&error))),
            }
        }
    }
}
