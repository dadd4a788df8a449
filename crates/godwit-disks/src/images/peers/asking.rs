//! The choice of other nodes, the connections to them, and the nodes at rest.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use godwit_core::units::MigrationId;
use godwit_core::wire::{Features, Purpose, TrafficClass};
use godwit_image::ManifestId;

use super::idle::Idle;
use super::messages::{Answer, Question};
use super::places::HEAD_START;
use crate::images::Images;
use godwit_peers::config::PeerConfig;
use godwit_peers::dial::Agreed;
use godwit_peers::{PeerConnection, greeting};

/// Most nodes asked for one part.
const ASKED: usize = 4;
/// Time limit for an answer when the caller is not in a hurry.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// The reason why a node rests, with the duration of the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rest {
    /// The node is slow, or cannot be reached now.
    Slow,
    /// The node is older and gives no chunks, or gave a wrong chunk.
    Useless,
}

impl Rest {
    const fn lasts(self) -> Duration {
        match self {
            Self::Slow => Duration::from_secs(10),
            Self::Useless => Duration::from_secs(60),
        }
    }
}

/// Time before a node without any part of an image is asked for the image again.
const HAS_NOTHING: Duration = Duration::from_secs(10);

/// Facts about one other node.
#[derive(Debug, Default)]
struct Peer {
    /// True if the node gives chunks, according to a connection for another purpose.
    gives: bool,
    rests: Option<(Rest, Instant)>,
    has_nothing_of: HashMap<ManifestId, Instant>,
    idle: Arc<Idle>,
}

impl Peer {
    /// Returns true if the node may be asked. Patient callers ask slow nodes too.
    fn may_be_asked(&self, about: Option<ManifestId>, patient: bool, now: Instant) -> bool {
        let rests = self.rests.is_some_and(|(why, since)| {
            now.duration_since(since) < why.lasts() && !(patient && why == Rest::Slow)
        });
        let has_nothing = about
            .and_then(|about| self.has_nothing_of.get(&about))
            .is_some_and(|since| now.duration_since(*since) < HAS_NOTHING);
        !rests && !has_nothing
    }

    fn answered(&mut self, about: Option<ManifestId>, answer: &Answer, now: Instant) {
        self.rests = None;
        let Some(about) = about else {
            return;
        };
        match answer {
            Answer::Nothing => {
                let lasts = |since: &mut Instant| now.duration_since(*since) < HAS_NOTHING;
                self.has_nothing_of.retain(|_, since| lasts(since));
                self.has_nothing_of.insert(about, now);
            }
            Answer::Here(_) | Answer::NotThatChunk => {
                self.has_nothing_of.remove(&about);
            }
        }
    }
}

/// Facts about all other nodes asked so far.
#[derive(Debug, Default)]
pub(crate) struct Asked {
    peers: Mutex<HashMap<String, Peer>>,
}

impl Asked {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Peer>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<T>(&self, name: &str, change: impl FnOnce(&mut Peer) -> T) -> T {
        change(self.lock().entry(name.to_owned()).or_default())
    }
}

/// Nodes that did not answer a caller with many questions, and are asked no more by this caller.
#[derive(Debug, Default)]
pub(in crate::images) struct Silent(Mutex<HashSet<String>>);

impl Silent {
    fn lock(&self) -> MutexGuard<'_, HashSet<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The choice of nodes, and the time limit for each.
#[derive(Clone, Copy)]
enum How<'a> {
    /// Up to [`ASKED`] nodes not at rest, for as long as a guest can wait.
    Quick,
    /// Up to [`ASKED`] nodes, slow ones too.
    Patient,
    /// All nodes but the ones already silent.
    All(&'a Silent),
}

impl How<'_> {
    const fn limit(self) -> Duration {
        match self {
            Self::Quick => HEAD_START,
            Self::Patient | Self::All(_) => PATIENCE,
        }
    }

    const fn most(self) -> usize {
        match self {
            Self::Quick | Self::Patient => ASKED,
            Self::All(_) => usize::MAX,
        }
    }

    fn passes_over(self, peer: &str) -> bool {
        matches!(self, Self::All(silent) if silent.lock().contains(peer))
    }

    fn is_silent(self, peer: &str) {
        if let Self::All(silent) = self {
            silent.lock().insert(peer.to_owned());
        }
    }
}

/// Asks nodes not at rest. A node that exceeds the limit rests from then on.
pub(super) async fn quick<T>(
    images: &Arc<Images>,
    question: Question,
    right: impl Fn(Bytes) -> Option<T>,
) -> Option<T> {
    ask_all(images, question, right, How::Quick).await
}

/// Asks nodes that may have the part, and gives each the time needed.
pub(super) async fn patient<T>(
    images: &Arc<Images>,
    question: Question,
    right: impl Fn(Bytes) -> Option<T>,
) -> Option<T> {
    ask_all(images, question, right, How::Patient).await
}

/// Asks every node that may have the part, except nodes in `silent`, which left an earlier question unanswered.
pub(super) async fn every<T>(
    images: &Arc<Images>,
    question: Question,
    right: impl Fn(Bytes) -> Option<T>,
    silent: &Silent,
) -> Option<T> {
    ask_all(images, question, right, How::All(silent)).await
}

async fn ask_all<T>(
    images: &Arc<Images>,
    question: Question,
    right: impl Fn(Bytes) -> Option<T>,
    how: How<'_>,
) -> Option<T> {
    let asked = &images.asked;
    for peer in chosen(&images.context.config.peers, question, asked, how) {
        if how.passes_over(&peer.name) {
            // The node did not answer another question meanwhile.
            continue;
        }
        let rests = Resting {
            asked,
            peer: &peer.name,
            why: Some(Rest::Slow),
        };
        let answer = match tokio::time::timeout(how.limit(), ask(images, &peer, question)).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(why)) => {
                how.is_silent(&peer.name);
                rests.because(why);
                continue;
            }
            Err(_) => {
                how.is_silent(&peer.name);
                continue;
            }
        };
        asked.with(&peer.name, |it| {
            it.answered(question.manifest(), &answer, Instant::now());
        });
        let Answer::Here(bytes) = answer else {
            rests.does_well();
            continue;
        };
        match right(bytes) {
            Some(found) => {
                rests.does_well();
                return Some(found);
            }
            None => {
                tracing::warn!(
                    peer = peer.name,
                    ?question,
                    "what that node has of an image is not what its hash says; it is not asked for a while"
                );
                rests.because(Rest::Useless);
            }
        }
    }
    None
}

/// Lets the node rest on drop, because a caller may stop waiting at any time.
struct Resting<'a> {
    asked: &'a Asked,
    peer: &'a str,
    why: Option<Rest>,
}

impl Resting<'_> {
    fn because(mut self, why: Rest) {
        self.why = Some(why);
    }

    fn does_well(mut self) {
        self.why = None;
    }
}

impl Drop for Resting<'_> {
    fn drop(&mut self) {
        if let Some(why) = self.why {
            self.asked
                .with(self.peer, |it| it.rests = Some((why, Instant::now())));
        }
    }
}

/// Returns the nodes to ask, in turns for an equal load.
fn chosen(
    peers: &[PeerConfig],
    question: Question,
    asked: &Asked,
    how: How<'_>,
) -> Vec<PeerConfig> {
    let begin = match question {
        Question::Chunk { number, .. } => (number % peers.len().max(1) as u64) as usize,
        Question::Manifest(_) | Question::Name(_) => 0,
    };
    let (now, known) = (Instant::now(), asked.lock());
    let patient = !matches!(how, How::Quick);
    let may = |peer: &&PeerConfig| {
        let it = known.get(&peer.name);
        !how.passes_over(&peer.name)
            && it.is_none_or(|it| it.may_be_asked(question.manifest(), patient, now))
    };
    let in_turns = peers.iter().cycle().skip(begin).take(peers.len());
    in_turns.filter(may).take(how.most()).cloned().collect()
}

/// Asks this node, which must know such questions.
pub(super) async fn ask(
    images: &Arc<Images>,
    peer: &PeerConfig,
    question: Question,
) -> Result<Answer, Rest> {
    let asked = &images.asked;
    let idle = asked.with(&peer.name, |it| Arc::clone(&it.idle));
    loop {
        let kept = idle.take();
        let is_new = kept.is_none();
        let mut connection = match kept {
            Some(connection) => connection,
            None => connect(images, peer).await?,
        };
        match question.ask(&mut connection).await {
            Ok(answer) => {
                idle.keep(connection);
                return Ok(answer);
            }
            // The node may have restarted since.
            Err(_) if !is_new => {}
            Err(error) => {
                tracing::debug!(peer = peer.name, %error, "cannot ask for a part of an image");
                return Err(match error.kind() {
                    std::io::ErrorKind::Other => Rest::Useless,
                    _ => Rest::Slow,
                });
            }
        }
    }
}

async fn connect(images: &Arc<Images>, peer: &PeerConfig) -> Result<PeerConnection, Rest> {
    let asked = &images.asked;
    if !asked.with(&peer.name, |it| it.gives) && !knows(images, peer, Features::default()).await? {
        return Err(Rest::Useless);
    }
    let dialled = dial(images, peer, TrafficClass::Pull, Purpose::Image).await;
    if dialled.is_err() {
        // Another version may run there now.
        asked.with(&peer.name, |it| it.gives = false);
    }
    let (connection, _) = dialled?;
    Ok(connection)
}

/// Returns true if the node's current version gives parts of images and knows the features `beside`. An older node does
/// not know [`Purpose::Image`], and tells its features in the answer to another purpose.
pub(super) async fn knows(
    images: &Arc<Images>,
    peer: &PeerConfig,
    beside: Features,
) -> Result<bool, Rest> {
    let (_, agreed) = dial(images, peer, TrafficClass::Control, Purpose::Resolve).await?;
    let gives = agreed.features.contain(Features::IMAGE_CHUNKS);
    images.asked.with(&peer.name, |it| it.gives = gives);
    Ok(gives && agreed.features.contain(beside))
}

async fn dial(
    images: &Arc<Images>,
    peer: &PeerConfig,
    class: TrafficClass,
    purpose: Purpose,
) -> Result<(PeerConnection, Agreed), Rest> {
    let own = &images.context.config.name;
    let hello = greeting::hello(own, "", class, purpose, MigrationId::default());
    images
        .context
        .dialer
        .dial(peer, hello)
        .await
        .map_err(|error| {
            tracing::debug!(peer = peer.name, %error, "cannot ask for a part of an image");
            Rest::Slow
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    const IMAGE: ManifestId = ManifestId([1; 32]);
    const OTHER: ManifestId = ManifestId([2; 32]);

    fn peers(names: &[&str]) -> Vec<PeerConfig> {
        let peer = |name: &&str| PeerConfig {
            name: (*name).to_owned(),
            address: String::from("127.0.0.1:1"),
        };
        names.iter().map(peer).collect()
    }

    fn names(peers: &[PeerConfig], number: u64, asked: &Asked, patient: bool) -> String {
        let how = if patient { How::Patient } else { How::Quick };
        names_of(peers, number, asked, how)
    }

    fn names_of(peers: &[PeerConfig], number: u64, asked: &Asked, how: How<'_>) -> String {
        let question = Question::Chunk {
            manifest: IMAGE,
            number,
        };
        let chosen = chosen(peers, question, asked, how);
        chosen.iter().map(|peer| peer.name.as_str()).collect()
    }

    #[test]
    fn nodes_are_asked_in_turns_and_not_too_many() {
        let asked = Asked::default();
        let all = peers(&["a", "b", "c", "d", "e"]);
        assert_eq!(names(&all, 0, &asked, false), "abcd");
        assert_eq!(names(&all, 3, &asked, false), "deab");
        assert_eq!(names(&all, 8, &asked, false), "deab");
        assert_eq!(names(&[], 8, &asked, false), "");
    }

    #[test]
    fn who_needs_something_at_any_cost_asks_all_that_have_answered_before() {
        let asked = Asked::default();
        let all = peers(&["a", "b", "c", "d", "e"]);
        let silent = Silent::default();
        let how = How::All(&silent);
        assert_eq!(names_of(&all, 3, &asked, how), "deabc");
        how.is_silent("a");
        assert_eq!(names_of(&all, 3, &asked, how), "debc");
        assert_eq!(names(&all, 3, &asked, true), "deab");
    }

    #[test]
    fn a_node_that_is_slow_rests_and_one_that_is_of_no_use_is_not_asked_with_patience_either() {
        let asked = Asked::default();
        let all = peers(&["a", "b", "c"]);
        let waited = |peer| Resting {
            asked: &asked,
            peer,
            why: Some(Rest::Slow),
        };
        // The caller stopped waiting.
        drop(waited("a"));
        waited("b").because(Rest::Useless);
        waited("c").does_well();
        assert_eq!(names(&all, 0, &asked, false), "c");
        assert_eq!(names(&all, 0, &asked, true), "ac");
        asked.with("a", |it| {
            it.answered(Some(IMAGE), &Answer::NotThatChunk, Instant::now());
        });
        assert_eq!(names(&all, 0, &asked, false), "ac");
    }

    #[test]
    fn a_node_without_the_image_is_not_asked_for_it_again_at_once() {
        let asked = Asked::default();
        let all = peers(&["a", "b"]);
        let now = Instant::now();
        asked.with("a", |it| it.answered(Some(IMAGE), &Answer::Nothing, now));
        asked.with("b", |it| it.answered(Some(OTHER), &Answer::Nothing, now));
        assert_eq!(names(&all, 0, &asked, true), "b");
        let later = now + HAS_NOTHING;
        assert!(asked.with("a", |it| it.may_be_asked(Some(IMAGE), false, later)));
        let found = Answer::Here(Bytes::new());
        asked.with("a", |it| it.answered(Some(IMAGE), &found, now));
        assert_eq!(names(&all, 0, &asked, false), "ab");
    }
}
