//! A server on the machine's network: says everything back that it is told.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::thread;

/// What is read at once.
const BUFFER: usize = 64 << 10;

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

/// Whoever hangs up, or is gone, ends the conversation.
fn echo(mut stream: TcpStream) {
    let mut buffer = vec![0; BUFFER];
    while let Ok(length @ 1..) = stream.read(&mut buffer) {
        if stream.write_all(&buffer[..length]).is_err() {
            return;
        }
    }
}
