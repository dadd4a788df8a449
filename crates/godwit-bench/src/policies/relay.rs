//! Access over the link to a disk of the right end's node, like a client of a shared file system.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;

use godwit_testkit::network::Link;

/// Bytes passed on at once.
const PIECE: usize = 256 << 10;

/// Accepts one connection at the left end of the link and joins it with a Unix socket of the right end. A node itself
/// accepts no client over a network without TLS. Returns the listening address.
pub(super) fn start(link: &Arc<Link>, socket: PathBuf) -> io::Result<SocketAddr> {
    let link = Arc::clone(link);
    let (sender, listens) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let listener = link
            .right()
            .enter()
            .and_then(|()| TcpListener::bind((link.right().address(), 0)));
        let address = listener.as_ref().map(TcpListener::local_addr);
        let address = match address {
            Ok(address) => address,
            Err(error) => Err(io::Error::other(error.to_string())),
        };
        // The receiver may be gone.
        let _ = sender.send(address);
        listener.and_then(|listener| join(&listener, socket))
    });
    let listens = listens.recv();
    listens.unwrap_or_else(|_| Err(io::Error::other("the relay has ended")))
}

fn join(listener: &TcpListener, socket: PathBuf) -> io::Result<()> {
    let (near, _) = listener.accept()?;
    near.set_nodelay(true)?;
    let far = UnixStream::connect(socket)?;
    let back: (UnixStream, TcpStream) = (far.try_clone()?, near.try_clone()?);
    std::thread::spawn(move || {
        let (mut from, mut to) = back;
        pass_on(&mut from, &mut to).and_then(|()| to.shutdown(Shutdown::Write))
    });
    let (mut from, mut to) = (near, far);
    pass_on(&mut from, &mut to)?;
    to.shutdown(Shutdown::Write)
}

/// Copies until the end of the stream.
fn pass_on(from: &mut impl Read, to: &mut impl Write) -> io::Result<()> {
    let mut piece = vec![0; PIECE];
    loop {
        match from.read(&mut piece)? {
            0 => return Ok(()),
            bytes => to.write_all(&piece[..bytes])?,
        }
    }
}
