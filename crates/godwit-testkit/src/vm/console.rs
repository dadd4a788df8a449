//! The guest's serial console: reports from the guest, and commands to it.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::stream::{Finished, Heard, Lines, Report};
use super::windows::Windows;
use crate::process::wait_for;

/// Time between two looks for the end of a thread or for a condition.
const TURN: Duration = Duration::from_millis(50);
/// Time until a command without an answer is sent again: the line may have moved meanwhile.
const REPEAT: Duration = Duration::from_secs(2);
/// Connections of one guest at most, one for each of its machines.
const STREAMS: usize = 64;

/// The console of one guest, wherever the machine is. All connections form one conversation, and commands go to the
/// connection where the guest was heard last.
#[derive(Debug)]
pub struct GuestConsole {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    marks: AtomicU64,
}

#[derive(Debug, Default)]
struct Shared {
    heard: Mutex<Heard>,
    news: Condvar,
    streams: Mutex<Streams>,
    stop: AtomicBool,
}

#[derive(Debug, Default)]
struct Streams {
    all: Vec<UnixStream>,
    /// Connection where the guest was heard last.
    active: usize,
}

impl GuestConsole {
    /// Creates a console without a connection yet.
    #[expect(clippy::new_without_default, reason = "it is not a value")]
    pub fn new() -> Self {
        Self {
            shared: Arc::default(),
            threads: Mutex::default(),
            marks: AtomicU64::new(0),
        }
    }

    /// Listens at a unix socket for QEMU to connect ([`ConsoleSocket::Connect`](super::ConsoleSocket::Connect)).
    pub fn listen(&self, path: &Path) -> io::Result<()> {
        let listener = UnixListener::bind(path)?;
        listener.set_nonblocking(true)?;
        let shared = Arc::clone(&self.shared);
        self.run(move || {
            while !shared.stop.load(Relaxed) {
                match listener.accept() {
                    Ok((stream, _)) => {
                        let shared = Arc::clone(&shared);
                        thread::spawn(move || shared.read(stream));
                    }
                    Err(_) => thread::sleep(TURN),
                }
            }
        });
        Ok(())
    }

    /// Connects to a console at which QEMU listens ([`ConsoleSocket::Listen`](super::ConsoleSocket::Listen)), as soon
    /// as QEMU does. Earlier output of the machine is lost: attach before the machine runs.
    pub fn attach(&self, path: &Path, timeout: Duration) -> io::Result<()> {
        let stream = wait_for(timeout, || UnixStream::connect(path).ok()).ok_or_else(|| {
            io::Error::other(format!("no machine's console at {}", path.display()))
        })?;
        let shared = Arc::clone(&self.shared);
        self.run(move || shared.read(stream));
        Ok(())
    }

    fn run(&self, body: impl FnOnce() + Send + 'static) {
        lock(&self.threads).push(thread::spawn(body));
    }

    /// Waits until the guest has booted, mounted the disks and begins the load.
    pub fn started(&self, timeout: Duration) -> io::Result<()> {
        self.wait("begin its load", timeout, |heard| {
            (!heard.boots.is_empty()).then_some(())
        })
    }

    pub fn report(&self) -> Option<Report> {
        lock(&self.shared.heard).report.clone()
    }

    /// Waits for a report that satisfies `fits`.
    pub fn report_when(
        &self,
        timeout: Duration,
        mut fits: impl FnMut(&Report) -> bool,
    ) -> io::Result<Report> {
        self.wait("give the report that was waited for", timeout, |heard| {
            heard.report.clone().filter(|report| fits(report))
        })
    }

    /// Waits until the guest has made this many writes more than the last report says.
    pub fn progress(&self, writes: u64, timeout: Duration) -> io::Result<Report> {
        let before = self.report().map_or(0, |report| report.writes);
        self.report_when(timeout, |report| report.writes >= before + writes)
    }

    /// Forgets all gaps so far, the guest's and the host's.
    pub fn mark(&self, timeout: Duration) -> io::Result<()> {
        let id = self.marks.fetch_add(1, Relaxed) + 1;
        self.command(&format!("mark {id}\n"), timeout, |heard| {
            (heard.marked == id).then_some(())
        })
    }

    pub fn fresh_report(&self, timeout: Duration) -> io::Result<Report> {
        let before = self.report().map_or(0, |report| report.seq);
        self.command("report\n", timeout, |heard| {
            heard.report.clone().filter(|report| report.seq > before)
        })
    }

    /// Ends the load. The guest compares all data with the writes, unmounts the disks, reports the outcome and powers
    /// off.
    pub fn finish(&self, timeout: Duration) -> io::Result<Finished> {
        self.command("finish\n", timeout, |heard| heard.finished)
    }

    /// Has the guest end this boot by `reboot`, `panic` or `power-off`, in the midst of the load. Returns the number of
    /// boots so far.
    pub fn end_boot(&self, how: &str, timeout: Duration) -> io::Result<usize> {
        let boots = lock(&self.shared.heard).boots.clone();
        let boot = boots.last().map_or("", String::as_str);
        self.command(&format!("end {boot} {how}\n"), timeout, |heard| {
            (heard.ending.as_deref() == Some(boot)).then_some(boots.len())
        })
    }

    /// Waits until the guest's load has begun more than `boots` times.
    pub fn booted_again(&self, boots: usize, timeout: Duration) -> io::Result<()> {
        self.wait("boot again", timeout, |heard| {
            (heard.boots.len() > boots).then_some(())
        })
    }

    /// Returns the number of acknowledged writes missing in a later boot, for a guest that
    /// [reboots](super::GuestLoad::reboots).
    pub fn lost_writes(&self) -> u64 {
        lock(&self.shared.heard).lost_writes
    }

    /// Returns for each disk the last write known to the host by a tick.
    pub fn written(&self) -> Vec<u64> {
        lock(&self.shared.heard).arrivals.writes_by_disk()
    }

    /// Returns for each disk the last write found at boot, for a guest that [reboots](super::GuestLoad::reboots).
    pub fn resumed(&self) -> Vec<u64> {
        lock(&self.shared.heard).resumed.clone()
    }

    /// Sends the guest a command for the network card: `channels N`, `xdp driver` or `xdp stack`. Returns the outcome.
    pub fn card(&self, command: &str, timeout: Duration) -> io::Result<String> {
        lock(&self.shared.heard).card = None;
        self.command(&format!("{command}\n"), timeout, |heard| heard.card.clone())
    }

    /// Waits for the end of a load after a press of the machine's power button.
    pub fn finished(&self, timeout: Duration) -> io::Result<Finished> {
        self.wait("finish", timeout, |heard| heard.finished)
    }

    /// Returns the largest time between two completed writes of a disk since the last mark, by the host's clock. Stops
    /// of the machine and an open gap are included.
    pub fn host_gap(&self) -> Duration {
        lock(&self.shared.heard).arrivals.largest(Instant::now())
    }

    /// Returns the largest time between two beats of the guest since the last mark, by the host's clock. The guest's
    /// processors did not run, or did not get to the beat, for so long.
    pub fn beat_gap(&self) -> Duration {
        lock(&self.shared.heard).beats.largest(Instant::now())
    }

    /// Returns the writes of 4 KiB on all disks known to the host by ticks, and the time of the last tick; `None`
    /// before the first.
    pub fn writes(&self) -> Option<(u64, Instant)> {
        lock(&self.shared.heard).arrivals.writes()
    }

    /// Returns the windows reported so far by the guest's loads on memory.
    pub fn windows(&self) -> Windows {
        lock(&self.shared.heard).windows.clone()
    }

    /// Returns the number of reports that came a second time, or after later ones. A guest that runs once numbers each
    /// report anew, wherever it moves.
    pub fn repeated(&self) -> u64 {
        lock(&self.shared.heard).repeated
    }

    /// Returns the guest's output besides reports: errors, mismatches, kernel messages.
    pub fn log(&self) -> Vec<String> {
        lock(&self.shared.heard).log.clone()
    }

    /// Sends a command, repeatedly until there is an answer.
    fn command<T>(
        &self,
        line: &str,
        timeout: Duration,
        mut answer: impl FnMut(&Heard) -> Option<T>,
    ) -> io::Result<T> {
        let deadline = Instant::now() + timeout;
        loop {
            self.shared.send(line);
            let left = deadline.saturating_duration_since(Instant::now());
            let outcome = self.wait(
                &format!("obey '{}' within {timeout:?}", line.trim()),
                left.min(REPEAT),
                &mut answer,
            );
            if outcome.is_ok() || left <= REPEAT || self.gave_up() {
                return outcome;
            }
        }
    }

    fn gave_up(&self) -> bool {
        lock(&self.shared.heard).fatal.is_some()
    }

    fn wait<T>(
        &self,
        what: &str,
        timeout: Duration,
        mut answer: impl FnMut(&Heard) -> Option<T>,
    ) -> io::Result<T> {
        let deadline = Instant::now() + timeout;
        let mut heard = lock(&self.shared.heard);
        loop {
            if let Some(answer) = answer(&heard) {
                return Ok(answer);
            }
            let late = Instant::now() >= deadline;
            if late || heard.fatal.is_some() {
                let why = heard.fatal.as_deref().unwrap_or("it did not in time");
                return Err(io::Error::other(format!(
                    "the guest could not {what}: {why}; last report {:?}; it said: {:#?}",
                    heard.report, heard.log
                )));
            }
            heard = self
                .shared
                .news
                .wait_timeout(heard, TURN)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

impl Drop for GuestConsole {
    fn drop(&mut self) {
        self.shared.stop.store(true, Relaxed);
        for thread in lock(&self.threads).drain(..) {
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Reads one connection to the end.
    fn read(&self, mut stream: UnixStream) {
        let Some(place) = self.add(&stream) else {
            return;
        };
        let mut lines = Lines::default();
        let mut buffer = [0; 4096];
        while !self.stop.load(Relaxed) {
            match stream.read(&mut buffer) {
                Ok(0) => return,
                Ok(bytes) => {
                    let at = Instant::now();
                    lock(&self.streams).active = place;
                    lines.take(&buffer[..bytes], at, &mut lock(&self.heard));
                    self.news.notify_all();
                }
                Err(error) if is_timeout(&error) => {}
                Err(_) => return,
            }
        }
    }

    fn add(&self, stream: &UnixStream) -> Option<usize> {
        stream.set_read_timeout(Some(TURN)).ok()?;
        stream.set_write_timeout(Some(REPEAT)).ok()?;
        let twin = stream.try_clone().ok()?;
        let mut streams = lock(&self.streams);
        if streams.all.len() >= STREAMS {
            return None;
        }
        streams.all.push(twin);
        Some(streams.all.len() - 1)
    }

    /// Sends a line to the connection where the guest was heard last. The waiting caller repeats a lost line, so errors
    /// are not reported.
    fn send(&self, line: &str) {
        let streams = lock(&self.streams);
        if let Some(mut stream) = streams.all.get(streams.active) {
            let _ = stream.write_all(line.as_bytes());
        }
    }
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted
    )
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
