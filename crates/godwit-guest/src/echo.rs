//! Servers on the machine's network: they say everything back that they are told.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::thread;

/// What is read at once.
const BUFFER: usize = 64 << 10;

/// The group of hosts that is listened to.
const GROUP: Ipv4Addr = Ipv4Addr::new(239, 80, 0, 1);

/// Serves this port for as long as the machine runs.
///
/// # Errors
/// When the port cannot be had.
pub(crate) fn serve(port: u16) -> io::Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))?;
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || echo(stream));
        }
    });
    Ok(())
}

/// Says back what is sent to a group of hosts at this port, to who sent it, for as long as the machine runs.
///
/// # Errors
/// When the port cannot be had, or no network card reaches the group.
pub(crate) fn serve_group(port: u16) -> io::Result<()> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port))?;
    socket.join_multicast_v4(&GROUP, &Ipv4Addr::UNSPECIFIED)?;
    thread::spawn(move || {
        let mut buffer = [0; 2048];
        while let Ok((length, from)) = socket.recv_from(&mut buffer) {
            // Who cannot be reached hears nothing.
            let _ = socket.send_to(&buffer[..length], from);
        }
    });
    Ok(())
}

/// Whoever hangs up, or is gone, ends the conversation.
fn echo(mut stream: TcpStream) {
    let mut buffer = vec![0; BUFFER];
    while let Ok(length @ 1..) = stream.read(&mut buffer) {
        if stream.write_all(&buffer[..length]).is_err() {
            return;
        }
    }
}
