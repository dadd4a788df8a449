//! An engine with an image of its own, an NBD client, and connections between two engines.

use std::collections::{BTreeMap, HashMap};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{OnceLock, mpsc};
use std::time::{Duration, Instant};

use godwit_block::engine::{
    ClientStream, EngineConfig, EngineEvent, EngineHandle, PeerStream, PeerStreams, Reply,
    Snapshot, spawn,
};
use godwit_block::image::Image;
use godwit_block::nbd::RequestHeader;
use godwit_core::authority::{AuthorityRecord, Ownership};
use godwit_core::event::Event;
use godwit_core::units::{Bytes, Epoch, MigrationId};
use godwit_core::{GovernorParts, MigrationOptions};

pub(crate) const READ: u16 = 0;
pub(crate) const WRITE: u16 = 1;
pub(crate) const DISCONNECT: u16 = 2;
pub(crate) const FLUSH: u16 = 3;
pub(crate) const TRIM: u16 = 4;
pub(crate) const WRITE_ZEROES: u16 = 6;
pub(crate) const BLOCK_STATUS: u16 = 7;
pub(crate) const FUA: u16 = 1;
pub(crate) const NO_HOLE: u16 = 2;

pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// An engine whose records are "stored" at once, and its events.
pub(crate) struct TestEngine {
    pub(crate) handle: EngineHandle,
    pub(crate) events: mpsc::Receiver<EngineEvent>,
    directory: tempfile::TempDir,
}

impl TestEngine {
    /// Starts an engine over a new image of `size` bytes.
    pub(crate) fn new(name: &str, size: u64, record: AuthorityRecord) -> Self {
        Self::with_config(EngineConfig::new(name.to_owned()), size, record)
    }

    pub(crate) fn with_config(config: EngineConfig, size: u64, record: AuthorityRecord) -> Self {
        // Not in /tmp, where O_DIRECT may be missing.
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
        Self::with_image(config, directory, size, record, |image| image, |_| true)
    }

    /// Starts an engine over a new image below `directory`, after `change` has changed the image. `observe` sees every
    /// event first, and returns true if a record is stored at once.
    pub(crate) fn with_image(
        config: EngineConfig,
        directory: &Path,
        size: u64,
        record: AuthorityRecord,
        change: impl FnOnce(Image) -> Image,
        observe: impl Fn(&EngineEvent) -> bool + Send + 'static,
    ) -> Self {
        let directory = tempfile::tempdir_in(directory).expect("a directory");
        let image = Image::create(&directory.path().join("disk"), Bytes(size)).expect("an image");
        let (sender, events) = mpsc::channel();
        let own: &'static OnceLock<EngineHandle> = Box::leak(Box::new(OnceLock::new()));
        let callback = move |event| {
            let stores = observe(&event);
            match (&event, own.get()) {
                (EngineEvent::Persist(_), Some(handle)) if stores => handle.persisted(),
                (EngineEvent::StoreActivity(_), Some(handle)) => handle.activity_stored(true),
                (EngineEvent::Core(Event::SharingChanged { .. }), Some(handle)) => {
                    handle.sharing_stored();
                }
                _ => {}
            }
            let _ = sender.send(event);
        };
        let handle = spawn(config, change(image), record, Box::new(callback)).expect("an engine");
        own.set(handle.clone()).expect("set once");
        Self {
            handle,
            events,
            directory,
        }
    }

    /// Wraps a running engine with its image in this directory.
    pub(crate) fn of(
        handle: EngineHandle,
        events: mpsc::Receiver<EngineEvent>,
        directory: tempfile::TempDir,
    ) -> Self {
        Self {
            handle,
            events,
            directory,
        }
    }

    pub(crate) fn attach(&self, structured: bool) -> Client {
        let (ours, theirs) = UnixStream::pair().expect("sockets");
        self.attach_socket(theirs.into(), structured);
        Client::new(Box::new(ours), structured)
    }

    pub(crate) fn attach_socket(&self, socket: OwnedFd, structured_replies: bool) {
        self.handle.attach(ClientStream {
            socket,
            tls: None,
            received: Vec::new(),
            structured_replies,
            base_allocation: structured_replies,
            address: "test".to_owned(),
            place: None,
        });
    }

    /// Waits for an event that `wanted` accepts.
    pub(crate) fn wait_for(&self, wanted: impl Fn(&EngineEvent) -> bool) -> EngineEvent {
        let deadline = Instant::now() + PATIENCE;
        let mut seen = Vec::new();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.events.recv_timeout(left) {
                Ok(event) if wanted(&event) => return event,
                Ok(event) => seen.push(event),
                Err(_) => panic!("the event did not come; these did: {seen:?}"),
            }
        }
    }

    pub(crate) fn wait_for_core(&self, wanted: impl Fn(&Event) -> bool) -> Event {
        match self.wait_for(|event| matches!(event, EngineEvent::Core(event) if wanted(event))) {
            EngineEvent::Core(event) => event,
            other => panic!("{other:?} is not the controller's"),
        }
    }

    /// Waits for a state that `wanted` accepts.
    pub(crate) fn wait_until(&self, wanted: impl Fn(&Snapshot) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !wanted(&self.handle.snapshot()) {
            assert!(
                Instant::now() < deadline,
                "stayed at {:?}",
                self.handle.snapshot()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Ends the engine and starts another over the same image.
    pub(crate) fn restart(self, record: AuthorityRecord) -> Self {
        self.handle.shutdown();
        self.handle.clone().join().expect("a clean end");
        let image = Image::open(&self.image_path()).expect("the image");
        let config = EngineConfig::new("again".to_owned());
        let (sender, events) = mpsc::channel();
        let callback = move |event| {
            let _ = sender.send(event);
        };
        let handle = spawn(config, image, record, Box::new(callback)).expect("an engine");
        Self {
            handle,
            events,
            directory: self.directory,
        }
    }

    /// Ends the engine and returns the image's bytes.
    pub(crate) fn finish(self) -> Vec<u8> {
        self.handle.shutdown();
        self.handle.clone().join().expect("a clean end");
        std::fs::read(self.image_path()).expect("the image")
    }

    pub(crate) fn image_path(&self) -> std::path::PathBuf {
        self.directory.path().join("disk")
    }
}

/// Gives an engine a command, and returns the answer.
pub(crate) fn ask<T: Send + 'static>(command: impl FnOnce(Reply<T>)) -> T {
    let (sender, receiver) = mpsc::channel();
    command(Box::new(move |answer| {
        sender.send(answer).expect("somebody listens");
    }));
    receiver.recv().expect("an answer")
}

/// Returns the record of a node whose disk has moved away.
pub(crate) fn departed() -> AuthorityRecord {
    let migration = MigrationId([7; 16]);
    AuthorityRecord {
        epoch: Epoch(2),
        ownership: Ownership::Departed { migration },
        remainder: None,
    }
}

/// A byte stream to an engine.
pub(crate) trait Connection: Read + Write + Send {}
impl<T: Read + Write + Send> Connection for T {}

/// A synchronous NBD client in the transmission phase.
pub(crate) struct Client {
    stream: Box<dyn Connection>,
    structured: bool,
    next_cookie: u64,
    /// Chunks of incomplete answers, by cookie and offset.
    chunks: HashMap<u64, BTreeMap<u64, Vec<u8>>>,
}

/// An answer: the error number, and a read's data.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) cookie: u64,
    pub(crate) error: u32,
    pub(crate) data: Vec<u8>,
}

impl Client {
    pub(crate) fn new(stream: Box<dyn Connection>, structured: bool) -> Self {
        Self {
            stream,
            structured,
            next_cookie: 1,
            chunks: HashMap::new(),
        }
    }

    /// Sends a request and returns its cookie.
    pub(crate) fn send(
        &mut self,
        kind: u16,
        flags: u16,
        offset: u64,
        length: u32,
        data: &[u8],
    ) -> u64 {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        let header = RequestHeader {
            flags,
            kind,
            cookie,
            offset,
            length,
        };
        let mut bytes = header.encode().to_vec();
        bytes.extend_from_slice(data);
        self.stream.write_all(&bytes).expect("the request to leave");
        cookie
    }

    pub(crate) fn send_raw(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// Receives an answer, possibly in several chunks and in any order. `length` returns the data length of a cookie's
    /// read.
    pub(crate) fn receive(&mut self, length: impl Fn(u64) -> usize) -> Answer {
        loop {
            let magic = u32::from_be_bytes(self.array());
            if magic == 0x6744_6698 {
                let error = u32::from_be_bytes(self.array());
                let cookie = u64::from_be_bytes(self.array());
                let expected = if error == 0 { length(cookie) } else { 0 };
                assert!(
                    !self.structured || expected == 0,
                    "a simple reply to a read"
                );
                let mut data = vec![0; expected];
                self.stream.read_exact(&mut data).expect("data");
                return Answer {
                    cookie,
                    error,
                    data,
                };
            }
            assert_eq!(magic, 0x668e_33ef, "neither reply's magic");
            assert!(
                self.structured,
                "a structured reply that was not negotiated"
            );
            let done = u16::from_be_bytes(self.array()) & 1 != 0;
            let kind = u16::from_be_bytes(self.array());
            let cookie = u64::from_be_bytes(self.array());
            let count = u32::from_be_bytes(self.array()) as usize;
            let mut body = vec![0; count];
            self.stream.read_exact(&mut body).expect("a chunk");
            let error = match kind {
                1 => {
                    let data = body.split_off(8);
                    let offset = u64::from_be_bytes(*body.first_chunk().expect("an offset"));
                    let chunks = self.chunks.entry(cookie).or_default();
                    chunks.insert(offset, data);
                    0
                }
                5 => {
                    self.chunks.entry(cookie).or_default().insert(0, body);
                    0
                }
                0x8001 => u32::from_be_bytes(*body.first_chunk().expect("a number")),
                other => panic!("chunk type {other:#x}"),
            };
            if done {
                let chunks = self.chunks.remove(&cookie).unwrap_or_default();
                let mut data = Vec::new();
                if error == 0 {
                    let first = chunks.first_key_value().map_or(0, |(&offset, _)| offset);
                    for (offset, chunk) in chunks {
                        assert_eq!(offset, first + data.len() as u64, "chunks with gaps");
                        data.extend(chunk);
                    }
                    assert_eq!(data.len(), length(cookie), "the length of a read");
                }
                return Answer {
                    cookie,
                    error,
                    data,
                };
            }
        }
    }

    pub(crate) fn call(
        &mut self,
        kind: u16,
        flags: u16,
        offset: u64,
        length: u32,
        data: &[u8],
    ) -> Answer {
        let cookie = self.send(kind, flags, offset, length, data);
        let expected = if kind == READ { length as usize } else { 0 };
        let answer = self.receive(|_| expected);
        assert_eq!(answer.cookie, cookie);
        answer
    }

    pub(crate) fn write(&mut self, offset: u64, data: &[u8]) {
        let answer = self.call(WRITE, 0, offset, data.len() as u32, data);
        assert_eq!(answer.error, 0, "a write at {offset}");
    }

    pub(crate) fn read(&mut self, offset: u64, length: usize) -> Vec<u8> {
        let answer = self.call(READ, 0, offset, length as u32, &[]);
        assert_eq!(answer.error, 0, "a read at {offset}");
        answer.data
    }

    /// Asks for the allocation of a range, which must have `parts` parts. Returns for each the length, and 3 for a hole
    /// or 0 for data.
    pub(crate) fn allocation(
        &mut self,
        flags: u16,
        (offset, length): (u64, u32),
        parts: usize,
    ) -> Vec<u32> {
        let cookie = self.send(BLOCK_STATUS, flags, offset, length, &[]);
        let answer = self.receive(|_| 4 + 8 * parts);
        assert_eq!((answer.cookie, answer.error), (cookie, 0));
        let (words, _) = answer.data.as_chunks::<4>();
        let words = words.iter().map(|word| u32::from_be_bytes(*word));
        words.skip(1).collect()
    }

    /// Waits for the other side. Returns true if the connection was closed.
    pub(crate) fn is_closed(&mut self) -> bool {
        let mut byte = [0];
        !matches!(self.stream.read(&mut byte), Ok(1))
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes).expect("an answer");
        bytes
    }
}

/// Returns both ends of a TCP connection on loopback.
pub(crate) fn tcp_pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let ours = TcpStream::connect(listener.local_addr().expect("an address")).expect("to connect");
    let (theirs, _) = listener.accept().expect("to accept");
    (ours, theirs)
}

pub(crate) fn plain(socket: TcpStream) -> PeerStream {
    PeerStream { socket, tls: None }
}

/// Returns the connections of a migration from node `a` to node `b`.
pub(crate) fn links(copies: usize) -> (PeerStreams, PeerStreams) {
    let pair = || {
        let (ours, theirs) = tcp_pair();
        (plain(ours), plain(theirs))
    };
    let ((control, control_b), (sync, sync_b)) = (pair(), pair());
    let (copies, copies_b) = (0..copies).map(|_| pair()).unzip();
    (
        PeerStreams {
            peer: "b".to_owned(),
            control,
            sync,
            copies,
            compression: false,
        },
        PeerStreams {
            peer: "a".to_owned(),
            control: control_b,
            sync: sync_b,
            copies: copies_b,
            compression: false,
        },
    )
}

pub(crate) fn options(id: u8) -> MigrationOptions {
    MigrationOptions {
        chunk_sectors: 2048,
        busy_chunk_sectors: 2048,
        window_chunks: 8,
        idle_window_chunks: 8,
        busy_window_chunks: 4,
        verify: true,
        find_holes: true,
        governor: GovernorParts::ALL,
        peer_timeout: Duration::from_secs(60),
        ..MigrationOptions::new(MigrationId([id; 16]))
    }
}

/// A small random number generator with a seed, so that a failure can be repeated.
pub(crate) struct Random(pub u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let x = self.0 ^ (self.0 >> 33);
        x.wrapping_mul(0xff51_afd7_ed55_8ccd) ^ (x >> 29)
    }

    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    pub(crate) fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length.div_ceil(8))
            .flat_map(|_| self.next().to_le_bytes())
            .take(length)
            .collect()
    }
}
