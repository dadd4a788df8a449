//! Connects the terminal to a VM's serial port.

use std::io::{IsTerminal as _, Write as _};
use std::os::fd::AsFd;

use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;

use crate::failure::Failure;

/// Ctrl-], as in telnet and virsh.
const LEAVE: u8 = 0x1d;

/// Connects standard input and output to the socket until Ctrl-] or until the VM ends.
pub(crate) async fn run(vm: &str, socket: &str) -> Result<(), Failure> {
    let broken = |error: &std::io::Error| {
        Failure::caused(format!("the console of VM '{vm}' at {socket}"), error)
            .hint("does the VM run, and is nobody else connected?")
    };
    let stream = UnixStream::connect(socket)
        .await
        .map_err(|error| broken(&error))?;
    eprintln!("connected to VM '{vm}'; Ctrl-] leaves");
    let raw = RawTerminal::enter();
    let ended = copy(stream).await;
    drop(raw);
    eprintln!();
    ended.map_err(|error| broken(&error))
}

async fn copy(stream: UnixStream) -> std::io::Result<()> {
    let (mut from_guest, mut to_guest) = stream.into_split();
    let output = async {
        let mut buffer = [0; 4096];
        loop {
            match from_guest.read(&mut buffer).await? {
                0 => return Ok(()),
                length => {
                    // A blocked terminal holds the guest's output up, as it should.
                    let mut stdout = std::io::stdout().lock();
                    stdout.write_all(&buffer[..length])?;
                    stdout.flush()?;
                }
            }
        }
    };
    // A read of standard input blocks a thread that cannot be stopped: the thread ends with the process.
    let (keys, mut typed) = tokio::sync::mpsc::channel::<Vec<u8>>(16);
    std::thread::spawn(move || read_keys(&keys));
    let input = async {
        while let Some(mut keys) = typed.recv().await {
            let leave = keys.iter().position(|&key| key == LEAVE);
            keys.truncate(leave.unwrap_or(keys.len()));
            to_guest.write_all(&keys).await?;
            if leave.is_some() {
                return Ok(());
            }
        }
        // Standard input has ended; the guest may still write output.
        std::future::pending().await
    };
    tokio::select! {
        ended = output => ended,
        left = input => left,
    }
}

fn read_keys(keys: &tokio::sync::mpsc::Sender<Vec<u8>>) {
    use std::io::Read as _;
    let mut stdin = std::io::stdin().lock();
    let mut buffer = [0; 1024];
    while let Ok(length @ 1..) = stdin.read(&mut buffer) {
        if keys.blocking_send(buffer[..length].to_vec()).is_err() {
            return;
        }
    }
}

/// A terminal in raw mode; dropping the value restores the previous mode.
struct RawTerminal {
    before: Option<Termios>,
}

impl RawTerminal {
    fn enter() -> Self {
        let stdin = std::io::stdin();
        let before = stdin
            .is_terminal()
            .then(|| tcgetattr(stdin.as_fd()).ok())
            .flatten();
        if let Some(before) = &before {
            let mut raw = before.clone();
            raw.make_raw();
            // Without raw mode, keys arrive a line at a time, which still works.
            let _ = tcsetattr(stdin.as_fd(), OptionalActions::Now, &raw);
        }
        Self { before }
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            let _ = tcsetattr(std::io::stdin().as_fd(), OptionalActions::Now, before);
        }
    }
}
