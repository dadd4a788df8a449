//! The backup's part of a session: gathers checkpoints, and applies whole ones.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use godwit_context::{blocking, failpoint};
use godwit_disks::disks::disk::Disk;
use godwit_disks::disks::following;
use godwit_peers::PeerConnection;
use godwit_protect::checkpoints::{Checkpoint, Gathering};
use tokio::io::{AsyncWriteExt, BufReader, ReadHalf, WriteHalf};
use tokio::sync::{mpsc, oneshot};

use super::super::Input;
use super::memory::GuestMemory;
use super::records::{self, Record};

/// Records that wait to be gathered.
const QUEUED: usize = 64;
/// Bytes read from the connection at once.
const BUFFER: usize = 1 << 20;
/// Most checkpoints that have come and are not whole. A primary sends no more.
const MOST_OPEN: usize = 4;

/// A mark of a disk: all of its writes up to a checkpoint have come.
#[derive(Debug)]
pub(in crate::protect) struct Mark {
    pub(in crate::protect) disk: String,
    pub(in crate::protect) migration: String,
    pub(in crate::protect) number: u64,
}

/// The last whole checkpoint, whose memory and disks are in place.
#[derive(Debug)]
pub(in crate::protect) struct Image {
    pub(in crate::protect) number: Checkpoint,
    /// The state of processors and devices, as QEMU saved it.
    pub(in crate::protect) state: Vec<u8>,
}

/// The task that receives checkpoints.
#[derive(Debug)]
pub(in crate::protect) struct Receiving {
    finish: Option<oneshot::Sender<oneshot::Sender<Option<Image>>>>,
}

impl Receiving {
    /// Starts to receive. The first whole checkpoint is told as [`Input::FirstCheckpoint`], failure as
    /// [`Input::CheckpointsEnded`], both with the session's number.
    pub(in crate::protect) fn start(
        connection: PeerConnection,
        memory: Arc<GuestMemory>,
        disks: Vec<(Arc<Disk>, String)>,
        marks: mpsc::Receiver<Mark>,
        (number, inputs): (u64, mpsc::Sender<Input>),
    ) -> Self {
        let (finish, finished) = oneshot::channel();
        let (reader, writer) = tokio::io::split(connection);
        let (arrived, arrivals) = mpsc::channel(QUEUED);
        let reading = godwit_context::spawn(read(reader, arrived));
        let gathering = Gathering::new(disks.len());
        let session = (number, inputs.clone());
        let gatherer = Gatherer {
            writer,
            memory,
            disks,
            gathering,
            open: VecDeque::new(),
            coming: Coming::default(),
            bytes: 0,
            image: None,
            session,
        };
        godwit_context::spawn(async move {
            if let Err(why) = gatherer.run(arrivals, marks, finished).await {
                let _ = inputs.send(Input::CheckpointsEnded(number, why)).await;
            }
            reading.abort();
        });
        Self {
            finish: Some(finish),
        }
    }

    /// Takes no further part of a checkpoint. Returns the last whole one; `None` if there is none, or its memory is not in
    /// place.
    pub(in crate::protect) async fn finish(mut self) -> Option<Image> {
        let (reply, answer) = oneshot::channel();
        self.finish.take()?.send(reply).ok()?;
        answer.await.ok()?
    }
}

async fn read(reader: ReadHalf<PeerConnection>, arrived: mpsc::Sender<io::Result<Record>>) {
    let mut reader = BufReader::with_capacity(BUFFER, reader);
    loop {
        let record = records::read(&mut reader).await;
        let last = record.is_err();
        if arrived.send(record).await.is_err() || last {
            return;
        }
    }
}

/// The memory and the state of a checkpoint, as far as they have come.
#[derive(Debug, Default)]
struct Coming {
    pages: Vec<Record>,
    state: Option<Vec<u8>>,
}

struct Gatherer {
    writer: WriteHalf<PeerConnection>,
    memory: Arc<GuestMemory>,
    /// The disks and the migrations by which they follow.
    disks: Vec<(Arc<Disk>, String)>,
    gathering: Gathering,
    /// The checkpoints whose memory has come and that are not whole, in order.
    open: VecDeque<(Checkpoint, Coming)>,
    coming: Coming,
    /// Bytes of pages that wait to be applied, of all checkpoints.
    bytes: u64,
    image: Option<Image>,
    session: (u64, mpsc::Sender<Input>),
}

impl Gatherer {
    async fn run(
        mut self,
        mut arrivals: mpsc::Receiver<io::Result<Record>>,
        mut marks: mpsc::Receiver<Mark>,
        mut finished: oneshot::Receiver<oneshot::Sender<Option<Image>>>,
    ) -> Result<(), String> {
        let mut is_connected = true;
        loop {
            tokio::select! {
                biased;
                reply = &mut finished => {
                    if let Ok(reply) = reply {
                        let _ = reply.send(self.image);
                    }
                    return Ok(());
                }
                Some(mark) = marks.recv() => self.marked(&mark).await?,
                record = arrivals.recv(), if is_connected => match record {
                    Some(Ok(record)) => self.take(record).await?,
                    // The control connection tells who is lost, and a whole checkpoint stays of use.
                    Some(Err(_)) | None => is_connected = false,
                },
            }
        }
    }

    async fn take(&mut self, record: Record) -> Result<(), String> {
        match record {
            Record::State(state) => self.coming.state = Some(state),
            Record::End(number) => {
                let coming = std::mem::take(&mut self.coming);
                if coming.state.is_none() {
                    return Err(format!("checkpoint {number} has no state of its devices"));
                }
                if self.open.len() == MOST_OPEN {
                    return Err(String::from("too many checkpoints are under way"));
                }
                self.open.push_back((number, coming));
                let whole = self.gathering.memory_came(number);
                self.became_whole(whole.map_err(|error| error.to_string())?)
                    .await?;
            }
            // Nothing depends on the memory before the first checkpoint.
            record if self.gathering.whole().is_none() && self.open.is_empty() => {
                record
                    .apply(&self.memory)
                    .map_err(|error| unwritten(&error))?;
            }
            record => {
                self.bytes += record.bytes();
                // Two checkpoints may be under way.
                if self.bytes > 2 * self.memory.bytes() {
                    return Err(String::from("the checkpoints are larger than the memory"));
                }
                self.coming.pages.push(record);
            }
        }
        Ok(())
    }

    async fn marked(&mut self, mark: &Mark) -> Result<(), String> {
        let is_it = |(disk, migration): &(Arc<Disk>, String)| {
            disk.name == mark.disk && *migration == mark.migration
        };
        let disk = self.disks.iter().position(is_it);
        let Some(disk) = disk else { return Ok(()) };
        let whole = self.gathering.disk_came(disk, Checkpoint(mark.number));
        let whole = whole.map_err(|error| format!("disk {}: {error}", mark.disk))?;
        self.became_whole(whole).await
    }

    /// Applies and acknowledges a checkpoint that became whole, and those before it.
    async fn became_whole(&mut self, whole: Option<Checkpoint>) -> Result<(), String> {
        let Some(whole) = whole else { return Ok(()) };
        failpoint::reach(String::from("checkpoint::whole")).await;
        for (disk, _) in &self.disks {
            if !following::apply_checkpoints(disk, whole.0).await {
                return Err(format!("disk {} does not follow any more", disk.name));
            }
        }
        let mut pages = Vec::new();
        while let Some((number, coming)) = self.open.pop_front_if(|(number, _)| *number <= whole) {
            pages.extend(coming.pages);
            if let Some(state) = coming.state {
                self.image = Some(Image { number, state });
            }
        }
        // A lost primary needs no acknowledgement.
        let _ = self.writer.write_u64_le(whole.0).await;
        let _ = self.writer.flush().await;
        failpoint::reach(String::from("checkpoint::acknowledged")).await;
        self.bytes -= pages.iter().map(Record::bytes).sum::<u64>();
        let memory = Arc::clone(&self.memory);
        let apply = blocking(move || pages.iter().try_for_each(|record| record.apply(&memory)));
        let applied = apply.await.map_err(|error| error.message)?;
        if let Err(error) = applied {
            self.image = None;
            return Err(unwritten(&error));
        }
        if whole == Checkpoint(1) {
            let (number, inputs) = &self.session;
            let _ = inputs.send(Input::FirstCheckpoint(*number)).await;
        }
        Ok(())
    }
}

fn unwritten(error: &io::Error) -> String {
    format!("the memory of the machine cannot be written: {error}")
}
