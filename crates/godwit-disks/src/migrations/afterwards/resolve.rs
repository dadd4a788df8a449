//! Finds the owner of a disk after a crash or a lost connection: asks the other node, and answers its questions.

use std::sync::Arc;
use std::time::Duration;

use godwit_core::authority::{Authority, Effect};
use godwit_core::units::MigrationId;
use godwit_core::wire::{
    HEADER_SIZE, Header, Hello, Message, Purpose, Refusal, RefusalCode, Reply, TrafficClass,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::disks::disk::Disk;
use crate::migrations::Migrations;
use godwit_peers::{PeerConnection, greeting, into_stream};

/// The traffic class and purpose of the connection.
const QUESTION: (TrafficClass, Purpose) = (TrafficClass::Control, Purpose::Resolve);
/// First wait between two attempts, doubled each time up to [`MAX_BACKOFF`].
const MIN_BACKOFF: Duration = Duration::from_millis(200);
/// Longest wait between two attempts.
const MAX_BACKOFF: Duration = Duration::from_secs(2);
/// Longest silence on an answered connection.
const ANSWER_IDLE: Duration = Duration::from_secs(10);
/// Longest body of a frame of the authority protocol, in bytes.
const MAX_BODY: u32 = 64;

/// Looks for the other node of an undecided migration, unless a task does already.
pub fn start(migrations: &Arc<Migrations>, disk: &Arc<Disk>, migration: MigrationId) {
    let mut inner = disk.lock();
    if inner
        .resolver
        .as_ref()
        .is_some_and(|running| !running.is_finished())
    {
        return;
    }
    let task = godwit_context::spawn(resolve(Arc::clone(migrations), Arc::clone(disk), migration));
    inner.resolver = Some(task.abort_handle());
}

async fn resolve(migrations: Arc<Migrations>, disk: Arc<Disk>, migration: MigrationId) {
    let mut backoff = MIN_BACKOFF;
    // Both nodes may look for each other at once, and each connection replaces the one before. Different waits keep the
    // two from undoing each other's work.
    tokio::time::sleep(jitter(&migrations.context.config.name)).await;
    let mut told = false;
    loop {
        let (open, counterpart, engine) = {
            let inner = disk.lock();
            let engine = inner.engine.as_ref().map(|engine| engine.handle.clone());
            (
                inner.in_doubt() == Some(migration),
                inner.entry.counterpart.clone(),
                engine,
            )
        };
        let (true, Some(engine), false) = (open, engine, migrations.context.is_closing()) else {
            return;
        };
        let counterpart = counterpart.unwrap_or_default();
        let error = match migrations.context.peer(&counterpart) {
            Err(error) => error.message,
            Ok(peer) => match migrations
                .context
                .open_for(&disk.name, peer, QUESTION, migration)
                .await
            {
                Ok(control) => {
                    tracing::info!(
                        disk = disk.name,
                        peer = counterpart,
                        "asking who owns the disk"
                    );
                    engine.control_up(migration, control);
                    return;
                }
                Err(error) => error,
            },
        };
        if told {
            tracing::debug!(
                disk = disk.name,
                peer = counterpart,
                error,
                "still in doubt"
            );
        } else {
            tracing::warn!(
                disk = disk.name,
                peer = counterpart,
                error,
                "the disk is in doubt and the other node does not answer; asking on"
            );
            told = true;
        }
        tokio::time::sleep(backoff).await;
        backoff = (backoff * 2).min(MAX_BACKOFF);
    }
}

/// Returns a wait of up to a quarter second, different for each node and each call.
fn jitter(name: &str) -> Duration {
    use std::hash::{BuildHasher, RandomState};
    Duration::from_millis(RandomState::new().hash_one(name) % 256)
}

/// The answerer of another node's question.
#[derive(Debug)]
pub enum Answer {
    /// The disk's engine takes part in the migration and answers.
    Engine(Arc<Disk>),
    /// The migration is history here: the stored record answers.
    Record(Arc<Disk>),
}

/// Decides who answers a question.
///
/// # Errors
/// [`RefusalCode::Unknown`] if the disk does not exist; [`RefusalCode::Identity`] if the migration is another node's.
pub fn decide(migrations: &Arc<Migrations>, hello: &Hello) -> Result<Answer, Refusal> {
    let disk = migrations.disks.find(&hello.disk).ok_or_else(|| Refusal {
        code: RefusalCode::Unknown,
        text: format!(
            "node '{}' has no disk named {:?}",
            migrations.context.config.name, hello.disk
        ),
    })?;
    let mut inner = disk.lock();
    let migration = Some(hello.migration);
    if inner.activity.migration() != migration && inner.in_doubt() != migration {
        drop(inner);
        return Ok(Answer::Record(disk));
    }
    if inner.entry.counterpart.as_deref() != Some(hello.node.as_str()) {
        return Err(Refusal {
            code: RefusalCode::Identity,
            text: format!(
                "migration {} is not node '{}''s",
                hello.migration, hello.node
            ),
        });
    }
    if let Some(resolver) = inner.resolver.take() {
        resolver.abort();
    }
    drop(inner);
    Ok(Answer::Engine(disk))
}

/// Takes a connection on which another node asks; `answer` was decided from the hello.
pub async fn take_question(
    migrations: Arc<Migrations>,
    mut control: PeerConnection,
    hello: Hello,
    welcome: Reply,
    answer: Answer,
) {
    if let Err(error) =
        greeting::write(&mut control, &godwit_core::wire::Greeting::Reply(welcome)).await
    {
        tracing::debug!(peer = hello.node, %error, "the asking node is gone");
        return;
    }
    match answer {
        Answer::Engine(disk) => {
            let Some(engine) = disk.engine() else { return };
            match into_stream(control).await {
                Ok(control) => engine.control_up(hello.migration, control),
                Err(error) => tracing::debug!(peer = hello.node, %error, "the asking node is gone"),
            }
        }
        Answer::Record(disk) => {
            let answering = answer_from_record(&disk, &mut control, hello.migration);
            tokio::select! {
                result = answering => if let Err(error) = result {
                    tracing::debug!(disk = disk.name, peer = hello.node, %error, "answered");
                },
                () = migrations.context.closed() => {}
            }
        }
    }
}

/// Answers from the stored record until the other node asks no more. The state machine of the answers is the engine's;
/// here only its replies are used.
async fn answer_from_record(
    disk: &Disk,
    control: &mut PeerConnection,
    migration: MigrationId,
) -> std::io::Result<()> {
    let invalid = |error| std::io::Error::new(std::io::ErrorKind::InvalidData, error);
    loop {
        let mut header = [0; HEADER_SIZE];
        match tokio::time::timeout(ANSWER_IDLE, control.read_exact(&mut header)).await {
            Err(_) => return Ok(()),
            Ok(read) => read?,
        };
        let header = Header::decode(&header).map_err(invalid)?;
        if header.payload_length > MAX_BODY {
            return Err(std::io::ErrorKind::InvalidData.into());
        }
        let mut body = vec![0; header.payload_length as usize];
        control.read_exact(&mut body).await?;
        let message = Message::decode(&header, &body).map_err(invalid)?;
        let about = match message {
            Message::Query { migration } | Message::Commit { migration, .. } => migration,
            Message::Ping => {
                send(control, &Message::Pong).await?;
                continue;
            }
            _ => continue,
        };
        if about != migration {
            return Err(std::io::ErrorKind::InvalidData.into());
        }
        let record = disk.lock().record;
        for effect in Authority::new(record).handle(&message) {
            if let Effect::Send(reply) = effect {
                send(control, &reply).await?;
            }
        }
    }
}

async fn send(control: &mut PeerConnection, message: &Message) -> std::io::Result<()> {
    let (header, inline, length) = message.encode();
    control.write_all(&header.encode()).await?;
    control.write_all(&inline[..length]).await?;
    control.flush().await
}
