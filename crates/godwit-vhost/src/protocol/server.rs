//! The thread that accepts the front ends of a device, one after the other.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use vhost::vhost_user::{BackendReqHandler, Error, VhostUserBackendReqHandlerMut as _};

use crate::memory::post_copy;
use crate::protocol::device::Device;
use crate::protocol::handler::{Handler, ask};
use crate::protocol::own::{self, Asked};
use crate::protocol::session::{FrontEndCommand, FrontEndError};

/// Pause after a failure to accept a connection.
const BREATHER: Duration = Duration::from_millis(100);

/// A server of a device's socket, until dropped. After the drop the socket takes no more connections and the attached
/// front end is disconnected. The thread ends once the front end's requests have ended.
#[derive(Debug)]
pub struct VhostUserServer {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    listener: UnixListener,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    ended: bool,
    current: Option<UnixStream>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for VhostUserServer {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        state.ended = true;
        if let Some(socket) = state.current.take() {
            let _ = socket.shutdown(Shutdown::Both);
        }
        // Ends a wait for a connection, too.
        let _ = rustix::net::shutdown(&self.shared.listener, rustix::net::Shutdown::Both);
    }
}

/// Serves `device` to the front ends that connect to `listener`, one at a time. The next front end waits until all
/// requests of the front end before have ended.
///
/// # Errors
/// The kernel refuses a thread.
pub fn serve(listener: UnixListener, device: impl Device) -> io::Result<VhostUserServer> {
    listener.set_nonblocking(false)?;
    let shared = Arc::new(Shared {
        listener,
        state: Mutex::default(),
    });
    // Thread names hold 15 bytes.
    let name = format!("vhost {}", device.name())
        .chars()
        .take(15)
        .collect();
    let serving = Arc::clone(&shared);
    thread::Builder::new()
        .name(name)
        .spawn(move || accept_all(&serving, &device))?;
    Ok(VhostUserServer { shared })
}

fn accept_all(shared: &Shared, device: &impl Device) {
    loop {
        let accepted = shared.listener.accept();
        let mut state = shared.state();
        if state.ended {
            return;
        }
        let socket = match accepted {
            Ok((socket, _)) => socket,
            Err(error) => {
                drop(state);
                tracing::warn!(
                    device = device.name(),
                    "cannot take a virtual machine: {error}"
                );
                thread::sleep(BREATHER);
                continue;
            }
        };
        state.current = socket.try_clone().ok();
        drop(state);
        let ended = match attend(socket, device) {
            Ok(()) => {
                tracing::info!(device = device.name(), "virtual machine left");
                false
            }
            Err(problem) => {
                tracing::warn!(
                    device = device.name(),
                    "virtual machine disconnected: {problem}"
                );
                matches!(problem, Problem::Refused(FrontEndError::Ended))
            }
        };
        // Requests of this front end must end before the next front end comes.
        let _ = ask(device, FrontEndCommand::Detach);
        let mut state = shared.state();
        state.current = None;
        if ended || state.ended {
            return;
        }
    }
}

/// The reason for disconnecting a front end.
#[derive(Debug, thiserror::Error)]
enum Problem {
    /// A step that the device or the front end's memory did not allow.
    #[error(transparent)]
    Refused(#[from] FrontEndError),
    /// A message that makes no sense, or that cannot be received.
    #[error("{0}")]
    Protocol(Error),
    /// The socket failed.
    #[error("cannot use its socket")]
    Socket(#[from] io::Error),
}

fn attend<D: Device>(socket: UnixStream, device: &D) -> Result<(), Problem> {
    let attach = FrontEndCommand::Attach {
        socket: socket.try_clone()?,
    };
    ask(device, attach)?;
    tracing::info!(device = device.name(), "virtual machine attached");
    let handler = Handler::new(device.clone(), socket.try_clone()?);
    let handler = Arc::new(Mutex::new(handler));
    let mut watched = socket.try_clone()?;
    let mut protocol = BackendReqHandler::from_stream(socket, Arc::clone(&handler));
    loop {
        let ends = lock(&handler).memory_ends();
        if let Some(deadline) = ends {
            let silent = post_copy::is_silent_until(&watched, deadline);
            if Instant::now() >= deadline && (silent || !post_copy::has_left(&watched)) {
                lock(&handler).complete_memory();
            }
            if silent {
                continue;
            }
        }
        let takes = lock(&handler).takes();
        if let Some(message) = own::take(&mut watched, takes)? {
            let done = match message.asked {
                Asked::Enable { ring, enabled } => lock(&handler).set_vring_enable(ring, enabled),
                Asked::Announce { mac } => lock(&handler).announce(mac),
                Asked::Unchanged => Ok(()),
            };
            own::answer(&mut watched, message, done.is_ok())?;
            continue;
        }
        match protocol.handle_request() {
            Ok(()) => {}
            Err(Error::Disconnected) => return Ok(()),
            Err(error) => {
                return Err(match lock(&handler).take_problem() {
                    Some(problem) => problem.into(),
                    None => Problem::Protocol(error),
                });
            }
        }
    }
}

fn lock<D>(handler: &Mutex<Handler<D>>) -> MutexGuard<'_, Handler<D>> {
    handler.lock().unwrap_or_else(PoisonError::into_inner)
}
