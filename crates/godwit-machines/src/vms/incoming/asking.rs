//! Destination: asks the source if it gave a VM away, after the loss of their connection.

use std::sync::Arc;
use std::time::Duration;

use godwit_core::units::MigrationId;
use godwit_core::wire::{Purpose, TrafficClass};
use tokio::sync::watch;
use tokio::task::AbortHandle;

use crate::vms::Vms;
use crate::vms::messages::{self, Answer, Order, SILENCE, Word};
use godwit_peers::greeting;

/// Time between two questions to the source.
const AGAIN: Duration = Duration::from_millis(500);

/// The question about one move, repeated until answered or dropped.
pub(super) struct Asking {
    said: watch::Receiver<Result<Word, String>>,
    task: AbortHandle,
}

impl Asking {
    /// Asks node `from`, which offered the VM `id`.
    pub(super) fn begin(
        vms: &Arc<Vms>,
        (vm, id): (&str, &str),
        from: &str,
        migration: MigrationId,
    ) -> Self {
        let (told, said) = watch::channel(Ok(Word::Undecided));
        let (vms, vm, id) = (Arc::clone(vms), vm.to_owned(), id.to_owned());
        let from = from.to_owned();
        let task = godwit_context::spawn(async move {
            loop {
                let heard = ask(&vms, (&vm, &id), &from, migration).await;
                if let Err(why) = &heard {
                    tracing::debug!(vm, from, why, "cannot ask whether the VM was given away");
                }
                let is_answered = matches!(heard, Ok(Word::Given | Word::Kept));
                if told.send(heard).is_err() || is_answered {
                    return;
                }
                tokio::time::sleep(AGAIN).await;
            }
        });
        Self {
            said,
            task: task.abort_handle(),
        }
    }

    /// Returns the next answer of the source. Waits for ever after a final answer.
    ///
    /// # Errors
    /// The reason for a silent source.
    pub(super) async fn heard(&mut self) -> Result<Word, String> {
        if self.said.changed().await.is_err() {
            std::future::pending().await
        }
        self.said.borrow_and_update().clone()
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn ask(
    vms: &Vms,
    (vm, id): (&str, &str),
    from: &str,
    migration: MigrationId,
) -> Result<Word, String> {
    let peer = vms.context.peer(from).map_err(|error| error.message)?;
    let (class, purpose) = (TrafficClass::Control, Purpose::Machine);
    let hello = greeting::hello(&vms.context.config.name, vm, class, purpose, migration);
    let dialled = vms.context.dialer.dial(peer, hello).await;
    let (mut connection, _) = dialled.map_err(|error| error.to_string())?;
    let question = Order::Ask { id: id.to_owned() };
    let asked = async {
        messages::write(&mut connection, &question).await?;
        messages::read(&mut connection).await
    };
    match tokio::time::timeout(SILENCE, asked).await {
        Ok(Ok(Answer::Word(word))) => Ok(word),
        Ok(Ok(_)) => Err(String::from("it answered something else")),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(String::from("it does not answer")),
    }
}
