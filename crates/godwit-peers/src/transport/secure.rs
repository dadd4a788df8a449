//! TLS over an asynchronous socket.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use godwit_io::tls::{Handshake, Session, TlsError};
use rustls::pki_types::CertificateDer;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};

/// A socket and its TLS session, whose handshake is complete.
#[derive(Debug)]
pub struct SecureStream<S> {
    socket: S,
    session: Session,
    certificates: Vec<CertificateDer<'static>>,
}

/// Performs a handshake between nodes.
///
/// # Errors
/// The handshake or the connection fails. The socket is returned too, because the other side may not have read the
/// alert yet.
pub async fn shake_hands<S: AsyncRead + AsyncWrite + Unpin>(
    mut handshake: Handshake,
    mut socket: S,
) -> Result<SecureStream<S>, (io::Error, S)> {
    if let Err(error) = exchange(&mut handshake, &mut socket).await {
        return Err((error, socket));
    }
    match handshake.finish() {
        Ok((session, certificates)) => Ok(SecureStream {
            socket,
            session,
            certificates,
        }),
        Err(error) => Err((failed(error), socket)),
    }
}

async fn exchange(
    handshake: &mut Handshake,
    socket: &mut (impl AsyncRead + AsyncWrite + Unpin),
) -> io::Result<()> {
    loop {
        let complete = handshake.advance();
        let answer = handshake.to_send();
        let sent = socket.write_all(answer).await;
        let count = answer.len();
        handshake.sent(count);
        if complete.map_err(failed)? {
            return sent;
        }
        sent?;
        match socket.read(handshake.room_mut()).await? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => handshake.received(count),
        }
    }
}

impl<S> SecureStream<S> {
    /// Continues a session of rustls.
    pub fn library(socket: S, connection: rustls::Connection) -> io::Result<Self> {
        let certificates = connection.peer_certificates().unwrap_or_default().to_vec();
        Ok(Self {
            socket,
            session: Session::library(connection).map_err(failed)?,
            certificates,
        })
    }

    /// Returns the certificate chain with which the other side has authenticated.
    pub fn certificates(&self) -> &[CertificateDer<'static>] {
        &self.certificates
    }

    /// Takes the stream apart. Data still to be sent or read stays in the session.
    pub fn into_parts(self) -> (S, Session) {
        (self.socket, self.session)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> SecureStream<S> {
    /// Waits for plaintext to read. Returns false if no more comes.
    pub(crate) async fn readable(&mut self) -> io::Result<bool> {
        loop {
            match self.session.is_readable() {
                Ok(true) => return Ok(true),
                Err(TlsError::Closed) => return Ok(false),
                Err(error) => return Err(failed(error)),
                Ok(false) => {}
            }
            match self.socket.read(self.session.room_mut()).await? {
                0 => return Ok(false),
                count => self.session.received(count),
            }
        }
    }

    /// Sends all waiting ciphertext.
    fn poll_send(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            let ciphertext = self.session.to_send().map_err(failed)?;
            if ciphertext.is_empty() {
                return Poll::Ready(Ok(()));
            }
            match ready!(Pin::new(&mut self.socket).poll_write(context, ciphertext))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                count => self.session.sent(count),
            }
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for SecureStream<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if buffer.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        loop {
            match this.session.read(buffer.initialize_unfilled()) {
                Err(TlsError::Closed) => return Poll::Ready(Ok(())),
                Err(error) => return Poll::Ready(Err(failed(error))),
                Ok(0) => {}
                Ok(count) => {
                    buffer.advance(count);
                    return Poll::Ready(Ok(()));
                }
            }
            let mut ciphertext = ReadBuf::new(this.session.room_mut());
            ready!(Pin::new(&mut this.socket).poll_read(context, &mut ciphertext))?;
            match ciphertext.filled().len() {
                // Without the end of the session, the stream may be truncated.
                0 => return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into())),
                count => this.session.received(count),
            }
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for SecureStream<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        // Makes room: the written data is sent with the next write at the latest.
        ready!(this.poll_send(context))?;
        let taken = this.session.write(bytes).map_err(failed)?;
        if let Poll::Ready(Err(error)) = this.poll_send(context) {
            return Poll::Ready(Err(error));
        }
        Poll::Ready(Ok(taken))
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(this.poll_send(context))?;
        Pin::new(&mut this.socket).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.session.close();
        ready!(this.poll_send(context))?;
        Pin::new(&mut this.socket).poll_shutdown(context)
    }
}

/// Keeps rustls' error accessible: people are told of its certificate errors.
fn failed(error: TlsError) -> io::Error {
    match error {
        TlsError::Session(error) => io::Error::new(io::ErrorKind::InvalidData, error),
        other => io::Error::other(other),
    }
}
