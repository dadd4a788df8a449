//! A command that fences, in place of a third place for the grant.
//!
//! Each of the two nodes stores the grant. The first node decides: every change passes its store, its own changes before
//! and the second node's changes after the agreement of the second node's store. A node whose other node is silent runs
//! the command. After its success the other host is dead, so the node stores the grant alone.
//!
//! A node that has started may know an old grant, since it may be the fenced one. Such a node neither changes the grant
//! nor fences before the other node has answered once.

use std::sync::Arc;
use std::time::Duration;

use godwit_context::Context;
use godwit_protect::{Grant, Member};

use super::messages::{Reply, Wish};
use super::{Answer, Change, Protection, Swap, Witness, WitnessError, command, node, serve};

/// Time limit for the command.
const FENCE_WITHIN: Duration = Duration::from_secs(60);
/// Tries to bring both stores together while a store changes.
const MEETINGS: usize = 4;

/// The way to the other node.
trait Link: std::fmt::Debug + Send + Sync {
    fn ask<'a>(&'a self, node: &'a str, of: &'a Protection, wish: Wish) -> Answer<'a, Reply>;
}

impl Link for Arc<Context> {
    fn ask<'a>(&'a self, name: &'a str, of: &'a Protection, wish: Wish) -> Answer<'a, Reply> {
        Box::pin(node::ask(self, name, of, wish))
    }
}

/// The witness of two nodes that fence each other.
#[derive(Debug)]
pub(super) struct FenceWitness {
    context: Arc<Context>,
    link: Box<dyn Link>,
    words: Vec<String>,
    within: Duration,
}

/// The reason why the other node did not agree.
enum Failure {
    /// The other node does not answer.
    Silent(String),
    /// The other node answers, or this node cannot go on.
    Other(WitnessError),
}

impl From<WitnessError> for Failure {
    fn from(error: WitnessError) -> Self {
        Self::Other(error)
    }
}

impl Failure {
    /// Returns the error of a request that may have changed something at the other node.
    fn unknown(self) -> WitnessError {
        match self {
            Self::Silent(why) => WitnessError::Unknown(why),
            Self::Other(error) => error,
        }
    }

    /// Returns the error of a request that changed nothing.
    fn unchanged(self) -> WitnessError {
        match self {
            Self::Silent(why) | Self::Other(WitnessError::Unknown(why)) => {
                WitnessError::Unreachable(why)
            }
            Self::Other(error) => error,
        }
    }
}

impl FenceWitness {
    pub(super) fn new(context: Arc<Context>, words: Vec<String>) -> Self {
        Self {
            link: Box::new(Arc::clone(&context)),
            context,
            words,
            within: FENCE_WITHIN,
        }
    }

    fn role<'a>(&self, of: &'a Protection) -> Result<(Member, &'a str), WitnessError> {
        of.role_of(&self.context.config.name)
    }

    async fn ask(&self, of: &Protection, wish: Wish) -> Result<Option<Grant>, Failure> {
        let (_, other) = self.role(of)?;
        match self.link.ask(other, of, wish).await {
            Ok(reply) => Ok(reply.into_grant()?),
            Err(WitnessError::Unreachable(why) | WitnessError::Unknown(why)) => {
                Err(Failure::Silent(why))
            }
            Err(error) => Err(Failure::Other(error)),
        }
    }

    /// Changes this node's store.
    async fn store(&self, of: &Protection, change: Change) -> Result<Option<Grant>, WitnessError> {
        let stored = serve::change(&self.context, of, move |present| change.apply(present)).await;
        stored.or_else(Reply::into_grant)
    }

    /// Has both nodes store the newer one of their grants, and returns that grant.
    async fn meet(&self, of: &Protection) -> Result<Option<Grant>, Failure> {
        let (role, other) = self.role(of)?;
        for _ in 0..MEETINGS {
            let mine = serve::change(&self.context, of, |present| present).await;
            let mine = mine.or_else(Reply::into_grant)?;
            let theirs = self.ask(of, Wish::Meet(mine)).await?;
            let agreed = serve::meet(&self.context, of, role, theirs).await;
            let agreed = agreed.or_else(Reply::into_grant)?;
            // This node's grant may have changed meanwhile.
            if agreed == theirs {
                self.context.fencing.meet(of.id);
                return Ok(agreed);
            }
        }
        let why = format!("the grant changes while node '{other}' is asked");
        Err(Failure::Other(WitnessError::Unreachable(why)))
    }

    /// Reads the grant without a fence. A node that may take the machine knows the grant without the other node: any change
    /// would have passed this node's store, or ended this node.
    async fn read(&self, of: &Protection) -> Result<Option<Grant>, WitnessError> {
        let (role, _) = self.role(of)?;
        let failure = match self.meet(of).await {
            Ok(grant) => return Ok(grant),
            Err(failure) => failure,
        };
        let may_take = |grant: &Grant| grant.paired && grant.owner != role;
        if matches!(failure, Failure::Silent(_)) && self.context.fencing.has_met(of.id) {
            let own = serve::change(&self.context, of, |present| present).await;
            let own = own.or_else(Reply::into_grant)?;
            if own.as_ref().is_some_and(may_take) {
                return Ok(own);
            }
        }
        Err(failure.unchanged())
    }

    async fn change(&self, of: &Protection, change: Change) -> Result<Swap, WitnessError> {
        change.check()?;
        let (role, other) = self.role(of)?;
        if !self.context.fencing.has_met(of.id) {
            self.meet(of).await.map_err(|failure| match failure {
                Failure::Silent(why) => WitnessError::Unreachable(format!(
                    "node '{other}' has not answered since the start of node '{}', which may therefore not fence the other \
                     host: {why}",
                    self.context.config.name
                )),
                failure => failure.unchanged(),
            })?;
        }
        if change.wanted.is_none() {
            return self.end(of, change).await;
        }
        let changed = match role {
            Member::First => self.decide(of, change).await,
            Member::Second => self.request(of, change).await,
        };
        match changed {
            Ok(grant) => Ok(change.outcome(grant)),
            // No other change is worth a host: a machine that waits for its protection runs.
            Err(Failure::Silent(why)) if change.goes_alone(role) => {
                self.alone(of, change, &why).await
            }
            Err(failure) => Err(failure.unknown()),
        }
    }

    /// First node: stores a change, and then has the other node store the change.
    async fn decide(&self, of: &Protection, change: Change) -> Result<Option<Grant>, Failure> {
        let stored = self.store(of, change).await?;
        self.meet(of).await.map_err(|failure| match failure {
            Failure::Other(error) if stored == change.wanted => {
                WitnessError::Unknown(error.to_string()).into()
            }
            failure => failure,
        })
    }

    /// Second node: has the first node store a change, and then stores the change.
    async fn request(&self, of: &Protection, change: Change) -> Result<Option<Grant>, Failure> {
        let theirs = self.ask(of, Wish::Swap(change)).await?;
        if theirs != change.wanted {
            return self.meet(of).await;
        }
        let stored = serve::meet(&self.context, of, Member::Second, theirs).await;
        Ok(stored.or_else(Reply::into_grant)?)
    }

    /// Ends a protection at both nodes, at the other one first: no node may have a grant that the other one lacks for
    /// good.
    async fn end(&self, of: &Protection, change: Change) -> Result<Swap, WitnessError> {
        let theirs = self.ask(of, Wish::Swap(change)).await;
        if theirs.map_err(Failure::unknown)?.is_some() {
            let met = self.meet(of).await.map_err(Failure::unchanged)?;
            return Ok(change.outcome(met));
        }
        let ended = self.store(of, change).await?;
        self.context.fencing.forget(of.id);
        Ok(change.outcome(ended))
    }

    /// Fences the other host, and then changes the grant without the other node.
    async fn alone(
        &self,
        of: &Protection,
        change: Change,
        silent: &str,
    ) -> Result<Swap, WitnessError> {
        let (_, other) = self.role(of)?;
        // The other node gets no answer until the change is stored: if its host has started again, the answer would be of
        // before.
        let fence = self.context.fencing.begin(other);
        let fenced = fence.run(self.fence(other)).await;
        fenced.map_err(|why| {
            WitnessError::Unknown(format!(
                "{silent}, and its host may be alive, because the command that fences failed: {why}"
            ))
        })?;
        tracing::warn!(
            node = other,
            "the other host is fenced: this node decides alone"
        );
        Ok(change.outcome(self.store(of, change).await?))
    }

    /// Fences the other host. The host is dead if there is no error.
    async fn fence(&self, other: &str) -> Result<(), String> {
        let peer = self.context.peer(other).ok();
        let address = peer.map_or("", |peer| peer.address.as_str());
        command::run(&self.words, self.within, (other, address)).await
    }
}

impl Witness for FenceWitness {
    fn grant<'a>(&'a self, of: &'a Protection) -> Answer<'a, Option<Grant>> {
        Box::pin(self.read(of))
    }

    fn swap<'a>(&'a self, of: &'a Protection, change: Change) -> Answer<'a, Swap> {
        Box::pin(self.change(of, change))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::HashMap;
    use std::path::Path;
    use std::sync::Mutex;
    use std::time::Instant;

    use godwit_context::config::NodeConfig;
    use godwit_context::store::Store;
    use godwit_core::units::ProtectionId;
    use godwit_core::wire::Features;
    use godwit_peers::dial::Dialer;
    use godwit_protect::Term;

    use super::super::messages::Question;
    use super::*;

    pub(in super::super) const PAIR: [&str; 2] = ["a", "b"];

    pub(in super::super) fn context(name: &str, folder: &Path) -> Arc<Context> {
        let config = NodeConfig::on_loopback(name, folder.to_owned());
        let store = Store::open(&folder.join(name)).expect("opens");
        let features = Features::WITNESS;
        Arc::new(Context::new(
            config,
            store,
            Dialer {
                tls: None,
                features,
            },
        ))
    }

    pub(in super::super) fn protection() -> Protection {
        Protection {
            id: ProtectionId([7; 16]),
            nodes: PAIR.map(str::to_owned),
        }
    }

    fn grant(term: u64, owner: Member, paired: bool) -> Grant {
        let term = Term(term);
        Grant {
            term,
            owner,
            paired,
        }
    }

    fn change(expected: Grant, owner: Member, paired: bool) -> Change {
        Change {
            expected: Some(expected),
            wanted: Some(grant(expected.term.0 + 1, owner, paired)),
        }
    }

    /// The network between both nodes.
    #[derive(Debug)]
    struct Network {
        nodes: HashMap<String, Arc<Context>>,
        up: Mutex<bool>,
    }

    #[derive(Debug)]
    struct Wire {
        me: &'static str,
        network: Arc<Network>,
    }

    impl Link for Wire {
        fn ask<'a>(&'a self, node: &'a str, of: &'a Protection, ask: Wish) -> Answer<'a, Reply> {
            Box::pin(async move {
                if !*self.network.up.lock().expect("a test") {
                    return Err(WitnessError::Unreachable(format!("node '{node}' is away")));
                }
                let nodes = of.nodes.clone();
                let there = &self.network.nodes[node];
                Ok(serve::reply(there, self.me, of.id, Question { nodes, ask }).await)
            })
        }
    }

    struct Pair {
        network: Arc<Network>,
        of: Protection,
        folder: tempfile::TempDir,
    }

    impl Pair {
        fn new() -> Self {
            let folder = tempfile::tempdir().expect("a folder");
            let node = |name: &str| (name.to_owned(), context(name, folder.path()));
            let network = Network {
                nodes: PAIR.map(node).into(),
                up: Mutex::new(true),
            };
            Self {
                network: Arc::new(network),
                of: protection(),
                folder,
            }
        }

        fn link(&self, up: bool) {
            *self.network.up.lock().expect("a test") = up;
        }

        /// Returns the witness of a node that has just started, with a script for the command.
        fn starts(&self, me: &'static str, script: &str) -> FenceWitness {
            let network = Arc::clone(&self.network);
            network.nodes[me].fencing.forget(self.of.id);
            FenceWitness {
                context: Arc::clone(&network.nodes[me]),
                link: Box::new(Wire { me, network }),
                words: ["sh", "-c", script].map(str::to_owned).to_vec(),
                within: Duration::from_secs(5),
            }
        }

        /// Returns a script that fences, and leaves a file behind.
        fn fences(&self) -> String {
            let file = self.folder.path().join("fenced");
            format!("printf %s $GODWIT_FENCE_NODE >> {}", file.display())
        }

        fn fenced(&self) -> String {
            std::fs::read_to_string(self.folder.path().join("fenced")).unwrap_or_default()
        }

        /// Begins a protection, and pairs both nodes.
        async fn paired(&self, first: &FenceWitness) -> Grant {
            let begun = first.swap(&self.of, Change::BEGIN).await;
            assert_eq!(begun, Ok(Swap::Done));
            let pair = change(Grant::FIRST, Member::First, true);
            assert_eq!(first.swap(&self.of, pair).await, Ok(Swap::Done));
            grant(2, Member::First, true)
        }

        async fn stored(&self, node: &str) -> Option<Grant> {
            let there = &self.network.nodes[node];
            serve::change(there, &self.of, |present| present)
                .await
                .expect("reads")
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn both_stores_have_each_grant_and_stale_requests_change_nothing() {
        let pair = Pair::new();
        let (a, b) = (pair.starts("a", "exit 1"), pair.starts("b", "exit 1"));
        let paired = pair.paired(&a).await;
        let stale = change(Grant::FIRST, Member::First, false);
        assert_eq!(
            b.swap(&pair.of, stale).await,
            Ok(Swap::Stands(Some(paired)))
        );
        let take = change(paired, Member::Second, false);
        assert_eq!(b.swap(&pair.of, take).await, Ok(Swap::Done));
        assert_eq!(
            b.swap(&pair.of, take).await,
            Ok(Swap::Done),
            "a repeated request"
        );
        let alone = change(paired, Member::First, false);
        let taken = grant(3, Member::Second, false);
        assert_eq!(a.swap(&pair.of, alone).await, Ok(Swap::Stands(Some(taken))));
        for node in PAIR {
            assert_eq!(pair.stored(node).await, Some(taken));
        }
        let end = Change::end(taken);
        assert_eq!(b.swap(&pair.of, end).await, Ok(Swap::Done));
        assert_eq!(
            (pair.stored("a").await, pair.stored("b").await),
            (None, None)
        );
        assert_eq!(a.grant(&pair.of).await, Ok(None));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_fenced_node_learns_of_the_grant_before_it_serves_or_fences() {
        let pair = Pair::new();
        let (a, b) = (pair.starts("a", "exit 1"), pair.starts("b", &pair.fences()));
        assert_eq!(b.grant(&pair.of).await, Ok(None));
        let paired = pair.paired(&a).await;
        pair.link(false);
        assert_eq!(
            b.grant(&pair.of).await,
            Ok(Some(paired)),
            "it may take over"
        );
        let owner = a.grant(&pair.of).await;
        assert!(
            matches!(owner, Err(WitnessError::Unreachable(_))),
            "{owner:?}"
        );
        assert_eq!(pair.fenced(), "");
        // The first node stores its change before it fences, and does not fence.
        let alone = change(paired, Member::First, false);
        let failed = a.swap(&pair.of, alone).await;
        assert!(
            matches!(failed, Err(WitnessError::Unknown(_))),
            "{failed:?}"
        );
        let take = change(paired, Member::Second, false);
        assert_eq!(b.swap(&pair.of, take).await, Ok(Swap::Done));
        assert_eq!(pair.fenced(), "a");
        // The fenced host starts again, and could fence.
        let a = pair.starts("a", &pair.fences());
        for asked in [
            a.swap(&pair.of, alone).await.map(|_| ()),
            a.grant(&pair.of).await.map(|_| ()),
        ] {
            assert!(
                matches!(asked, Err(WitnessError::Unreachable(_))),
                "{asked:?}"
            );
        }
        assert_eq!(pair.fenced(), "a", "node b was not fenced");
        pair.link(true);
        let taken = grant(3, Member::Second, false);
        assert_eq!(a.swap(&pair.of, alone).await, Ok(Swap::Stands(Some(taken))));
        assert_eq!(pair.stored("a").await, Some(taken));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_first_node_that_fences_goes_on_alone() {
        let pair = Pair::new();
        let a = pair.starts("a", &pair.fences());
        let paired = pair.paired(&a).await;
        pair.link(false);
        let alone = change(paired, Member::First, false);
        assert_eq!(a.swap(&pair.of, alone).await, Ok(Swap::Done));
        assert_eq!(pair.fenced(), "b");
        pair.link(true);
        let b = pair.starts("b", &pair.fences());
        let take = change(paired, Member::Second, false);
        let stands = grant(3, Member::First, false);
        assert_eq!(b.swap(&pair.of, take).await, Ok(Swap::Stands(Some(stands))));
        assert_eq!(pair.stored("b").await, Some(stands));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn only_a_node_that_goes_on_alone_fences() {
        let pair = Pair::new();
        let (a, b) = (
            pair.starts("a", &pair.fences()),
            pair.starts("b", &pair.fences()),
        );
        assert_eq!(a.swap(&pair.of, Change::BEGIN).await, Ok(Swap::Done));
        assert_eq!(b.grant(&pair.of).await, Ok(Some(Grant::FIRST)));
        pair.link(false);
        let give_back = change(Grant::FIRST, Member::First, false);
        let pairs = change(Grant::FIRST, Member::First, true);
        for (node, change) in [
            (&b, give_back),
            (&a, pairs),
            (&a, Change::end(Grant::FIRST)),
        ] {
            let failed = node.swap(&pair.of, change).await;
            assert!(
                matches!(failed, Err(WitnessError::Unknown(_))),
                "{failed:?}"
            );
        }
        assert_eq!(pair.fenced(), "");
        // The pairing above is stored here, and counts once the other host is dead.
        let alone = change(Grant::FIRST, Member::First, false);
        let stands = grant(2, Member::First, true);
        assert_eq!(
            a.swap(&pair.of, alone).await,
            Ok(Swap::Stands(Some(stands)))
        );
        let alone = change(stands, Member::First, false);
        assert_eq!(a.swap(&pair.of, alone).await, Ok(Swap::Done));
        assert_eq!(pair.fenced(), "bb");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_host_that_starts_again_during_its_fence_gets_no_answer() {
        let pair = Pair::new();
        let b = pair.starts("b", "sleep 0.3");
        let paired = pair.paired(&pair.starts("a", "exit 1")).await;
        assert_eq!(b.grant(&pair.of).await, Ok(Some(paired)));
        pair.link(false);
        let take = change(paired, Member::Second, false);
        let again = async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            pair.link(true);
            pair.starts("a", "exit 0").grant(&pair.of).await
        };
        let (taken, early) = tokio::join!(b.swap(&pair.of, take), again);
        assert_eq!(taken, Ok(Swap::Done));
        assert!(
            matches!(&early, Err(WitnessError::Unreachable(why)) if why.contains("is fencing")),
            "{early:?}"
        );
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_command_that_fails_gives_no_right() {
        let pair = Pair::new();
        let paired = pair.paired(&pair.starts("a", "exit 1")).await;
        let late = pair.folder.path().join("late");
        let hangs = format!("(sleep 0.6; touch {}) & wait", late.display());
        for (script, words) in [
            (
                "echo one >&2; echo 'two is the reason' >&2; exit 3",
                "exit status: 3: two is the reason",
            ),
            ("kill -9 $$", "signal: 9"),
            ("sleep 2 & exit 4", "exit status: 4"),
            (&hangs, "did not end within"),
        ] {
            pair.link(true);
            let b = FenceWitness {
                within: Duration::from_millis(300),
                ..pair.starts("b", script)
            };
            assert_eq!(b.grant(&pair.of).await, Ok(Some(paired)));
            pair.link(false);
            let begun = Instant::now();
            let take = change(paired, Member::Second, false);
            let error = b.swap(&pair.of, take).await.expect_err(script);
            assert!(matches!(error, WitnessError::Unknown(_)), "{error}");
            assert!(error.to_string().contains(words), "{error}");
            assert!(begun.elapsed() < Duration::from_secs(1), "{script}");
            assert_eq!(pair.stored("b").await, Some(paired));
        }
        let mut none = pair.starts("b", "");
        none.words = vec![String::from("/no/such/program")];
        let error = none.fence("a").await.expect_err("no program");
        assert!(error.contains("cannot be started"), "{error}");
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert!(!late.exists(), "the whole group was ended");
    }
}
