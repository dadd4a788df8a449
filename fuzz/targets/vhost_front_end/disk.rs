//! A disk that is served by the real engine and the real vhost-user server.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use godwit_block::engine::BlockDevice;
use godwit_block::engine::{ClientStream, EngineConfig, EngineHandle, spawn};
use godwit_block::image::Image;
use godwit_block::nbd::RequestHeader;
use godwit_core::authority::AuthorityRecord;
use godwit_vhost::{VhostUserServer, serve};
use rustix::fs::{MemfdFlags, memfd_create};

use crate::next::Next;

/// Bytes of the disk.
const SIZE: u64 = 1 << 20;

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(4);

/// How long what a front end has left behind may be held.
const CLEANING: Duration = Duration::from_secs(2);

/// Descriptors and threads more than at first that are not yet a leak: the check's own connection
/// may still be closing.
const SLACK: usize = 8;

pub(crate) struct Disk {
    address: SocketAddr,
    client: UnixStream,
    sector: u64,
    /// What the process holds when nobody is there, once that is known.
    first: Option<[usize; 2]>,
    _engine: EngineHandle,
    _server: VhostUserServer,
}

impl Disk {
    pub(crate) fn new() -> Self {
        // The fuzzer's alarm is no part of a server's life. Threads inherit who takes it.
        set_alarm(libc::SIG_BLOCK);
        let disk = Self::start();
        set_alarm(libc::SIG_UNBLOCK);
        disk
    }

    fn start() -> Self {
        let file = File::from(memfd_create(c"disk", MemfdFlags::CLOEXEC).expect("a file"));
        file.set_len(SIZE).expect("a size");
        let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let image = Image::open(&path).expect("an image");
        let config = EngineConfig::new("disk".into());
        let record = AuthorityRecord::created();
        let engine = spawn(config, image, record, Box::new(|_| {})).expect("an engine");
        let name = format!("godwit-fuzz-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(name).expect("an address");
        let listener = UnixListener::bind_addr(&address).expect("a socket");
        let server = serve(listener, BlockDevice::new(engine.clone()));
        let (client, theirs) = UnixStream::pair().expect("sockets");
        engine.attach(ClientStream {
            socket: theirs.into(),
            tls: None,
            received: Vec::new(),
            structured_replies: false,
            base_allocation: false,
            address: "fuzz".into(),
            place: None,
        });
        client.set_read_timeout(Some(PATIENCE)).expect("a socket");
        Self {
            address,
            client,
            sector: 0,
            first: None,
            _engine: engine,
            _server: server.expect("a server"),
        }
    }

    pub(crate) fn connect(&self) -> UnixStream {
        UnixStream::connect_addr(&self.address).expect("the server takes connections")
    }

    /// Panics when a front end that has left has done harm.
    pub(crate) fn check(&mut self) {
        Next::new(self.connect()).is_served(PATIENCE);
        self.serves();
        self.holds_nothing();
    }

    /// Writes a sector and reads it again.
    fn serves(&mut self) {
        self.sector = (self.sector + 1) % (SIZE / 512);
        let bytes = [self.sector as u8; 512];
        self.request(1, &bytes);
        self.request(0, &[]);
        let mut found = [0; 512];
        self.client.read_exact(&mut found).expect("the disk's data");
        assert_eq!(found, bytes, "the disk has what was written");
    }

    fn request(&mut self, kind: u16, data: &[u8]) {
        let header = RequestHeader {
            flags: 0,
            kind,
            cookie: self.sector,
            offset: self.sector * 512,
            length: 512,
        };
        let mut answer = [0; 16];
        let client = &mut self.client;
        let asked = client.write_all(&[&header.encode()[..], data].concat());
        asked.expect("the disk takes requests");
        client.read_exact(&mut answer).expect("the disk answers");
        assert_eq!(answer[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0], "done");
    }

    /// Nothing is left of front ends, soon: the one of the check may still be leaving.
    fn holds_nothing(&mut self) {
        let deadline = Instant::now() + CLEANING;
        loop {
            let now = [count("/proc/self/fd"), count("/proc/self/task")];
            let [descriptors, threads] = *self.first.get_or_insert(now);
            let many = now[0] > descriptors + SLACK || now[1] > threads + SLACK;
            let maps = fs::read_to_string("/proc/self/maps").expect("the mappings");
            let mapped = maps.contains("memfd:");
            if !many && !mapped {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "of front ends that have left, these are kept: {now:?} descriptors and threads \
                 instead of {descriptors} and {threads}, memory: {mapped}",
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn set_alarm(how: i32) {
    // SAFETY: the set is initialized before it is used, and only this thread's mask changes.
    unsafe {
        let mut signals = std::mem::zeroed();
        libc::sigemptyset(&mut signals);
        libc::sigaddset(&mut signals, libc::SIGALRM);
        libc::pthread_sigmask(how, &signals, std::ptr::null_mut());
    }
}

fn count(directory: &str) -> usize {
    fs::read_dir(directory).expect("a directory").count()
}
