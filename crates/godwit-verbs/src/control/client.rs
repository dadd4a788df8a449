//! The mover's side of the control socket.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::mem::offset_of;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::{Answer, MAX_LINE, Request, files, names, other_end};
use crate::shim::HandedOver;

/// Pause between attempts to connect to a process that does not accept.
const AGAIN: Duration = Duration::from_millis(10);

/// Sends a request to the process `pid`, with the request's own time limit.
///
/// # Errors
/// The process does not use the library, does not answer in time, or ends meanwhile.
pub fn ask(pid: u32, request: &Request) -> io::Result<Answer> {
    ask_within(pid, request, request.patience())
}

/// Sends a request to the process `pid`. The call never takes longer than `bound`.
///
/// # Errors
/// As for [`ask`].
pub fn ask_within(pid: u32, request: &Request, bound: Duration) -> io::Result<Answer> {
    in_time(pid, bound, |until| {
        let mut stream = open(pid, until)?;
        stream.say(request)?;
        Ok(serde_json::from_str(&stream.rest(pid, String::new())?)?)
    })
}

/// Requests all objects of the holder `pid`.
///
/// # Errors
/// Also if the holder refuses, or its answer does not match its files.
pub(super) fn take_over(pid: u32) -> io::Result<HandedOver> {
    let request = Request::HandOver;
    in_time(pid, request.patience(), |until| {
        let mut stream = open(pid, until)?;
        // The holder's objects live in files that the holder opened. Files of another user are not for this process.
        // SAFETY: takes and touches nothing.
        let own = unsafe { libc::geteuid() };
        if other_end(&stream.stream).is_none_or(|who| who.uid != 0 && who.uid != own) {
            return Err(io::Error::other(format!("process {pid} is another user's")));
        }
        stream.say(&request)?;
        stream.stream.set_read_timeout(stream.left()?)?;
        let Some((first, files)) = files::receive(&stream.stream)? else {
            return Err(io::Error::other(format!("process {pid} hung up")));
        };
        let text = stream.rest(pid, char::from(first).to_string())?;
        match serde_json::from_str(&text)? {
            Answer::HandedOver(mut handed) => {
                handed.descriptors = files;
                Ok(handed)
            }
            Answer::Error(error) => Err(io::Error::other(error)),
            _ => Err(io::Error::other("it gave an answer to another question")),
        }
    })
}

/// Runs `asks` with a deadline and turns a timeout into a clear error.
fn in_time<T>(
    pid: u32,
    bound: Duration,
    asks: impl FnOnce(Instant) -> io::Result<T>,
) -> io::Result<T> {
    asks(Instant::now() + bound).map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => io::Error::other(format!(
            "process {pid} gave no answer within {} s; is it stopped?",
            bound.as_secs()
        )),
        _ => error,
    })
}

/// Connects to the process's socket and checks the listener's identity.
fn open(pid: u32, until: Instant) -> io::Result<Until> {
    let other = |named: bool| {
        // The process may have its socket under another name, found by the process's descriptors.
        let found = names::of_process(pid).ok().flatten().filter(|_| named);
        found.map(|name| connect(&name, until))
    };
    let stream = match connect(&names::numbered(pid), until) {
        Ok(stream) if listens(&stream, pid) => Ok(stream),
        Ok(stream) => other(true).unwrap_or(Ok(stream)),
        Err(error) => other(error.kind() == io::ErrorKind::ConnectionRefused).unwrap_or(Err(error)),
    };
    let stream = stream.map_err(|error| {
        let hint = format!(
            "process {pid} does not answer: {error}; was it started with LD_PRELOAD=libgodwit_verbs.so, \
             and has it opened an RDMA device?"
        );
        io::Error::new(error.kind(), hint)
    })?;
    // Any process may listen under this name. A move must not depend on the answers of a stranger.
    if !listens(&stream, pid) {
        return Err(io::Error::other(format!(
            "process {pid} does not answer: its socket's name is used by process {}",
            other_end(&stream).map_or(0, |who| who.pid)
        )));
    }
    Ok(Until { stream, until })
}

/// Returns true if this process listens at the other end, by its number as seen from here.
fn listens(stream: &UnixStream, pid: u32) -> bool {
    let who = other_end(stream).map(|who| who.pid);
    who.is_some() && who == i32::try_from(pid).ok()
}

/// A connection with a deadline for all reads and writes together.
struct Until {
    stream: UnixStream,
    until: Instant,
}

impl Until {
    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.until.saturating_duration_since(Instant::now());
        // A timeout of zero would mean no timeout.
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        Ok(Some(left))
    }

    fn say(&mut self, request: &Request) -> io::Result<()> {
        let mut line = serde_json::to_string(request)?;
        line.push('\n');
        self.write_all(line.as_bytes())
    }

    /// Reads the rest of the answer after `line`.
    fn rest(self, pid: u32, mut line: String) -> io::Result<String> {
        BufReader::new(self.take(MAX_LINE)).read_line(&mut line)?;
        if line.is_empty() {
            return Err(io::Error::other(format!(
                "process {pid} hung up; only root and its own user may ask"
            )));
        }
        if !line.ends_with('\n') {
            return Err(io::Error::other(format!(
                "process {pid} ended its answer in the middle, after {} bytes",
                line.len()
            )));
        }
        Ok(line)
    }
}

impl Read for Until {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        self.stream.read(into)
    }
}

impl Write for Until {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write(from)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// Connects to the socket of this abstract name. Unlike `std`, this does not wait forever if the listener does not
/// accept.
fn connect(name: &str, until: Instant) -> io::Result<UnixStream> {
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: takes and touches nothing but numbers.
    let socket = unsafe { libc::socket(libc::AF_UNIX, kind, 0) };
    if socket < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and has no other owner.
    let stream = unsafe { UnixStream::from_raw_fd(socket) };
    let mut address = libc::sockaddr_un {
        sun_family: libc::AF_UNIX as libc::sa_family_t,
        sun_path: [0; 108],
    };
    // An abstract name follows a zero byte and ends with the address.
    if name.len() >= address.sun_path.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in address.sun_path[1..].iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    let length = offset_of!(libc::sockaddr_un, sun_path) + 1 + name.len();
    loop {
        // SAFETY: the address lives through the call and is longer than the given length: the name fits.
        let connected = unsafe {
            libc::connect(
                stream.as_raw_fd(),
                (&raw const address).cast(),
                length as libc::socklen_t,
            )
        };
        if connected == 0 {
            break;
        }
        let error = io::Error::last_os_error();
        match error.kind() {
            io::ErrorKind::Interrupted => {}
            // The listener's queue is full.
            io::ErrorKind::WouldBlock if Instant::now() < until => std::thread::sleep(AGAIN),
            _ => return Err(error),
        }
    }
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Returns the processes of this host that use the library and have opened a device, by their numbers here. Processes
/// of other network namespaces are not included.
///
/// # Errors
/// The kernel's list of sockets cannot be read.
pub fn processes() -> io::Result<Vec<u32>> {
    let until = Instant::now();
    let mut found: Vec<u32> = names::all()?
        .iter()
        .filter_map(|socket| match socket.number() {
            Some(number) => Some(number),
            // A listener that does not accept now is skipped.
            None => other_end(&connect(&socket.name, until).ok()?)
                .and_then(|who| u32::try_from(who.pid).ok())
                .filter(|pid| *pid > 0),
        })
        .collect();
    found.sort_unstable();
    found.dedup();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    fn listener(name: &str) -> UnixListener {
        UnixListener::bind_addr(&names::address(name).unwrap()).unwrap()
    }

    #[test]
    fn a_process_is_found_under_a_name_without_its_number() {
        let listener = listener("godwit-verbs-x00112233445566aa");
        let pid = std::process::id();
        assert!(processes().unwrap().contains(&pid));
        // The lookup of the owner connected here. It sends no request.
        drop(listener.accept().unwrap());
        let name = names::of_process(pid).unwrap();
        assert_eq!(name.as_deref(), Some("godwit-verbs-x00112233445566aa"));
        assert!(names::of_process(1).ok().flatten().is_none());
    }

    #[test]
    fn another_process_under_the_name_is_not_believed() {
        // No process can have this number; this process listens in its place.
        let pid = 0x7fff_ff00;
        let _listener = listener(&names::numbered(pid));
        let error = ask(pid, &Request::Status).unwrap_err().to_string();
        let own = format!("used by process {}", std::process::id());
        assert!(error.contains(&own), "{error}");
    }

    #[test]
    fn an_answer_that_is_cut_off_is_named() {
        // A single test for all answers under this process's own name, which exists once.
        let pid = std::process::id();
        let listener = listener(&names::numbered(pid));
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            // The request is read first: closing a socket with unread data resets the connection.
            let mut request = String::new();
            BufReader::new(&stream).read_line(&mut request).unwrap();
            stream.write_all(b"\"don").unwrap();
            drop(stream);
            // Then an answer that always continues a little.
            let (mut stream, _) = listener.accept().unwrap();
            while stream.write_all(b" ").is_ok() {
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        let error = ask(pid, &Request::Status).unwrap_err().to_string();
        assert!(error.contains("in the middle, after 4 bytes"), "{error}");
        let began = Instant::now();
        let bound = Duration::from_secs(1);
        let error = ask_within(pid, &Request::Status, bound).unwrap_err();
        assert!(
            error.to_string().contains("no answer within 1 s"),
            "{error}"
        );
        assert!(began.elapsed() < bound * 10);
        server.join().unwrap();
    }

    #[test]
    fn a_process_that_accepts_nobody_keeps_nobody_for_long() {
        let pid = 0x7fff_ff01;
        let listener = listener(&names::numbered(pid));
        // SAFETY: takes and touches nothing but numbers. The call only shortens the queue.
        assert_eq!(unsafe { libc::listen(listener.as_raw_fd(), 1) }, 0);
        let mut waiting = Vec::new();
        // As many connections as fit, and one more.
        let error = loop {
            assert!(waiting.len() < 100, "the queue has no end");
            match connect(
                &names::numbered(pid),
                Instant::now() + Duration::from_millis(100),
            ) {
                Ok(stream) => waiting.push(stream),
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "{error}");
    }
}
