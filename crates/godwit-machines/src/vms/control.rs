//! The control connection of a VM's move: messages both ways, and a beat every second.

use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use crate::vms::messages::{self, PING_EVERY, SILENCE};
use godwit_peers::PeerConnection;

/// Queued messages in each direction, at most.
const BACKLOG: usize = 8;

/// An end of the connection: sends `O`, receives `I`. Queued messages are still sent after a drop.
#[derive(Debug)]
pub(crate) struct Link<O, I> {
    out: mpsc::Sender<O>,
    inbox: mpsc::Receiver<I>,
    reading: AbortHandle,
}

impl<O, I> Link<O, I>
where
    O: Serialize + Send + Sync + 'static,
    I: DeserializeOwned + Send + 'static,
{
    /// Takes over a connection. `beat` makes a beat, `is_beat` recognises the other side's.
    pub(crate) fn open(
        connection: PeerConnection,
        beat: fn() -> O,
        is_beat: fn(&I) -> bool,
    ) -> Self {
        let (mut reader, mut writer) = tokio::io::split(connection);
        let (out, mut queue) = mpsc::channel(BACKLOG);
        let (arrivals, inbox) = mpsc::channel(BACKLOG);
        godwit_context::spawn(async move {
            loop {
                let message = tokio::time::timeout(PING_EVERY, queue.recv()).await;
                let message = match message {
                    Ok(Some(message)) => message,
                    Ok(None) => break,
                    Err(_) => beat(),
                };
                if messages::write(&mut writer, &message).await.is_err() {
                    break;
                }
            }
            // The other side may be gone already.
            let _ = tokio::io::AsyncWriteExt::shutdown(&mut writer).await;
        });
        let reading = godwit_context::spawn(async move {
            while let Ok(Ok(message)) =
                tokio::time::timeout(SILENCE, messages::read(&mut reader)).await
            {
                if !is_beat(&message) && arrivals.send(message).await.is_err() {
                    return;
                }
            }
        });
        Self {
            out,
            inbox,
            reading: reading.abort_handle(),
        }
    }

    /// Returns a second sender for this end. Queued messages are still sent after a drop of the link.
    pub(crate) fn speaker(&self) -> mpsc::Sender<O> {
        self.out.clone()
    }

    /// Sends a message. A lost connection shows in the end of received messages.
    pub(crate) async fn say(&self, message: O) {
        let _ = self.out.send(message).await;
    }

    /// Queues a message. Returns false if the other side does not keep up, or is gone.
    pub(crate) fn try_say(&self, message: O) -> bool {
        self.out.try_send(message).is_ok()
    }

    /// Returns the next message, or `None` once the other side is gone.
    pub(crate) async fn hear(&mut self) -> Option<I> {
        self.inbox.recv().await
    }

    /// Returns the next message if one arrives within this time.
    pub(crate) async fn hear_within(&mut self, limit: Duration) -> Option<I> {
        tokio::time::timeout(limit, self.hear())
            .await
            .unwrap_or(None)
    }
}

impl<O, I> Drop for Link<O, I> {
    fn drop(&mut self) {
        self.reading.abort();
    }
}
