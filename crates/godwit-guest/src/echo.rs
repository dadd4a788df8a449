//! Echo servers on the machine's network.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::thread;

/// Most bytes that are read at once.
const BUFFER: usize = 64 << 10;

/// The multicast group of the datagram server.
const GROUP: Ipv4Addr = Ipv4Addr::new(239, 80, 0, 1);

/// Serves this port for as long as the machine runs.
///
/// # Errors
/// If the port cannot be had.
pub(crate) fn serve(port: u16) -> io::Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))?;
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || echo(stream));
        }
    });
    Ok(())
}

/// Returns datagrams to the group at this port to their senders, for as long as the machine runs.
///
/// # Errors
/// If the port cannot be had, or no network card reaches the group.
pub(crate) fn serve_group(port: u16) -> io::Result<()> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port))?;
    socket.join_multicast_v4(&GROUP, &Ipv4Addr::UNSPECIFIED)?;
    thread::spawn(move || {
        let mut buffer = [0; 2048];
        while let Ok((length, from)) = socket.recv_from(&mut buffer) {
            // An unreachable sender gets no answer.
            let _ = socket.send_to(&buffer[..length], from);
        }
    });
    Ok(())
}

/// Echoes a stream until the peer hangs up or is gone.
fn echo(mut stream: TcpStream) {
    let mut buffer = vec![0; BUFFER];
    while let Ok(length @ 1..) = stream.read(&mut buffer) {
        if stream.write_all(&buffer[..length]).is_err() {
            return;
        }
    }
}
