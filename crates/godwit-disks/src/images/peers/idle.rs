//! Idle connections to another node.
//!
//! The other side closes a connection after some time without a question. Left open here, the connection would stay
//! half open for as long as the node runs. Each connection is therefore closed here first, even without another
//! question.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::giving;
use godwit_peers::PeerConnection;

/// Idle connections kept to one node.
const KEPT: usize = 4;
/// Time to keep an idle connection: half of the other side's limit.
const LASTS: Duration = giving::IDLE.checked_div(2).expect("a divisor");

/// The idle connections to one node.
#[derive(Debug)]
pub(super) struct Idle {
    lasts: Duration,
    kept: Arc<Mutex<Kept>>,
}

#[derive(Debug, Default)]
struct Kept {
    /// The connections, the most recently used last.
    connections: Vec<(PeerConnection, Instant)>,
    /// True while a task closes the connections in time.
    is_watched: bool,
}

impl Default for Idle {
    fn default() -> Self {
        Self::lasting(LASTS)
    }
}

impl Idle {
    fn lasting(lasts: Duration) -> Self {
        Self {
            lasts,
            kept: Arc::default(),
        }
    }

    /// Takes a connection not closed by the other side, as far as known.
    pub(super) fn take(&self) -> Option<PeerConnection> {
        let mut kept = lock(&self.kept);
        let now = Instant::now();
        kept.close(self.lasts, now);
        kept.connections.pop().map(|(connection, _)| connection)
    }

    /// Keeps a connection, unless there are enough. Must be called on a runtime.
    pub(super) fn keep(&self, connection: PeerConnection) {
        let mut kept = lock(&self.kept);
        if kept.connections.len() >= KEPT {
            return;
        }
        kept.connections.push((connection, Instant::now()));
        if !std::mem::replace(&mut kept.is_watched, true) {
            godwit_context::spawn(watch(Arc::downgrade(&self.kept), self.lasts));
        }
    }
}

impl Kept {
    /// Closes the connections idle for `lasts`.
    fn close(&mut self, lasts: Duration, now: Instant) {
        self.connections
            .retain(|(_, since)| now.duration_since(*since) < lasts);
    }
}

/// Closes connections idle for `lasts`, until none is left.
async fn watch(kept: Weak<Mutex<Kept>>, lasts: Duration) {
    loop {
        let next = {
            let Some(kept) = kept.upgrade() else { return };
            let mut kept = lock(&kept);
            let now = Instant::now();
            kept.close(lasts, now);
            let Some((_, oldest)) = kept.connections.first() else {
                kept.is_watched = false;
                return;
            };
            (*oldest + lasts).saturating_duration_since(now)
        };
        tokio::time::sleep(next).await;
    }
}

fn lock(kept: &Mutex<Kept>) -> MutexGuard<'_, Kept> {
    kept.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;
    use tokio::net::{TcpListener, TcpStream};

    use super::*;
    use godwit_peers::transport::Transport;

    const SHORT: Duration = Duration::from_millis(100);

    async fn pair() -> (PeerConnection, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let ours = TcpStream::connect(address).await.expect("connected");
        let (theirs, _) = listener.accept().await.expect("taken");
        (Transport::Plain(ours), theirs)
    }

    /// Returns true if this end learns within a moment that the other has closed the connection.
    async fn is_closed(theirs: &mut TcpStream) -> bool {
        let mut byte = [0];
        let read = theirs.read(&mut byte);
        matches!(
            tokio::time::timeout(10 * SHORT, read).await,
            Ok(Ok(0) | Err(_))
        )
    }

    #[tokio::test]
    async fn what_is_kept_is_closed_in_time_though_nobody_asks_again() {
        let idle = Idle::lasting(SHORT);
        for _ in 0..2 {
            let (ours, mut theirs) = pair().await;
            idle.keep(ours);
            assert!(is_closed(&mut theirs).await, "nobody closed it");
            assert!(idle.take().is_none());
            // The second time, another task must close the connection.
            tokio::time::sleep(SHORT).await;
        }
    }

    #[tokio::test]
    async fn also_one_that_the_other_side_has_left() {
        let idle = Idle::lasting(SHORT);
        let (ours, theirs) = pair().await;
        let Transport::Plain(socket) = &ours else {
            panic!("it is plain");
        };
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(socket));
        let is_this = std::fs::read_link(&path).expect("open");
        idle.keep(ours);
        drop(theirs);
        tokio::time::sleep(5 * SHORT).await;
        let now = std::fs::read_link(&path).ok();
        assert_ne!(now, Some(is_this), "the socket is open still");
    }

    #[tokio::test]
    async fn what_is_used_again_is_not_closed_and_not_too_many_are_kept() {
        let idle = Idle::lasting(Duration::from_secs(60));
        let (ours, mut theirs) = pair().await;
        idle.keep(ours);
        let again = idle.take().expect("kept");
        assert!(!is_closed(&mut theirs).await);
        idle.keep(again);
        let mut others = Vec::new();
        for _ in 0..KEPT {
            let (ours, theirs) = pair().await;
            idle.keep(ours);
            others.push(theirs);
        }
        let last = others.last_mut().expect("some");
        assert!(is_closed(last).await, "one too many");
        assert!(!is_closed(&mut others[0]).await);
    }
}
