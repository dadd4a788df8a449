//! The thread in the application's process.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Once;
use std::time::Duration;

use super::{Answer, MAX_LINE, Request, address};

/// A client that says nothing for this long is hung up on.
const PATIENCE: Duration = Duration::from_secs(5);

/// Starts the thread, once in a process. It sleeps until somebody asks.
pub fn start() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let listener =
            match address(std::process::id()).and_then(|name| UnixListener::bind_addr(&name)) {
                Ok(listener) => listener,
                Err(error) => {
                    eprintln!(
                        "godwit-verbs: this process cannot be moved: its control socket: {error}"
                    );
                    return;
                }
            };
        // The application's signals are for its own threads; a thread inherits its maker's mask.
        let spawned = with_signals_blocked(|| {
            std::thread::Builder::new()
                .name("godwit-verbs".to_owned())
                .spawn(move || serve(&listener))
        });
        if let Err(error) = spawned {
            eprintln!("godwit-verbs: this process cannot be moved: its control thread: {error}");
        }
    });
}

fn with_signals_blocked<T>(act: impl FnOnce() -> T) -> T {
    // SAFETY: both sets are initialized by the calls that fill them.
    unsafe {
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        let result = act();
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
        result
    }
}

fn serve(listener: &UnixListener) {
    loop {
        let answered = listener.accept().and_then(|(stream, _)| answer(&stream));
        if let Err(error) = answered
            && matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
        {
            // The application has no descriptor left; it may give some back.
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

fn answer(mut stream: &UnixStream) -> io::Result<()> {
    if !may_ask(stream) {
        return Ok(());
    }
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut line = String::new();
    BufReader::new(stream.take(MAX_LINE)).read_line(&mut line)?;
    let answer = match serde_json::from_str::<Request>(&line) {
        Ok(request) => request.carry_out(),
        Err(error) => Answer::Error(format!("the request cannot be read: {error}")),
    };
    let mut line = serde_json::to_string(&answer)?;
    line.push('\n');
    stream.write_all(line.as_bytes())
}

/// Whether the other end is root or this process's user.
fn may_ask(stream: &UnixStream) -> bool {
    let mut who = libc::ucred {
        pid: 0,
        uid: u32::MAX,
        gid: u32::MAX,
    };
    let mut size = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the option fills a ucred of the size that is given.
    let asked = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut who).cast(),
            &raw mut size,
        )
    };
    // SAFETY: takes and touches nothing.
    let own = unsafe { libc::geteuid() };
    asked == 0 && (who.uid == 0 || who.uid == own)
}
