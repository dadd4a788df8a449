//! A bound on unfinished handshakes: strangers can open connections, but not hold them.

use std::collections::VecDeque;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::task::AbortHandle;

/// Runs at most a fixed number of handshakes at once. A further handshake ends the oldest, so a client that opens
/// connections and stays silent cannot keep others out.
#[derive(Debug)]
pub(crate) struct HandshakeSlots {
    limit: usize,
    running: Mutex<Running>,
}

#[derive(Debug, Default)]
struct Running {
    next: u64,
    handshakes: VecDeque<(u64, AbortHandle)>,
}

impl HandshakeSlots {
    /// Returns slots for at most `limit` handshakes, at least one.
    pub(crate) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self {
            limit: limit.max(1),
            running: Mutex::default(),
        })
    }

    /// Runs a handshake on a task of its own.
    pub(crate) fn spawn(self: &Arc<Self>, handshake: impl Future<Output = ()> + Send + 'static) {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let number = running.next;
        running.next += 1;
        let slot = Slot {
            slots: Arc::clone(self),
            number,
        };
        let task = godwit_context::spawn(async move {
            let _slot = slot;
            handshake.await;
        });
        running.handshakes.push_back((number, task.abort_handle()));
        if running.handshakes.len() > self.limit
            && let Some((_, oldest)) = running.handshakes.pop_front()
        {
            // The aborted task frees its slot when dropped, on another thread or later.
            drop(running);
            oldest.abort();
        }
    }
}

/// The place of one handshake; freed on drop.
struct Slot {
    slots: Arc<HandshakeSlots>,
    number: u64,
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut running = self
            .slots
            .running
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        running
            .handshakes
            .retain(|(number, _)| *number != self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::mpsc;

    #[tokio::test]
    async fn one_too_many_ends_the_oldest() {
        let slots = HandshakeSlots::new(2);
        let (ended, mut ends) = mpsc::unbounded_channel();
        for number in 0..3 {
            let ended = ended.clone();
            slots.spawn(async move {
                let _end = OnDrop(ended, number);
                std::future::pending::<()>().await;
            });
            tokio::task::yield_now().await;
        }
        assert_eq!(ends.recv().await, Some(0));
        assert!(ends.try_recv().is_err());
    }

    #[tokio::test]
    async fn a_finished_handshake_frees_its_slot() {
        let slots = HandshakeSlots::new(1);
        slots.spawn(async {});
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        assert!(
            slots
                .running
                .lock()
                .expect("not poisoned")
                .handshakes
                .is_empty()
        );
    }

    struct OnDrop(mpsc::UnboundedSender<u32>, u32);

    impl Drop for OnDrop {
        fn drop(&mut self) {
            let _ = self.0.send(self.1);
        }
    }
}
