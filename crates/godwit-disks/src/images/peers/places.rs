//! The order in which the sources of a part of an image are asked, and how long each keeps a guest waiting.
//!
//! Other nodes come first, as they are near and numerous, but only for a moment, to bound the cost of a slow node. The
//! repository comes second. If the repository fails or is slow, other nodes get all the time they need.

use std::pin::pin;
use std::time::Duration;

/// Time for other nodes before the repository is asked.
pub(super) const HEAD_START: Duration = Duration::from_millis(250);

/// Time to wait for each source before the next is asked.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waits {
    /// For other nodes.
    peers: Duration,
    /// For the repository alone, before other nodes are asked once more.
    repository: Duration,
}

pub(super) const WAITS: Waits = Waits {
    peers: HEAD_START,
    repository: Duration::from_secs(1),
};

/// The source of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum From {
    Peers,
    Repository,
}

/// Asks one source after the other. `quick` asks other nodes for a fast answer, `patient` asks all other nodes.
///
/// # Errors
/// The repository's error, when no source has the part.
pub(super) async fn first<T, E>(
    waits: Waits,
    quick: impl Future<Output = Option<T>>,
    repository: impl Future<Output = Result<T, E>>,
    patient: impl Future<Output = Option<T>>,
) -> Result<(T, From), E> {
    if let Ok(Some(found)) = tokio::time::timeout(waits.peers, quick).await {
        return Ok((found, From::Peers));
    }
    let (mut repository, mut patient) = (pin!(repository), pin!(patient));
    let mut why = match tokio::time::timeout(waits.repository, &mut repository).await {
        Ok(Ok(found)) => return Ok((found, From::Repository)),
        Ok(Err(why)) => Some(why),
        Err(_) => None,
    };
    let mut nobody_has_it = false;
    loop {
        tokio::select! {
            found = &mut repository, if why.is_none() => match found {
                Ok(found) => return Ok((found, From::Repository)),
                Err(error) => why = Some(error),
            },
            found = &mut patient, if !nobody_has_it => match found {
                Some(found) => return Ok((found, From::Peers)),
                None => nobody_has_it = true,
            },
        }
        if let Some(why) = why.take_if(|_| nobody_has_it) {
            return Err(why);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};
    use std::time::Instant;

    use super::*;

    const SHORT: Waits = Waits {
        peers: Duration::from_millis(50),
        repository: Duration::from_millis(100),
    };

    async fn after<T>(milliseconds: u64, value: T) -> T {
        tokio::time::sleep(Duration::from_millis(milliseconds)).await;
        value
    }

    type Found = Result<(u8, From), &'static str>;

    /// Checks the result, and the least duration in milliseconds.
    async fn finds(found: impl Future<Output = Found>, expected: Found, at_least: u64) {
        let begun = Instant::now();
        assert_eq!(found.await, expected);
        let took = begun.elapsed();
        assert!(took >= Duration::from_millis(at_least), "{took:?}");
    }

    #[tokio::test]
    async fn who_is_near_and_quick_is_asked_alone() {
        let asked = first(
            SHORT,
            after(5, Some(1)),
            async { panic!("asked") },
            pending(),
        );
        finds(asked, Ok((1, From::Peers)), 5).await;
    }

    #[tokio::test]
    async fn a_node_that_is_slow_or_has_nothing_holds_nobody_back_from_the_repository() {
        let repository = Ok((2, From::Repository));
        let asked = first(SHORT, pending(), after(1, Ok(2)), pending());
        finds(asked, repository, 50).await;
        let asked = first(SHORT, ready(None), after(1, Ok(2)), pending());
        finds(asked, repository, 0).await;
        // The repository is slow too, and no other source is quicker.
        let asked = first(SHORT, ready(None), after(200, Ok(2)), ready(None));
        finds(asked, repository, 200).await;
        let asked = first(SHORT, ready(None), after(200, Ok(2)), pending());
        finds(asked, repository, 200).await;
    }

    #[tokio::test]
    async fn without_the_repository_a_slow_node_is_good_enough() {
        let peers = Ok((3, From::Peers));
        let asked = first(SHORT, ready(None), ready(Err("down")), after(300, Some(3)));
        finds(asked, peers, 300).await;
        let asked = first(SHORT, pending(), pending(), after(20, Some(3)));
        finds(asked, peers, 170).await;
        let asked = first(
            SHORT,
            pending(),
            after(200, Err("down")),
            after(250, Some(3)),
        );
        finds(asked, peers, 400).await;
    }

    #[tokio::test]
    async fn when_nobody_has_it_the_repository_says_why() {
        for (repository, patient) in [(0, 50), (200, 0), (120, 300)] {
            let repository = after(repository, Err("away"));
            let asked = first(SHORT, ready(None), repository, after(patient, None));
            finds(asked, Err("away"), 50).await;
        }
    }
}
