//! The primary's part of a session: copies the memory, then captures and sends checkpoints, and releases what they hold
//! back once they are acknowledged.

use std::sync::Arc;
use std::time::Duration;

use godwit_api::{CheckpointFigures, ErrorBody};
use godwit_context::store::machine::protections::ProtectionEntry;
use godwit_memory::dirty::pages::{PAGE_BYTES, PageRun, Pages};
use godwit_peers::PeerConnection;
use godwit_protect::checkpoints::{Checkpoint, Checkpoints, Step};
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::super::{Input, session};
use super::capture::{Capture, Captured, held_cards};
use super::figures::Figures;
use crate::vms::Vms;
use crate::vms::vm::Vm;

/// Pages sent at once while the guest runs.
const PIECE_PAGES: u64 = 1024;
/// Dirty bytes that are few enough for the first checkpoint.
const FEW_BYTES: u64 = 8 << 20;
/// Most passes over the memory before the first checkpoint. A guest that writes faster than the link is slowed down by
/// its checkpoints, not by more passes.
const MOST_PASSES: u32 = 12;
/// Time between two looks at a guest that does not run.
const RESTS: Duration = Duration::from_millis(50);
/// Heartbeat timeouts until a backup that lives and acknowledges no checkpoint counts as lost: meanwhile the packets of the
/// guest wait.
const SLOW_BACKUP: u32 = 4;
/// Checkpoints that wait for the connection.
const QUEUED: usize = 2;

/// The checkpoints of a session. Dropping them ends the session's part, not the hold on packets: see [`stop_holding`].
#[derive(Debug)]
pub(in crate::protect) struct Sending {
    figures: Arc<Figures>,
    per_second: u32,
    /// Closed to end the task between two checkpoints.
    _ends: watch::Sender<()>,
    task: JoinHandle<()>,
}

impl Sending {
    /// Starts the checkpoints of a session whose disks follow. Failure is told as [`Input::CheckpointsEnded`]. `after` is
    /// the end of an earlier session, which may still hold packets back.
    pub(in crate::protect) fn start(
        vms: &Arc<Vms>,
        vm: &Arc<Vm>,
        entry: &ProtectionEntry,
        per_second: u32,
        (number, inputs): (u64, mpsc::Sender<Input>),
        after: Option<JoinHandle<()>>,
    ) -> Self {
        let figures = Arc::new(Figures::default());
        let (ends, ended) = watch::channel(());
        let timeout = Duration::from_millis(entry.timeout_ms);
        let (vms, vm, entry) = (Arc::clone(vms), Arc::clone(vm), entry.clone());
        let seen = Arc::clone(&figures);
        let task = godwit_context::spawn(async move {
            if let Some(after) = after {
                // A panic of the earlier task was logged.
                let _ = after.await;
            }
            let run = async {
                let connected = connect(&vms, &vm, &entry).await;
                let (connection, bytes) = connected.map_err(|error| error.message)?;
                let interval = Duration::from_secs(1) / per_second;
                let timing = Timing {
                    interval,
                    timeout,
                    max_bandwidth: entry.max_bandwidth,
                };
                run(&vms, &vm, bytes, connection, timing, &seen, ended).await
            };
            if let Err(why) = run.await {
                let _ = inputs.send(Input::CheckpointsEnded(number, why)).await;
            }
        });
        Self {
            figures,
            per_second,
            _ends: ends,
            task,
        }
    }

    /// Returns the figures for users.
    pub(in crate::protect) fn figures(&self) -> CheckpointFigures {
        self.figures.view(self.per_second)
    }

    /// Ends the session's part after the checkpoint under way. Returns the task, which ends with it.
    pub(in crate::protect) fn end(self) -> JoinHandle<()> {
        self.task
    }
}

/// Lets all packets leave once the session's task has ended: the machine depends on no backup any more. Returns the task.
pub(in crate::protect) fn stop_holding(
    vm: &Arc<Vm>,
    sending: Option<JoinHandle<()>>,
) -> JoinHandle<()> {
    let (name, nics, cards) = {
        let inner = vm.lock();
        let cards = inner
            .qemu
            .as_ref()
            .map(|qemu| held_cards(&inner.entry.machine, qemu));
        (vm.name.clone(), inner.nics.clone(), cards)
    };
    godwit_context::spawn(async move {
        if let Some(sending) = sending {
            let _ = sending.await;
        }
        for nic in nics {
            // A NIC that has ended holds nothing.
            let _ = nic.ask(|device, reply| device.stop_holding(reply)).await;
        }
        if let Some(Ok(cards)) = cards
            && let Err(error) = cards.stop().await
        {
            tracing::warn!(vm = name, %error, "QEMU still holds the packets of its own network card back");
        }
    })
}

#[derive(Clone, Copy)]
struct Timing {
    interval: Duration,
    timeout: Duration,
    max_bandwidth: Option<u64>,
}

async fn connect(
    vms: &Arc<Vms>,
    vm: &Arc<Vm>,
    entry: &ProtectionEntry,
) -> Result<(PeerConnection, u64), ErrorBody> {
    let facts = session::facts(vm, entry).await?;
    let opening = super::super::messages::Opening::Checkpoints;
    let connection = session::open(vms, &vm.name, entry, opening).await?;
    Ok((connection, facts.memory_bytes))
}

async fn run(
    vms: &Arc<Vms>,
    vm: &Arc<Vm>,
    bytes: u64,
    connection: PeerConnection,
    timing: Timing,
    figures: &Figures,
    ended: watch::Receiver<()>,
) -> Result<(), String> {
    let capture = Capture::begin(vms, vm, bytes).await?;
    let (reader, writer) = tokio::io::split(connection);
    let (acknowledged, acknowledgements) = mpsc::channel(4);
    let (records, queue) = mpsc::channel(QUEUED);
    let reading = godwit_context::spawn(read(reader, acknowledged));
    let writing = godwit_context::spawn(write(writer, queue));
    let mut epochs = Epochs {
        capture,
        records,
        acknowledgements,
        timing,
        figures,
        ended,
    };
    let done = epochs.run().await;
    let Epochs {
        capture, records, ..
    } = epochs;
    drop(records);
    capture.end().await;
    reading.abort();
    writing.abort();
    done
}

struct Epochs<'a> {
    capture: Capture,
    records: mpsc::Sender<Vec<u8>>,
    acknowledgements: mpsc::Receiver<Checkpoint>,
    timing: Timing,
    figures: &'a Figures,
    ended: watch::Receiver<()>,
}

/// An event between two checkpoints.
enum Happened {
    Due,
    Acknowledged(Option<Checkpoint>),
    /// The session has ended.
    Ended,
    QemuEnded,
}

impl Epochs<'_> {
    async fn run(&mut self) -> Result<(), String> {
        if !self.copy_all().await? {
            return Ok(());
        }
        // Before the first stop: no packet of a later epoch may leave before its checkpoint.
        self.capture.hold_packets().await?;
        let began = Instant::now();
        let mut checkpoints = Checkpoints::new(self.timing.interval, began.elapsed());
        loop {
            let now = began.elapsed();
            let patience = SLOW_BACKUP * self.timing.timeout;
            if checkpoints.oldest(now).is_some_and(|age| age > patience) {
                return Err(String::from(
                    "the backup acknowledges no checkpoint any more",
                ));
            }
            let wait = match checkpoints.step(now) {
                Step::Capture(_) if self.capture.guest_runs() => Duration::ZERO,
                Step::Capture(_) => RESTS,
                Step::Wait(wait) => wait,
                Step::AwaitAcknowledgement => RESTS,
            };
            let is_due = wait.is_zero();
            let happened = tokio::select! {
                biased;
                _ = self.ended.changed() => Happened::Ended,
                // A guest without a QEMU does not run, so no capture would notice.
                () = self.capture.ended() => Happened::QemuEnded,
                number = self.acknowledgements.recv() => Happened::Acknowledged(number),
                () = tokio::time::sleep(wait) => Happened::Due,
            };
            match happened {
                Happened::Ended => return Ok(()),
                Happened::QemuEnded => return Err(String::from("its QEMU has ended")),
                Happened::Acknowledged(Some(number)) => {
                    if let Some(acknowledged) = checkpoints.acknowledged(number, began.elapsed()) {
                        self.capture.release(acknowledged.release).await?;
                        self.figures.acknowledged(acknowledged);
                    }
                }
                Happened::Acknowledged(None) => {
                    return Err(String::from("the connection for checkpoints was lost"));
                }
                Happened::Due if is_due => {
                    let number = checkpoints.captured(began.elapsed());
                    let Captured {
                        records,
                        pages,
                        pause,
                    } = self.capture.checkpoint(number).await?;
                    self.figures
                        .captured(number, pause, pages, records.len() as u64);
                    self.send(records).await?;
                }
                Happened::Due => {}
            }
        }
    }

    async fn send(&self, records: Vec<u8>) -> Result<(), String> {
        let sent = self.records.send(records).await;
        sent.map_err(|_| String::from("the connection for checkpoints was lost"))
    }

    /// Copies the memory while the guest runs, until few pages are left. Returns false if the session ended meanwhile.
    async fn copy_all(&mut self) -> Result<bool, String> {
        for pass in 0..MOST_PASSES {
            let pages = match pass {
                0 => self.capture.all().await?,
                _ => self.capture.scan().await?,
            };
            for piece in pieces(&pages) {
                if self.ended.has_changed().is_err() {
                    return Ok(false);
                }
                let begun = Instant::now();
                let bytes = piece.count() * PAGE_BYTES;
                let records = self.capture.copy(piece).await?;
                self.send(records).await?;
                if let Some(limit) = self.timing.max_bandwidth.filter(|limit| *limit > 0) {
                    let lasts = Duration::from_secs_f64(bytes as f64 / limit as f64);
                    tokio::time::sleep_until(begun + lasts).await;
                }
            }
            if pages.count() * PAGE_BYTES <= FEW_BYTES {
                break;
            }
        }
        Ok(true)
    }
}

/// Divides pages into pieces of [`PIECE_PAGES`].
fn pieces(pages: &Pages) -> Vec<Pages> {
    let mut pieces = Vec::new();
    let mut piece = Pages::default();
    for run in pages.runs() {
        let mut at = 0;
        while at < run.pages {
            let room = PIECE_PAGES - piece.count();
            let taken = room.min(run.pages - at);
            piece.push(PageRun {
                first: run.first + at,
                pages: taken,
            });
            at += taken;
            if piece.count() == PIECE_PAGES {
                pieces.push(std::mem::take(&mut piece));
            }
        }
    }
    if !piece.is_empty() {
        pieces.push(piece);
    }
    pieces
}

async fn read(mut reader: ReadHalf<PeerConnection>, acknowledged: mpsc::Sender<Checkpoint>) {
    while let Ok(number) = reader.read_u64_le().await {
        if acknowledged.send(Checkpoint(number)).await.is_err() {
            return;
        }
    }
}

async fn write(mut writer: WriteHalf<PeerConnection>, mut queue: mpsc::Receiver<Vec<u8>>) {
    while let Some(records) = queue.recv().await {
        if writer.write_all(&records).await.is_err() || writer.flush().await.is_err() {
            return;
        }
    }
    // The other side may be gone already.
    let _ = writer.shutdown().await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_have_all_pages_once() {
        let mut pages = Pages::default();
        for (first, count) in [(0, 3), (10, 2 * PIECE_PAGES), (10_000, 1)] {
            pages.push(PageRun {
                first,
                pages: count,
            });
        }
        let pieces = pieces(&pages);
        let counts: Vec<u64> = pieces.iter().map(Pages::count).collect();
        assert_eq!(counts, [PIECE_PAGES, PIECE_PAGES, 4]);
        let all = pieces
            .iter()
            .fold(Pages::default(), |all, piece| all.union(piece));
        assert_eq!(all, pages);
    }
}
