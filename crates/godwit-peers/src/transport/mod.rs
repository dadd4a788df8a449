//! A byte stream with optional encryption, and its parts once an engine takes over.

pub mod secure;

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use godwit_io::tls::Session;
use rustls::pki_types::CertificateDer;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use self::secure::SecureStream;

/// A socket with or without TLS.
#[derive(Debug)]
pub enum Transport<S> {
    /// Without TLS.
    Plain(S),
    /// With TLS; the handshake is complete.
    Tls(Box<SecureStream<S>>),
}

impl<S> Transport<S> {
    /// Returns the certificate chain with which the other side has authenticated.
    pub fn certificates(&self) -> Option<&[CertificateDer<'static>]> {
        match self {
            Self::Plain(_) => None,
            Self::Tls(stream) => Some(stream.certificates()),
        }
    }

    /// Takes the stream apart. Data still to be sent or read stays in the session.
    pub fn into_parts(self) -> (S, Option<Session>) {
        match self {
            Self::Plain(socket) => (socket, None),
            Self::Tls(stream) => {
                let (socket, session) = stream.into_parts();
                (socket, Some(session))
            }
        }
    }
}

impl<S> Transport<S> {
    /// Returns the socket without its TLS session, from here on in the clear. Must be called while this side has the
    /// turn: data waiting in the session would be lost.
    ///
    /// # Errors
    /// Data waits to be sent or read.
    pub(crate) fn into_clear(self) -> io::Result<Self> {
        match self.into_parts() {
            (_, Some(session)) if !session.is_drained() => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "it went on speaking where this node has to speak first",
            )),
            (socket, _) => Ok(Self::Plain(socket)),
        }
    }
}

impl Transport<TcpStream> {
    /// Waits for the other side to close the connection. Waits forever if the other side sends data first, and loses
    /// none of the data.
    pub async fn closed(&mut self) {
        let open = match self {
            Self::Plain(socket) => socket.peek(&mut [0]).await.is_ok_and(|bytes| bytes > 0),
            Self::Tls(stream) => stream.readable().await.unwrap_or(false),
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
