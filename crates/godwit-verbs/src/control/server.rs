//! The control thread in the application's process.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::panic::catch_unwind;
use std::sync::Once;
use std::time::Duration;

use super::{Answer, MAX_LINE, Request, files, names, other_end};

/// Time limit for a silent client.
const PATIENCE: Duration = Duration::from_secs(5);

/// Starts the thread, once in a process. The thread sleeps until a client connects.
pub fn start() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let address = names::own().and_then(|name| names::address(&name));
        let listener = match address.and_then(|address| UnixListener::bind_addr(&address)) {
            Ok(listener) => listener,
            Err(error) => return complain("socket", &error),
        };
        // The application's signals are for its own threads. A new thread inherits the signal mask.
        let spawned = with_signals_blocked(|| {
            std::thread::Builder::new()
                .name("godwit-verbs".to_owned())
                .spawn(move || serve(&listener))
        });
        if let Err(error) = spawned {
            complain("thread", &error);
        }
    });
}

/// Unlike `eprintln!`, does not panic if the standard error is closed.
fn complain(what: &str, error: &io::Error) {
    let _unheard = writeln!(
        io::stderr(),
        "godwit-verbs: this process cannot be moved: its control {what}: {error}"
    );
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
            // The application is out of descriptors and may close some.
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
        // A panic of this library must not end the application. The mover receives an error.
        Ok(request) => catch_unwind(|| request.carry_out())
            .unwrap_or_else(|_| Answer::Error("the library panicked over this request".to_owned())),
        Err(error) => Answer::Error(format!("the request cannot be read: {error}")),
    };
    let line = line_of(&answer)?;
    let mut bytes = line.as_bytes();
    let gives_all = matches!(&answer, Answer::HandedOver(_));
    if let (Answer::HandedOver(handed), Some((first, others))) = (&answer, bytes.split_first()) {
        files::send(stream, *first, &handed.descriptors)?;
        bytes = others;
    }
    let sent = stream.write_all(bytes);
    if gives_all {
        // A holder has no further work, and the other process has its files.
        std::process::exit(i32::from(sent.is_err()));
    }
    sent
}

/// Returns the line of an answer. An answer that exceeds the mover's limit is replaced by an error.
fn line_of(answer: &Answer) -> io::Result<String> {
    let mut line = serde_json::to_string(answer)?;
    if line.len() as u64 >= MAX_LINE {
        line = serde_json::to_string(&too_long(line.len()))?;
    }
    line.push('\n');
    Ok(line)
}

fn too_long(length: usize) -> Answer {
    Answer::Error(format!(
        "the answer is {length} bytes long, and at most {MAX_LINE} are sent: this process has too many queue pairs or \
         memory regions to be moved"
    ))
}

/// Returns true if the other end is root or this process's user.
fn may_ask(stream: &UnixStream) -> bool {
    // SAFETY: takes and touches nothing.
    let own = unsafe { libc::geteuid() };
    other_end(stream).is_some_and(|who| who.uid == 0 || who.uid == own)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(to: &[u8]) -> String {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(to).unwrap();
        theirs.shutdown(std::net::Shutdown::Write).unwrap();
        answer(&ours).unwrap();
        drop(ours);
        let mut text = String::new();
        theirs.read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn what_is_no_request_is_answered_with_an_error() {
        for request in [&b""[..], b"{}\n", b"{\"do\":\"explode\"}\n", b"[[[[\n"] {
            assert!(said(request).starts_with("{\"error\":\"the request cannot be read"));
        }
    }

    #[test]
    fn an_answer_that_is_too_long_is_replaced_by_why() {
        let frame = line_of(&Answer::Error(String::new())).unwrap().len();
        let text = |line: usize| "x".repeat(line - frame);
        let longest = line_of(&Answer::Error(text(MAX_LINE as usize))).unwrap();
        assert_eq!(longest.len() as u64, MAX_LINE);
        let why = line_of(&Answer::Error(text(MAX_LINE as usize + 1))).unwrap();
        assert!(why.contains("too many queue pairs"), "{} bytes", why.len());
        assert!(why.ends_with("}\n"));
    }

    #[test]
    fn steps_out_of_order_are_refused() {
        assert!(said(b"{\"do\":\"release\"}\n").contains("not suspended"));
        assert!(said(b"{\"do\":\"recreate\",\"device\":null}\n").contains("has its objects"));
        assert!(said(b"{\"do\":\"suspend\",\"only\":[7]}\n").contains("no queue pair 7"));
        assert!(
            said(b"{\"do\":\"drain\",\"peer_sent\":[[7,0]],\"bound_ms\":1}\n")
                .contains("queue pair 7 is not suspended")
        );
        let connect = b"{\"do\":\"connect\",\"connections\":[{\"number\":7,\"remote\":\"::1\",\"remote_physical\":1,\"remote_keys\":null}]}\n";
        assert!(said(connect).contains("no queue pair 7"));
    }
}
