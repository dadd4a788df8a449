//! The decision which node goes on: a witness's, or without a witness the nodes' own.

use std::sync::Arc;
use std::time::Duration;

use godwit_api::WhenAlone;
use godwit_context::store::machine::protections::ProtectionEntry;
use godwit_core::units::ProtectionId;
use godwit_protect::{Ask, Grant, Member, Term};

use super::messages::{Hear, Opening};
use super::witness::spec::WitnessSpec;
use super::witness::{self, Protection, Witness};
use super::{Here, Input, session};
use crate::vms::Vms;

/// Time between two looks at the witness of a protected machine.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// A request, with everything that decides on it.
#[derive(Clone, Debug)]
pub(super) struct Request {
    pub(super) vm: String,
    pub(super) entry: ProtectionEntry,
    pub(super) ask: Ask,
    /// Backup: the last grant that the primary told.
    pub(super) told: Grant,
    /// True if an operator has ordered this node to go on.
    pub(super) ordered: bool,
    /// True if this node itself was away, and may not know of a later grant.
    pub(super) was_away: bool,
    /// Primary: true while the machine is left to the backup.
    pub(super) leaves: bool,
}

/// Returns the grant after the request, or the reason why there is no answer.
pub(super) async fn decide(vms: Arc<Vms>, request: Request) -> Result<Grant, String> {
    match asked(&vms, &request).await {
        Ok(Some(grant)) => return Ok(grant),
        // An operator's order counts where the witness cannot be asked. A witness that answers has the last word: its
        // grant may have let the other node take the machine, or still may.
        Err(why) if !request.ordered => return Err(why),
        Ok(None) | Err(_) => {}
    }
    match (request.entry.primary().is_some(), request.ordered) {
        (true, true) => Ok(request.ask.wanted),
        (true, false) => primary_alone(&vms, &request).await,
        (false, _) => backup_alone(&request),
    }
}

/// Returns the witness's answer, or `None` if there is no witness.
async fn asked(vms: &Arc<Vms>, request: &Request) -> Result<Option<Grant>, String> {
    let Some((witness, of)) = witness(vms, &request.entry)? else {
        return Ok(None);
    };
    let answer = witness::answer(&*witness, &of, &request.ask).await;
    answer.map(Some).map_err(|error| error.to_string())
}

/// Looks from time to time if the witness answers, as long as the protection's task runs: [`Input::Witness`] follows each
/// look. A dead witness would show only after the death of a node otherwise.
pub(super) fn watch_witness(here: &Here, entry: &ProtectionEntry) {
    let (here, entry) = (here.clone(), entry.clone());
    tokio::spawn(async move {
        while let Ok(Some((witness, of))) = witness(&here.vms, &entry) {
            tokio::select! {
                () = here.vms.context.closed() => return,
                () = tokio::time::sleep(LOOK_EVERY) => {}
            }
            let look = Ask {
                expected: Grant::FIRST,
                wanted: Grant::FIRST,
            };
            let answer = witness::answer(&*witness, &of, &look).await;
            let answer = answer.map(drop).map_err(|error| {
                format!("nobody goes on if a node is lost now, because the witness cannot be asked: {error}")
            });
            if here.inputs.send(Input::Witness(answer)).await.is_err() {
                return;
            }
        }
    });
}

/// Returns an error unless this node can ask the witness.
pub(super) fn usable(vms: &Arc<Vms>, witness: &str) -> Result<(), String> {
    let spec: WitnessSpec = witness.parse()?;
    let connected = witness::connect(&spec, &vms.context);
    connected.map(drop).map_err(|error| error.message)
}

/// A witness, and a protection as the witness knows the protection.
type WitnessOf = (Arc<dyn Witness>, Protection);

/// Returns the witness of a protection, if any, and the protection as the witness knows it.
pub(super) fn witness(
    vms: &Arc<Vms>,
    entry: &ProtectionEntry,
) -> Result<Option<WitnessOf>, String> {
    let Some(text) = &entry.witness else {
        return Ok(None);
    };
    let spec: WitnessSpec = text.parse()?;
    let witness = witness::connect(&spec, &vms.context).map_err(|error| error.message)?;
    let id: ProtectionId = entry.id.parse().unwrap_or_default();
    let (own, peer) = (vms.context.config.name.clone(), entry.peer.clone());
    let nodes = match entry.me {
        Member::First => [own, peer],
        Member::Second => [peer, own],
    };
    Ok(Some((witness, Protection { id, nodes })))
}

/// Primary without a witness: the backup's word counts as long as the backup can be reached.
async fn primary_alone(vms: &Arc<Vms>, request: &Request) -> Result<Grant, String> {
    let Ask { expected, wanted } = request.ask;
    if wanted.paired {
        return Ok(wanted);
    }
    let entry = &request.entry;
    let back = Grant {
        term: Term(expected.term.0.saturating_add(1)),
        owner: entry.me,
        paired: false,
    };
    let question = match request.leaves {
        true => Opening::Look,
        false => Opening::Question,
    };
    // A node that hangs takes connections, and answers nothing.
    let within = Duration::from_millis(entry.timeout_ms);
    let asked = session::question(vms, &request.vm, entry, question);
    let asked = tokio::time::timeout(within, asked).await;
    let silent = |_| Err(format!("node '{}' does not answer", entry.peer));
    match asked.unwrap_or_else(silent) {
        Ok(Hear::Word { grant, took: true }) => Ok(Grant {
            term: grant.term.max(back.term),
            owner: entry.me.other(),
            paired: false,
        }),
        Ok(Hear::Word { took: false, .. }) if request.leaves => Ok(expected),
        Ok(Hear::Word { took: false, .. }) if expected == wanted => Ok(back),
        Ok(Hear::Word { took: false, .. }) => Ok(wanted),
        Ok(_) => Err(format!("node '{}' answered something else", entry.peer)),
        Err(_)
            if entry.when_alone == WhenAlone::Continue
                && !request.was_away
                && expected != wanted =>
        {
            Ok(wanted)
        }
        Err(why) => Err(why),
    }
}

/// Backup without a witness: nobody else can be asked.
fn backup_alone(request: &Request) -> Result<Grant, String> {
    let Ask { expected, wanted } = request.ask;
    let takes = wanted.owner == request.entry.me && expected != wanted;
    let may = request.ordered || request.entry.when_alone == WhenAlone::Continue;
    if takes && !may {
        return Err(format!(
            "an operator decides: 'godwit vm failover {}' here takes it, if node '{}' is down",
            request.vm, request.entry.peer
        ));
    }
    Ok(request.told.after(&request.ask))
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_context::store::machine::protections::{BackupEntry, ProtectionPart};
    use godwit_protect::Member;
    use godwit_qemu::machine::Machine;

    fn request(when_alone: WhenAlone, ordered: bool) -> Request {
        let known = Grant {
            paired: true,
            ..Grant::FIRST
        };
        let machine = Machine::adopt(&[String::from("q")], |_| None).expect("a machine");
        Request {
            vm: String::from("v"),
            entry: ProtectionEntry {
                id: String::new(),
                peer: String::from("a"),
                me: Member::Second,
                witness: None,
                when_alone,
                timeout_ms: 3000,
                max_bandwidth: None,
                pool: None,
                checkpoints_per_second: None,
                part: ProtectionPart::Backup(Box::new(BackupEntry {
                    known,
                    machine_id: String::new(),
                    epoch: 1,
                    machine,
                })),
            },
            ask: Ask {
                expected: known,
                wanted: Grant {
                    term: Term(2),
                    owner: Member::Second,
                    paired: false,
                },
            },
            told: known,
            ordered,
            was_away: false,
            leaves: false,
        }
    }

    #[test]
    fn a_backup_alone_takes_only_what_it_may() {
        let takes = |request: &Request| match backup_alone(request) {
            Ok(grant) => grant == request.ask.wanted,
            Err(why) => {
                assert!(why.contains("godwit vm failover v"), "{why}");
                false
            }
        };
        assert!(takes(&request(WhenAlone::Continue, false)));
        assert!(takes(&request(WhenAlone::Stop, true)));
        assert!(!takes(&request(WhenAlone::Stop, false)));
        // The primary has told of another grant since.
        let told = Grant {
            term: Term(3),
            ..Grant::FIRST
        };
        let stale = Request {
            told,
            ..request(WhenAlone::Continue, false)
        };
        assert_eq!(backup_alone(&stale), Ok(told));
    }
}
