//! The node's answers to other nodes' questions about grants.

use std::sync::Arc;

use godwit_context::Context;
use godwit_context::store::grants::{Granted, MOST_GRANTS};
use godwit_core::units::ProtectionId;
use godwit_peers::{PeerConnection, framed, names};
use godwit_protect::{Grant, Member};

use super::Protection;
use super::messages::{LONGEST, Question, Reply, WITHIN, Wish, merge};

/// Answers the one question of a connection.
pub async fn serve(
    context: Arc<Context>,
    mut connection: PeerConnection,
    peer: String,
    id: ProtectionId,
) {
    let read = async {
        let length = framed::length(&mut connection, LONGEST).await?;
        framed::body(&mut connection, length).await
    };
    let asked = tokio::time::timeout(WITHIN, read).await;
    let reply = match asked {
        Ok(Ok(question)) => reply(&context, &peer, id, question).await,
        Ok(Err(error)) => Reply::Refused(format!("the question cannot be read: {error}")),
        Err(_) => return,
    };
    if let Err(error) = framed::write(&mut connection, &reply, LONGEST, WITHIN).await {
        tracing::debug!(peer, %error, "the node that asked about a grant is gone");
    }
}

/// Answers a question of a node.
pub(super) async fn reply(
    context: &Context,
    peer: &str,
    id: ProtectionId,
    question: Question,
) -> Reply {
    let own = &context.config.name;
    if context.fencing.concerns(peer) {
        return Reply::Busy(format!("node '{own}' is fencing node '{peer}'"));
    }
    let Question { nodes, ask } = question;
    let wrong = nodes
        .iter()
        .find_map(|name| names::check("node", name).err());
    if let Some(error) = wrong {
        return Reply::Refused(error.message);
    }
    if nodes[0] == nodes[1] || !nodes.iter().any(|name| name == peer) {
        return Reply::Refused(format!(
            "node '{peer}' asks about the grant of nodes '{}' and '{}'",
            nodes[0], nodes[1]
        ));
    }
    let of = Protection { id, nodes };
    let changed = match ask {
        Wish::Read => change(context, &of, |present| present).await,
        Wish::Swap(wish) if !wish.is_possible() => {
            return Reply::Refused(String::from("no grant may change like this"));
        }
        Wish::Swap(wish) => change(context, &of, move |present| wish.apply(present)).await,
        Wish::Meet(theirs) => match of.role_of(own) {
            Ok((role, _)) => meet(context, &of, role, theirs).await,
            Err(error) => return Reply::Refused(error.to_string()),
        },
    };
    match changed {
        Ok(grant) => Reply::Grant(grant),
        Err(reply) => reply,
    }
}

/// Stores the newer one of this node's grant and the other node's, and returns that grant.
pub(super) async fn meet(
    context: &Context,
    of: &Protection,
    role: Member,
    theirs: Option<Grant>,
) -> Result<Option<Grant>, Reply> {
    let newer = move |present| match role {
        Member::First => merge(present, theirs),
        Member::Second => merge(theirs, present),
    };
    change(context, of, newer).await
}

/// Changes a grant in this node's store.
pub(super) async fn change(
    context: &Context,
    of: &Protection,
    change: impl Fn(Option<Grant>) -> Option<Grant> + Send + 'static,
) -> Result<Option<Grant>, Reply> {
    let own = &context.config.name;
    match context.store.change_grant(of.id, &of.nodes, change).await {
        Ok(Granted::Now(grant)) => Ok(grant),
        Ok(Granted::Full) => Err(Reply::Refused(format!(
            "node '{own}' has {MOST_GRANTS} grants, and takes no more: end protections that are no longer needed"
        ))),
        Ok(Granted::Of([first, second])) => Err(Reply::Refused(format!(
            "the grant of protection {} belongs to nodes '{first}' and '{second}'",
            of.id
        ))),
        Err(error) => Err(Reply::Unknown(error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use godwit_protect::Term;

    use super::super::Change;
    use super::super::fence::tests::{PAIR, context, protection};
    use super::*;

    async fn ask(context: &Context, peer: &str, nodes: [&str; 2], ask: Wish) -> Reply {
        let nodes = nodes.map(str::to_owned);
        let of = protection().id;
        reply(context, peer, of, Question { nodes, ask }).await
    }

    #[track_caller]
    fn refuses(reply: &Reply, words: &str) {
        assert!(
            matches!(reply, Reply::Refused(why) if why.contains(words)),
            "{reply:?}"
        );
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn only_its_two_nodes_change_a_grant_and_step_by_step() {
        let folder = tempfile::tempdir().expect("a folder");
        let context = context("c", folder.path());
        let first = Some(Grant::FIRST);
        let begin = Wish::Swap(Change::BEGIN);
        // Unknown ids have no grant, and reading stores none.
        let read = ask(&context, "a", PAIR, Wish::Read).await;
        assert_eq!(read, Reply::Grant(None));
        let begun = ask(&context, "a", PAIR, begin).await;
        assert_eq!(begun, Reply::Grant(first));
        for (peer, nodes, words) in [
            ("d", PAIR, "'d' asks about"),
            ("d", ["a", "d"], "belongs to nodes 'a' and 'b'"),
            ("a", ["a", "a"], "'a' asks about"),
            ("a", ["a", "../b"], "is not a node name"),
        ] {
            refuses(&ask(&context, peer, nodes, Wish::Read).await, words);
        }
        let paired = Grant {
            term: Term(2),
            paired: true,
            ..Grant::FIRST
        };
        let later = Grant {
            term: Term(u64::MAX),
            ..paired
        };
        let change = |expected, wanted| Wish::Swap(Change { expected, wanted });
        for hostile in [
            change(first, Some(later)),
            change(Some(later), Some(Grant::FIRST)),
            change(Some(paired), None),
            change(None, Some(paired)),
            change(first, first),
        ] {
            let refused = ask(&context, "b", PAIR, hostile).await;
            refuses(&refused, "no grant may change like this");
        }
        let meet = ask(&context, "b", PAIR, Wish::Meet(Some(later))).await;
        refuses(&meet, "'c' has no part");
        let next = change(first, Some(paired));
        assert_eq!(
            ask(&context, "a", PAIR, next).await,
            Reply::Grant(Some(paired))
        );
        // A stale request changes nothing.
        let stale = change(
            first,
            Some(Grant {
                paired: false,
                ..paired
            }),
        );
        assert_eq!(
            ask(&context, "b", PAIR, stale).await,
            Reply::Grant(Some(paired))
        );
        let fence = context.fencing.begin("b");
        let busy = ask(&context, "b", PAIR, Wish::Read).await;
        assert!(matches!(busy, Reply::Busy(_)), "{busy:?}");
        drop(fence);
        context.store.close();
        let closed = ask(&context, "b", PAIR, stale).await;
        assert!(matches!(closed, Reply::Unknown(_)), "{closed:?}");
    }
}
