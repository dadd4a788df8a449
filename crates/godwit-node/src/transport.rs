//! A byte stream that may be encrypted, and its parts once an engine takes over.

use std::io::{self, Read};
use std::pin::Pin;
use std::task::{Context, Poll};

use rustls::pki_types::CertificateDer;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsStream;

/// A socket with or without TLS.
#[derive(Debug)]
pub(crate) enum Transport<S> {
    /// Without.
    Plain(S),
    /// With; the handshake is complete.
    Tls(Box<TlsStream<S>>),
}

/// What a [`Transport`] is made of.
#[derive(Debug)]
pub(crate) struct Parts<S> {
    /// The socket.
    pub(crate) socket: S,
    /// The TLS session.
    pub(crate) tls: Option<rustls::Connection>,
    /// Plaintext that has arrived and was not read.
    pub(crate) received: Vec<u8>,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Transport<S> {
    /// The certificate chain that the other side proved to be its own.
    pub(crate) fn certificates(&self) -> Option<&[CertificateDer<'static>]> {
        match self {
            Self::Plain(_) => None,
            Self::Tls(stream) => stream.get_ref().1.peer_certificates(),
        }
    }

    /// Takes the stream apart. What the session wants to send should be flushed before.
    ///
    /// # Errors
    /// What arrived is not valid TLS.
    pub(crate) fn into_parts(self) -> io::Result<Parts<S>> {
        let (socket, mut session) = match self {
            Self::Plain(socket) => {
                return Ok(Parts {
                    socket,
                    tls: None,
                    received: Vec::new(),
                });
            }
            Self::Tls(stream) => match *stream {
                TlsStream::Client(stream) => {
                    let (socket, session) = stream.into_inner();
                    (socket, rustls::Connection::Client(session))
                }
                TlsStream::Server(stream) => {
                    let (socket, session) = stream.into_inner();
                    (socket, rustls::Connection::Server(session))
                }
            },
        };
        session.process_new_packets().map_err(io::Error::other)?;
        let mut received = Vec::new();
        match session.reader().read_to_end(&mut received) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        Ok(Parts {
            socket,
            tls: Some(session),
            received,
        })
    }
}

impl Transport<TcpStream> {
    /// Waits for the other side to close the connection; for ever when it sends something first.
    /// Nothing that it sends is lost.
    pub(crate) async fn closed(&mut self) {
        let open = match self {
            Self::Plain(socket) => socket.peek(&mut [0]).await.is_ok_and(|bytes| bytes > 0),
            Self::Tls(stream) => stream.fill_buf().await.is_ok_and(|bytes| !bytes.is_empty()),
        };
        if open {
            std::future::pending().await
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Transport<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_read(context, buffer),
            Self::Tls(stream) => Pin::new(stream.as_mut()).poll_read(context, buffer),
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Transport<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write(context, bytes),
            Self::Tls(stream) => Pin::new(stream.as_mut()).poll_write(context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_flush(context),
            Self::Tls(stream) => Pin::new(stream.as_mut()).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Tls(stream) => Pin::new(stream.as_mut()).poll_shutdown(context),
        }
    }
}
